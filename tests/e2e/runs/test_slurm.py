"""Jobs that a real Slurm checks, runs on several machines, stops at its time limit, puts back and cancels."""

import os
import re
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes.machines import open_machines, why_not
from support.processes.slurm_cluster import Cluster, missing, open_cluster
from trireme.base.errors import ConfigError
from trireme.tools.audit.audit import command as audit
from trireme.tools.cluster.cancel import command as cancel
from trireme.tools.cluster.job import Submission, find_submission
from trireme.tools.cluster.submit import command as submit

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("Slurm"), pytest.mark.skipif(bool(missing()), reason=missing())]

ROOT = Path(__file__).parents[3]
DEADLINE_S = 180

LINGERS = """
    import os, sys, time
    open(f"{os.environ['NOTES']}/{sys.argv[2]}.{os.environ['SLURMD_NODENAME']}", "w").close()
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with open_cluster(tmp_path_factory.mktemp("slurm"), machines=3, gpus=2) as opened:
        yield opened


@pytest.fixture
def run_file(cluster, tmp_path, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):  # for our own calls of Slurm's commands
        monkeypatch.setenv(name, cluster.environment[name])
    file = tmp_path / "hosted.toml"
    (tmp_path / "secrets.env").write_text("API_KEY='s3cret word'\n")
    file.write_text(
        textwrap.dedent(f"""
        model = "{ROOT}/models/reverse-text-tiny"
        max_steps = 3
        batch_size = 4
        rollouts_per_example = 2
        env_file = ["{tmp_path}/secrets.env"]

        [[env]]
        id = "reverse-text"
        """)
    )
    return file


def write_program(file: Path, text: str) -> Path:
    file.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    file.chmod(0o755)
    return file


def submitted(run: Path) -> Submission:
    found = find_submission(run)
    assert found is not None
    return found


def wait_for(condition: Callable[[], object], told: Callable[[], str]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, told()
        time.sleep(0.05)


def log_of(run: Path) -> str:
    return "\n".join(file.read_text() for file in submitted(run).folder.glob("slurm-*.log"))


def test_what_is_only_shown_or_what_slurm_refuses_is_not_submitted(run_file, tmp_path, cluster, capsys):
    words = [str(run_file), "--on=slurm", f"--output-dir={tmp_path}/out", "--nodes=3", "--gpus-per-node=2"]
    before = cluster.ask("squeue", "--noheader")
    assert submit([*words, "--dry-run", "--time", "20"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Slurm says: Job \d+ to start at .* on nodes m\[0-2\] in partition tiny", shown), shown
    assert "s3cret" not in shown
    for flag, value in (("--partition", "huge"), ("--gpus-per-node", "4"), ("--time", "4h")):
        with pytest.raises(ConfigError, match="Slurm rejects the job: "):
            submit([*words, flag, value])
    assert cluster.ask("squeue", "--noheader") == before
    assert not list(tmp_path.glob("out/*.submissions/*"))


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_slurm_run_resumes_by_itself_after_its_time_limit(tmp_path):
    program = write_program(
        tmp_path / "program",
        f"""
        import os, sys
        engine = sys.argv[2] == "trireme.cli.inference"
        words = ["{ROOT}/tests/support/engines/scripted_engine.py", *sys.argv[3:]] if engine else sys.argv[1:]
        os.environ["PYTHONPATH"] = "{ROOT}/tests"
        os.execv(sys.executable, [sys.executable, *words])
        """,
    )
    run = tmp_path / "out" / "again"
    flags = ["--nodes", "2", "--gpus-per-node", "0", "--python", str(program), "--output-dir", str(run.parent)]
    flags += ["--name", "again", "--max-steps", "12", "--inference.start-timeout-s", "240"]
    with open_machines(2) as machines, open_cluster(tmp_path / "slurm", machines=machines) as cluster:
        words = [sys.executable, "-m", "trireme.cli.trireme", "submit", "tests/e2e/scripted.toml", "--on", "slurm"]
        assert "submitted to slurm as " in cluster.ask(*words, *flags)
        job = submitted(run).job
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4, lambda: told(cluster, run))
        cluster.ask("scancel", "--signal=TERM", "--batch", job)
        wait_for(lambda: cluster.waiting(job) == "PENDING", lambda: told(cluster, run))
        assert "back into the queue" in log_of(run)
        waiting = f"slurm {job}: PENDING (BeginTime)"  # the reason comes from Slurm's scheduler, a moment later
        wait_for(lambda: waiting in cluster.ask(*words[:3], "status", str(run)), lambda: told(cluster, run))
        cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets two minutes pass before
        wait_for(lambda: "http://m0:8000" in cluster.ask(*words[:3], "status", str(run)), lambda: told(cluster, run))
        state = cluster.wait_until(job, "COMPLETED", "FAILED", within_s=DEADLINE_S)
        assert state == "COMPLETED", told(cluster, run)
        assert f"slurm {job}: COMPLETED" in cluster.ask(*words[:3], "status", str(run))
    assert not (submitted(run).folder / "secrets.sh").exists()
    assert audit([str(run)]) == 0
    assert not list(run.parent.glob("again.earlier-*")), "it began afresh"
    assert re.search(r"step +12/12", log_of(run)), log_of(run)


def told(cluster: Cluster, run: Path) -> str:
    logs = [log_of(run), *(f"{file.name}\n{file.read_text()[-3000:]}" for file in run.glob("logs/*.stdout"))]
    return "\n".join([cluster.ask("scontrol", "show", "job"), *logs])


def test_a_job_that_is_cancelled_does_not_come_back(run_file, tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    words = ["--python", str(write_program(tmp_path / "program", LINGERS)), "--output-dir", f"{tmp_path}/out"]
    words += ["--name", "unwanted", "--nodes", "2", "--gpus-per-node", "2"]
    assert submit([str(run_file), "--on", "slurm", *words]) == 0
    submission = submitted(run := tmp_path / "out" / "unwanted")
    wait_for((tmp_path / "trireme.cli.trainer.m1").exists, lambda: log_of(run))
    assert cancel([str(run)]) == 0
    assert cluster.wait_until(submission.job, "CANCELLED") == "CANCELLED"
    assert not (submission.folder / "secrets.sh").exists()
    assert os.listdir(submission.folder)
