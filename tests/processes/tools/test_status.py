"""`trireme status`, `logs` and `cancel` of a run on this machine, and of one on a cluster that only takes notes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from support.engines.answering import answering_http
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, DeadlineExceeded, TriremeError
from trireme.base.paths import RunPaths
from trireme.base.processes import free_port
from trireme.base.token import TOKEN, write_key
from trireme.config.files import write_run
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.launch.folder import LOCKS, hold
from trireme.monitor.lines import LinesFile
from trireme.monitor.spans import Span
from trireme.tools.cluster import status as status_module
from trireme.tools.cluster.cancel import command as cancel
from trireme.tools.cluster.cancel import end_launcher
from trireme.tools.cluster.job import Submission, submissions_of, write_secrets
from trireme.tools.cluster.logs import command as logs
from trireme.tools.cluster.status import command as status

DEADLINE_S = 30
PORT = free_port()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(status_module, "POLL_S", 0.01)
    values: dict[str, Any] = {"output_dir": str(tmp_path), "name": "a run", "max_steps": 8, "device": "cpu"}
    values["orchestrator"] = {"server": {"port": PORT}, "env": [{"id": "say"}]}
    config = resolve(RunConfig.model_validate(values), Devices(cores=1))
    write_run(config, config.paths.run_config)
    config.paths.logs.mkdir()
    for process in ("inference", "trainer"):
        config.paths.log(process).write_text("".join(f"{process} says {number}\n" for number in range(9)))
    add_steps(config.paths.root, 0, 3)
    return config.paths.root


def add_steps(run: Path, first: int, end: int) -> None:
    with open(RunPaths(run).metrics, "a") as file:
        for step in range(first, end):
            for process, numbers in (("orchestrator", {"reward/mean": step / 10}), ("trainer", {"loss/mean": 0.5})):
                file.write(json.dumps({"step": step, "process": process, "time_s": 1.0} | numbers) + "\n")


def answering(run: Path, token: str = "") -> AbstractContextManager[int]:
    wait = {"who": "orchestrator", "text": "orchestrator waits 12 s for rollouts"}
    body = {"run": str(run), "state": "running", "version": 3, "max_steps": 8, "waits": [wait]}
    return answering_http(
        lambda _, shown: (200 if not token or shown == f"Bearer {token}" else 401, json.dumps(body).encode()), PORT
    )


def said(capsys: pytest.CaptureFixture[str], run: Path, *flags: str) -> str:
    assert status([str(run), *flags]) == 0
    return capsys.readouterr().out


def test_a_run_without_a_process_is_told_from_disk(run, capsys):
    """An answer about another run is not taken for this one's: ports are used again."""
    with open(RunPaths(run).metrics, "a") as file:  # as a stranger may have written it
        file.write(json.dumps({"step": 2, "process": "orchestrator", "eval/\x1b[2J/reward": 0.5}) + "\n")
    with answering(run.parent / "another"):
        out = said(capsys, run)
    assert "3 of 8 steps are trained" in out
    assert "reward       0.000 -> 0.200" in out
    assert ("␛[2J" in out, "\x1b" in out) == (True, False)


def test_status_of_a_long_run_sums_up_its_newest_hours(run, capsys, monkeypatch):
    monkeypatch.setattr(status_module, "PIECE_BYTES", 4096)
    lines = LinesFile(RunPaths(run).spans)
    for step in range(100):
        wait_s = 0.75 if step < 20 else 0.25
        for what, begin_s, seconds in (("wait", step, wait_s), ("train", step + wait_s, 1 - wait_s)):
            lines.put(msgspec.json.encode(Span("trainer", what, float(begin_s), seconds, step)))
    lines.flush()
    size, last = RunPaths(run).spans.stat().st_size, said(capsys, run)
    assert size > 8192
    assert re.search(r"time +of the newest 0:[2-4]\d:\ntime +trainer: train 7[5-6]%, wait 2[4-5]%", last)


