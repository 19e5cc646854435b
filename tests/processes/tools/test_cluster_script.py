"""What one machine of a run does: the real `node.sh`, with a program that notes how it was called."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage import until
from trireme.tools.cluster.job import NODE_SCRIPT, SECRETS, Job, SubmitOptions, node_script, write_secrets
from trireme.tools.cluster.nodes import ClusterPlan
from trireme.tools.cluster.slurm import batch_script

DEADLINE_S = 30

# In place of the interpreter: `PROGRAM -m trireme.cli.NAME ...`. Ends as PLAN says, a word for each time it is started.
RECORDER = """
    import json, os, signal, subprocess, sys, time
    name = sys.argv[2].rpartition(".")[2]
    notes = os.path.join(os.environ["NOTES"], f"{name}.jsonl")
    tries = sum(1 for _ in open(notes)) if os.path.exists(notes) else 0
    with open(notes, "a") as file:
        file.write(json.dumps({"argv": sys.argv[3:], "pid": os.getpid(), "environ": dict(os.environ)}) + "\\n")
    def end(number, _):
        with open(notes + ".ended", "a") as file:
            file.write(f"{number}\\n")
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    print("says", name, flush=True)
    plan = json.loads(os.environ["PLAN"]).get(name, [0])
    code = plan[min(tries, len(plan) - 1)]
    if code == "step":
        with open(os.environ["METRICS"], "a") as file:
            file.write("{}\\n")
        code = 1
    if code == "leave":
        left = subprocess.Popen(["sleep", "60"])
        with open(notes + ".left", "w") as file:
            file.write(str(left.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if code == "stay":
        time.sleep(60)
    if code == "outlive":
        trainer = notes.replace(name, "trainer")
        while not os.path.exists(trainer) or os.path.exists(f"/proc/{json.loads(open(trainer).readline())['pid']}"):
            time.sleep(0.01)
        time.sleep(1.2)  # in which the machine looks twice
        code = 0
    sys.exit(code)
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "notes").mkdir()
        program = folder / "a program"
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(RECORDER)}")
        program.chmod(0o755)
        state = folder / "it's here"
        state.mkdir()
        run, two = folder / "out puts" / "run", ClusterPlan(2, 0, 1)
        self.job = Job("20260102-030405-ab12", "run", two, run, state, state, "", python=str(program), restarts=2)

    def spread(self, *plan: int) -> None:
        self.job = replace(self.job, plan=ClusterPlan(*plan))

    def start(self, index: int, to_terminal: bool = False, **plan: list[Any]) -> subprocess.Popen[str]:
        """Start machine number `index`, whose processes end as `plan` says."""
        script = self.job.state / NODE_SCRIPT
        script.write_text(node_script(self.job, to_terminal=to_terminal, pause_s=0, leave_s=0))
        addresses = [f"h{machine}" for machine in range(self.job.plan.num_nodes)]
        told = {"NOTES": str(self.folder / "notes"), "METRICS": str(self.job.run / "metrics.jsonl")}
        return subprocess.Popen(
            ["bash", str(script), str(index), *addresses], env=os.environ | told | {"PLAN": json.dumps(plan)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, index: int = 0, to_terminal: bool = False, **plan: list[Any]) -> tuple[int, str]:
        process = self.start(index, to_terminal, **plan)
        said, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, said

    def notes(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / "notes" / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def argv(self, name: str) -> list[list[str]]:
        return [note["argv"] for note in self.notes(name)]

    def ended(self, name: str) -> str:
        return "".join(file.read_text() for file in (self.folder / "notes").glob(f"{name}.jsonl.ended"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("plan", "restarts", "code", "starts"),
    [
        ([2], 2, 2, 1),
        ([1], 2, 1, 3),
        (["step", "step", "step", 2], 1, 2, 4),  # each step resets the count
    ],
)
def test_a_process_is_restarted_until_its_exit_is_final_or_it_makes_no_progress(machine, plan, restarts, code, starts):
    machine.job = replace(machine.job, restarts=restarts)
    assert machine.run(inference=plan)[0] == code
    assert len(machine.notes("inference")) == starts


def test_a_process_that_dies_is_restarted_alone_and_resumes(machine):
    code, said = machine.run(1, trainer=["stay"], orchestrator=[1, 0])
    assert code == 0, said
    assert ["--resume" in argv for argv in machine.argv("orchestrator")] == [False, True]
    assert "orchestrator died with exit code 1" in said
    assert not Path(f"/proc/{machine.notes('trainer')[0]['pid']}").exists(), "ends with the orchestrator"


def test_what_a_dead_process_leaves_behind_is_killed_before_its_successor_starts(machine):
    assert machine.run(inference=["leave", 2])[0] == 2
    left = Path("/proc", (machine.folder / "notes" / "inference.jsonl.left").read_text(), "stat")
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_trainer_that_has_finished_does_not_end_the_machine(machine):
    code, said = machine.run(1, trainer=[0], orchestrator=["outlive"])
    assert (code, machine.ended("orchestrator")) == (0, ""), said


def test_a_job_that_starts_again_resumes_from_what_it_had(machine):
    """A requeued job, or a pod in another's place: the marks are on disk. What a process prints is in its log, and in
    a pod in the terminal too."""
    machine.job = replace(machine.job, goes_back=True)
    for to_terminal in (False, True):
        _, shown = machine.run(to_terminal=to_terminal, inference=[2])
        assert ("says inference\n" in shown) == to_terminal
    assert (machine.job.run / "logs" / "inference.stdout").read_text() == "says inference\n" * 2
    first, second = machine.argv("inference")
    assert "--resume" not in first
    assert second[-3:] == ["--resume", "--trainer.ckpt.resume-step", "none"]


def test_rl_resumes_only_a_run_of_its_own(machine):
    """Before it has written its configuration there is nothing to resume; an older file is another run's."""
    machine.spread(1, 0)
    earlier = machine.job.run / "configs" / "run.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    assert machine.run(rl=[2])[0] == 2
    assert machine.run(rl=[0])[0] == 0
    earlier.touch()
    machine.run(rl=[2])
    own = ["@", f"{machine.job.state}/run.toml"]
    assert machine.argv("rl") == [own, own, [*own, "--resume"]]


def test_every_process_is_told_all_addresses_its_place_and_its_gpus(machine):
    machine.spread(3, 4, 2)
    machine.run(1, inference=[2])
    machine.run(2)
    hosts = ["--hosts.inference", "h0", "h1", "--hosts.orchestrator", "h2", "--hosts.trainer", "h2"]
    common = ["@", f"{machine.job.state}/run.toml", *hosts]
    assert machine.argv("inference") == [[*common, "--inference-gpu-ids", "0", "1", "2", "3"]]
    assert machine.notes("inference")[0]["environ"]["TRIREME_NODE"] == "1"
    assert machine.argv("trainer") == [[*common, "--trainer-gpu-ids", "0", "1", "2", "3"]]
    assert machine.argv("orchestrator") == [common]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGURG])
def test_a_machine_that_is_asked_to_end_asks_each_process_once_and_waits(machine, number):
    """Twice would mean "at once" to `rl`."""
    process = machine.start(1, trainer=["stay"], orchestrator=["stay"])
    until(lambda: machine.notes("trainer") and machine.notes("orchestrator"))
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, said
    for name in ("trainer", "orchestrator"):
        assert machine.ended(name) == "15\n"
        assert not Path(f"/proc/{machine.notes(name)[0]['pid']}").exists()


def test_secrets_reach_the_processes_and_no_script(machine):
    write_secrets(machine.job.state / SECRETS, {"API_KEY": "it's $HOME `x`", "TRIREME_TOKEN": "t0k3n"})
    machine.run()
    told = machine.notes("inference")[0]["environ"]
    assert (told["API_KEY"], told["TRIREME_TOKEN"]) == ("it's $HOME `x`", "t0k3n")
    assert stat.S_IMODE((machine.job.state / SECRETS).stat().st_mode) == 0o600
    assert "t0k3n" not in (machine.job.state / NODE_SCRIPT).read_text()


@pytest.mark.parametrize("name", ["run", "a\n#SBATCH --uid=0", "$(touch x); 'y' %j"])
def test_a_batch_script_is_written_as_a_shell_reads_it(machine, name):
    script = batch_script(replace(machine.job, name=name), SubmitOptions(), workdir=machine.folder)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (checked.returncode, checked.stderr) == (0, "")
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert re.fullmatch(r"#SBATCH --job-name=[\w.-]+", options[0])
    assert not [line for line in options if "uid" in line and "job-name" not in line]
