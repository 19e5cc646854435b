"""`trireme status`, `logs` and `cancel` of a run on this machine, and of one on a cluster that only takes notes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.paths import RunPaths
from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.cli.cancel import cancel, end_launcher
from trireme.cli.logs import logs
from trireme.cli.status import _Watch as Following
from trireme.cli.status import status
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.config.written import write_run
from trireme.launch.cluster.job import Submission, find_submission, submissions_of
from trireme.launch.cluster.secrets import write_secrets

DEADLINE_S = 30


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def run(tmp_path: Path, port: int) -> Path:
    """Three of eight steps, as they are on disk."""
    values: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "name": "a run",
        "max_steps": 8,
        "device": "cpu",
        "orchestrator": {"server": {"port": port}, "env": [{"id": "say"}]},
    }
    config = resolve(RunConfig.model_validate(values), Devices(cores=1))
    write_run(config, config.paths.run_config)
    config.paths.logs.mkdir()
    for process in ("inference", "trainer"):
        config.paths.log(process).write_text("".join(f"{process} says {number}\n" for number in range(9)))
    add_steps(config.paths, 0, 3)
    return config.paths.root


def add_steps(paths: RunPaths, first: int, end: int) -> None:
    with open(paths.metrics, "a") as file:
        for step in range(first, end):
            file.write(
                json.dumps({"step": step, "process": "orchestrator", "time_s": 1.0, "reward/mean": step / 10}) + "\n"
            )
            file.write(json.dumps({"step": step, "process": "trainer", "time_s": 1.0, "loss/mean": 0.5}) + "\n")


@contextmanager
def answering(port: int, body: dict[str, Any], token: str = "") -> Iterator[None]:
    """An orchestrator, as far as it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = not token or self.headers.get("Authorization") == f"Bearer {token}"
            self.send_response(200 if right else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def live(run: Path) -> dict[str, Any]:
    wait = {"who": "orchestrator", "text": "orchestrator waits 12 s for rollouts"}
    engines = [{"url": "http://127.0.0.1:1", "state": "live"}]
    return {"run": str(run), "state": "running", "version": 3, "max_steps": 8, "waits": [wait], "engines": engines}


def said(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    assert status([str(run)]) == 0
    return capsys.readouterr().out


def test_a_run_that_is_at_work_answers_itself(run, port, capsys):
    with answering(port, live(run)):
        out = said(capsys, run)
    assert "state        running, version 3; 3 of 8 steps are trained" in out
    assert "waits        orchestrator waits 12 s for rollouts" in out
    assert "engine       http://127.0.0.1:1 live" in out


def test_a_run_without_a_process_is_told_from_disk(run, capsys):
    out = said(capsys, run)
    assert "does not answer here; 3 of 8 steps are trained" in out
    assert "reward       0.000 -> 0.200" in out


def test_a_run_that_is_over_is_finished(run, capsys):
    add_steps(RunPaths(run), 3, 8)
    assert "finished; 8 of 8 steps are trained" in said(capsys, run)


def test_an_answer_about_another_run_is_not_taken_for_this_ones(run, port, capsys):
    """Ports are used again."""
    with answering(port, live(run) | {"run": str(run.parent / "another")}):
        assert "does not answer here" in said(capsys, run)


def test_the_orchestrator_is_asked_with_the_submissions_token(run, port, capsys, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    record(run)
    write_secrets(submitted(run).folder / "secrets.sh", {TOKEN: "a token of its own"})
    with answering(port, live(run), token="a token of its own"):
        assert "running, version 3" in said(capsys, run)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run's folder"):
        status([str(tmp_path)])
    with pytest.raises(ConfigError, match="there are no logs"):
        logs([str(tmp_path)])


def trireme(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trireme.cli.trireme", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_steps_are_followed_as_they_come_until_somebody_asks_it_to_end(run):
    process = trireme("status", str(run), "--follow")
    assert process.stdout is not None
    assert "run: starting" in process.stdout.readline()
    add_steps(RunPaths(run), 3, 5)
    lines = [process.stdout.readline()]
    process.send_signal(signal.SIGTERM)
    lines += process.communicate(timeout=DEADLINE_S)[0].splitlines()
    assert process.returncode == 0
    assert [line.split("reward")[0].split() for line in lines if line.startswith("step")][:1] == [["step", "4/8"]]


def test_to_follow_a_run_that_is_over_tells_how_it_stands(run, capsys):
    add_steps(RunPaths(run), 3, 8)
    assert status([str(run), "--follow"]) == 0
    said = capsys.readouterr().out
    assert "finished; 8 of 8 steps are trained" in said
    assert "starting" not in said


def test_to_follow_a_run_that_nobody_is_at_work_on_ends_and_tells_how_it_stands(run, capsys, monkeypatch):
    monkeypatch.setattr("trireme.cli.status.DESERTED_S", 1.0)
    assert status([str(run), "--follow"]) == 0
    assert "its orchestrator does not answer here; 3 of 8 steps are trained" in capsys.readouterr().out


class Seen:
    """A view, as far as it is watched."""

    def __init__(self, num_done: int, status: object = None) -> None:
        self.progress = SimpleNamespace(num_done=num_done)
        self.status = status


def test_a_run_elsewhere_is_followed_until_its_orchestrator_has_been_there_and_is_gone(run, monkeypatch):
    """It may be gone on with to more steps than those that it has: who follows it is there before."""
    monkeypatch.setattr("trireme.cli.status.DESERTED_S", 0.2)
    watch = Following(run, 8, is_far=True)
    assert watch.goes_on(Seen(8))
    assert watch.goes_on(Seen(8, status="running"))
    assert not watch.goes_on(Seen(8))
    assert Following(run, 8, is_far=False).goes_on(Seen(8)) is False
    waiting = Following(run, 8, is_far=True)
    assert waiting.goes_on(Seen(3))
    time.sleep(0.3)
    assert waiting.goes_on(Seen(3))  # whoever knows that it will not come says so
    nobody = Following(run, 8, is_far=True)
    assert nobody.goes_on(Seen(8))
    time.sleep(0.3)
    assert not nobody.goes_on(Seen(8))


def test_logs_are_the_newest_lines_of_every_process_or_of_one(run):
    out, _ = trireme("logs", str(run), "-n", "2").communicate(timeout=DEADLINE_S)
    assert "inference says 8" in out
    assert "trainer says 7" in out
    assert "says 6" not in out
    out, _ = trireme("logs", str(run), "trainer", "-n", "1").communicate(timeout=DEADLINE_S)
    assert out == "trainer says 8\n"


def test_a_process_without_a_log_is_named_with_those_that_have_one(run):
    with pytest.raises(ConfigError, match="Did you mean `trainer`"):
        logs([str(run), "trianer"])


HOLDER = """
import signal, sys, time
from pathlib import Path
from trireme.base.paths import RunPaths
from trireme.launch.folder import hold_folder
with hold_folder(RunPaths(Path(sys.argv[1]))):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "deaf" else lambda *_: sys.exit(0))
    print("holds", flush=True)
    time.sleep(60)
"""


@contextmanager
def launcher(run: Path, *, deaf: bool = False) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", HOLDER, str(run), "deaf" if deaf else "hears"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def test_cancel_ends_the_launcher_and_waits_for_it(run, capsys):
    with launcher(run) as process:
        assert "coming up, or going down" in said(capsys, run)
        assert cancel([str(run)]) == 0
        assert process.wait(DEADLINE_S) == 0
    with pytest.raises(ConfigError, match="no launcher is at work"):
        cancel([str(run)])


def test_a_launcher_that_does_not_end_is_named(run):
    with launcher(run, deaf=True) as process, pytest.raises(DeadlineExceeded, match=f"kill -9 {process.pid}"):
        end_launcher(RunPaths(run), wait_s=0.2)


# on a cluster


def record(run: Path, identity: str = "20260102-030405-ab12", scheduler: Any = "slurm", **more: Any) -> None:
    folder = submissions_of(run) / identity
    folder.mkdir(parents=True)
    Submission(identity, scheduler, "7", str(run), {"rl": 0}, folder=folder, **more).write()


def submitted(run: Path) -> Submission:
    found = find_submission(run)
    assert found is not None
    return found


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's and Kubernetes' commands: they note their words, and answer with what the file of their name holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "sacct", "scancel", "kubectl"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{folder}/words\ncat {folder}/{name}.says 2>/dev/null\nexit 0\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ({"squeue": "RUNNING|n[1-2]"}, "RUNNING on n[1-2]"),
        ({"squeue": "PENDING|(Priority)"}, "PENDING (Priority)"),
        ({"scontrol": "JobId=7 JobState=TIMEOUT Reason=None"}, "TIMEOUT"),
        ({"sacct": "  COMPLETED \n"}, "COMPLETED"),
        ({}, "ended with exit code 3"),
    ],
)
def test_slurm_is_asked_where_it_still_knows_the_job(run, scheduler, capsys, answers, state):
    record(run)
    (submitted(run).folder / "ended").write_text("3\n")
    for name, text in answers.items():
        (scheduler / f"{name}.says").write_text(text)
    assert said(capsys, run).startswith(f"job          slurm 7: {state}\n")


def test_the_newest_submission_counts(run):
    record(run, "20260102-030405-ab12")
    record(run, "20260103-000000-0000")
    assert submitted(run).id == "20260103-000000-0000"
    assert submitted(submissions_of(run) / "20260102-030405-ab12").id == "20260102-030405-ab12"


def test_a_submitted_runs_logs_are_its_jobs_or_a_processs(run, scheduler):
    record(run)
    (submitted(run).folder / "slurm-7.log").write_text("step 1\n")
    out, _ = trireme("logs", str(run)).communicate(timeout=DEADLINE_S)
    assert out == "step 1\n"
    out, _ = trireme("logs", str(run), "trainer", "-n", "1").communicate(timeout=DEADLINE_S)
    assert out == "trainer says 8\n"


def test_a_cancelled_job_leaves_a_mark_and_no_secrets(run, scheduler):
    record(run)
    folder = submitted(run).folder
    write_secrets(folder / "secrets.sh", {"A": "1"})
    assert cancel([str(run)]) == 0
    assert (scheduler / "words").read_text() == "scancel 7\n"
    assert (folder / "cancelled").exists()
    assert not (folder / "secrets.sh").exists()


def test_a_run_in_kubernetes_is_asked_inside_its_pod(run, scheduler, capsys):
    record(run, scheduler="kubernetes", namespace="lab")
    (scheduler / "kubectl.says").write_text('{"status": {"active": 1, "ready": 1}}')
    out = said(capsys, run)
    assert "job          kubernetes 7: RUNNING, 1 of 1 pods ready" in out
    words = (scheduler / "words").read_text()
    assert f"-- trireme status {run}" in words
    assert all(line.startswith("kubectl --namespace lab ") for line in words.splitlines())


def test_a_run_in_kubernetes_is_deleted_and_its_volume_kept(run, scheduler):
    record(run, scheduler="kubernetes")
    cancel([str(run)])
    words = (scheduler / "words").read_text()
    assert words.startswith("kubectl delete job,service,secret,configmap --selector trireme-submission=2026")
    assert "volume" not in words


def test_a_record_that_is_damaged_is_named(run):
    record(run)
    (submitted(run).folder / "submission.json").write_text("{")
    with pytest.raises(ConfigError, match=r"submission\.json cannot be read"):
        status([str(run)])


def test_follow_waits_for_a_run_that_was_only_just_started(tmp_path):
    run = tmp_path / "fresh"
    run.mkdir()
    process = trireme("status", str(run), "--follow")
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=DEADLINE_S)