def test_a_submitted_run_that_is_at_work_answers_to_the_key_in_its_folder(run, capsys, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    record(run)
    write_key(run, "a key of its own")
    with answering(run, token="a key of its own"):
        out = said(capsys, run)
    assert "state        running, version 3; 3 of 8 steps are trained" in out
    assert "waits        orchestrator waits 12 s for rollouts" in out


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    for flags in ([], ["--follow"]):
        with pytest.raises(ConfigError, match="not a run's folder"):
            status([str(tmp_path), *flags])
    with pytest.raises(ConfigError, match="There are no logs"):
        logs([str(tmp_path)])
    assert capsys.readouterr().out == ""


def damage(run: Path, scheduler: Path) -> None:
    RunPaths(run).configs.mkdir(parents=True)
    (RunPaths(run).configs / "run.json").write_text("no JSON")


def cancel_job(run: Path, scheduler: Path) -> None:
    (scheduler / "squeue.says").write_text("CANCELLED n1")


@pytest.mark.parametrize(("end", "words"), [(damage, "not valid JSON"), (cancel_job, "job 7: CANCELLED on n1")])
def test_a_queued_job_is_waited_for_until_it_writes_or_slurm_ends_it(
    tmp_path, scheduler, capsys, monkeypatch, end, words
):
    record(tmp_path / "queued")
    states = ["PENDING (Priority)", "REQUEUED", "RUNNING n1"]

    def pass_time(_: float) -> None:
        if states:
            (scheduler / "squeue.says").write_text(states.pop(0))
        else:
            end(tmp_path / "queued", scheduler)

    monkeypatch.setattr(status_module, "ASK_S", 0)
    its_time = SimpleNamespace(**vars(time) | {"sleep": pass_time})  # `subprocess` sleeps as well
    monkeypatch.setattr(status_module, "time", its_time)
    pass_time(0)
    with pytest.raises(ConfigError, match=words):
        status([str(tmp_path / "queued"), "--follow"])
    waits = [line.partition("job 7: ")[2].partition(";")[0] for line in capsys.readouterr().out.splitlines()]
    assert waits == ["PENDING (Priority)", "REQUEUED", "RUNNING on n1"]


@pytest.mark.parametrize(("where", "words"), [("kubernetes", "trireme logs .* -f"), ("slurm", "not in PATH here")])
def test_a_job_that_cannot_be_asked_about_is_not_waited_for_without_an_end(tmp_path, monkeypatch, where, words):
    record(tmp_path / "queued", scheduler=where)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(status_module, "CONFIGURED_S", -1)
    monkeypatch.setattr(status_module.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(ConfigError, match=words):
        status([str(tmp_path / "queued"), "--follow"])


def test_steps_are_followed_as_they_come_until_somebody_asks_it_to_end(run):
    command = [sys.executable, "-m", "trireme.cli.trireme", "status", str(run), "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "run: starting" in process.stdout.readline()
    add_steps(run, 3, 5)
    lines = [process.stdout.readline()]
    process.send_signal(signal.SIGTERM)
    lines += process.communicate(timeout=DEADLINE_S)[0].splitlines()
    assert process.returncode == 0
    assert next(line.split()[:2] for line in lines if line.startswith("step")) == ["step", "4/8"]


def test_to_follow_a_run_that_is_over_or_deserted_tells_how_it_stands(run, capsys, monkeypatch):
    monkeypatch.setattr(status_module, "DESERTED_S", 0.1)
    assert "3 of 8 steps are trained" in said(capsys, run, "--follow")
    add_steps(run, 3, 8)
    assert "finished; 8 of 8 steps are trained" in said(capsys, run, "--follow")


def test_a_submitted_run_is_followed_until_slurm_ends_its_job(run, scheduler, capsys, monkeypatch):
    record(run)
    answers = ["echo RUNNING n1", "echo Unable to contact slurm controller >&2; exit 1", "echo CANCELLED n1"]

    def pass_time(_: float) -> None:
        (scheduler / "squeue").write_text(f"#!/bin/sh\n{answers.pop(0)}\n")

    monkeypatch.setattr(status_module, "DESERTED_S", 0)
    monkeypatch.setattr(status_module, "time", SimpleNamespace(**vars(time) | {"sleep": pass_time}))
    pass_time(0)
    assert "3 of 8 steps are trained" in said(capsys, run, "--follow")
    assert answers == []


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(os, "execvp", lambda _, command: outputs.append(subprocess.check_output(command, text=True)))
    outputs: list[str] = []

    def show(*words: str) -> str:
        logs(list(words))
        return outputs.pop()

    return show


def test_logs_are_the_newest_lines_of_every_process_or_of_one(run, shown):
    lines = [line for line in shown(str(run), "-n", "1").splitlines() if "says" in line]
    assert lines == ["inference says 8", "trainer says 8"]
    assert shown(str(run), "trainer", "-n", "1") == "trainer says 8\n"
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
def launcher(run: Path, hearing: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, run, hearing], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


def test_cancel_ends_the_launcher_and_waits_for_it_or_names_it(run, capsys):
    with launcher(run, "hears") as process:
        assert "starting or stopping" in said(capsys, run)
        assert cancel([str(run)]) == 0
        assert process.wait(DEADLINE_S) == 0
    with launcher(run, "deaf") as process, pytest.raises(DeadlineExceeded, match=f"kill -9 {process.pid}"):
        end_launcher(RunPaths(run), wait_s=0.2)
    with pytest.raises(ConfigError, match="No launcher is running"):
        cancel([str(run)])


def test_cancel_ends_no_process_that_does_not_hold_the_runs_lock(run):
    """The pid in the lock's file may be that of a container, of another machine, or of a launcher that was killed."""
    with hold(RunPaths(run), "launcher"), subprocess.Popen(["sleep", "60"]) as another:
        (run / LOCKS["launcher"]).write_text(f"{another.pid}\n")
        try:
            with pytest.raises(ConfigError, match=f"process {another.pid} of this machine does not hold"):
                end_launcher(RunPaths(run), wait_s=0.2)
            assert another.poll() is None
        finally:
            another.kill()


def record(run: Path, identity: str = "20260102-030405-ab12", scheduler: Any = "slurm", **more: Any) -> Path:
    folder = submissions_of(run) / identity
    folder.mkdir(parents=True)
    Submission(identity, scheduler, "7", str(run), folder=folder, **more).write()
    return folder


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Slurm's and Kubernetes' commands: they note their words, and answer with what the file of their name holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "kubectl"):
        words = f'#!/bin/sh\necho "{name} $*" >>{folder}/words\ncat {folder}/{name}.says 2>/dev/null\nexit 0\n'
        (folder / name).write_text(words)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize(
    ("answer", "state"),
    [("RUNNING n[1-2]", "RUNNING on n[1-2]"), ("PENDING (None)", "PENDING"), ("", "ended with exit code 3")],
)
def test_slurm_is_asked_where_it_still_knows_the_job(run, scheduler, capsys, answer, state):
    (record(run) / "ended").write_text("3\n")
    (scheduler / "squeue.says").write_text(answer)
    assert said(capsys, run).startswith(f"job          slurm 7: {state}\n")


def test_cancelling_a_slurm_job_removes_the_secrets_of_its_run(run, shown, scheduler):
    folder = record(run)
    (folder / "slurm-7.log").write_text("step 1\n")
    assert shown(str(run)) == "step 1\n"
    write_secrets(folder / "secrets.sh", {"A": "1"})
    assert cancel([str(run)]) == 0
    assert (scheduler / "words").read_text() == "scancel 7\n"
    assert not (folder / "secrets.sh").exists()


def test_cancel_prefers_a_live_local_run_to_an_older_slurm_job(run, scheduler):
    record(run)
    with launcher(run, "hears") as process:
        assert cancel([str(run)]) == 0
        assert process.wait(DEADLINE_S) == 0
    assert not (scheduler / "words").exists()
    (scheduler / "scancel").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(TriremeError, match="`scancel 7` failed"):
        cancel([str(run)])


def test_kubernetes_run_is_deleted_without_its_volume(run, scheduler, shown, capsys):
    record(run, scheduler="kubernetes", namespace="lab")
    (scheduler / "kubectl.says").write_text("x-ab12   Running   0/1   5m\n")
    assert "job          kubernetes 7: x-ab12   Running" in said(capsys, run)
    shown(str(run), "-f")
    shown(str(run), "trainer")
    cancel([str(run)])
    state, inside, logs, log, deleted = (scheduler / "words").read_text().splitlines()
    prefix, selector = "kubectl --namespace lab", "--selector trireme-submission=20260102-030405-ab12"
    assert state == f"{prefix} get job 7 --no-headers"
    assert inside == f"{prefix} exec job/7 -- trireme status {run}"
    assert logs == f"{prefix} logs {selector} --follow --tail=20 --prefix --max-log-requests=64"
    assert log == f"{prefix} exec job/7 -- trireme logs --lines=20 -- {run} trainer"
    assert deleted == f"{prefix} delete job,service,secret,configmap {selector} --wait=false"
