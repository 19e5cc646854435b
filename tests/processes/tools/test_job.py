"""What one machine of a run does: the real `node.sh`, with a program that notes how it was called."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.processes.stage import until
from trireme.config.files import PROCESSES
from trireme.tools.cluster.job import NODE_SCRIPT, SECRETS, Job, SubmitOptions, node_script, write_secrets
from trireme.tools.cluster.nodes import ClusterPlan
from trireme.tools.cluster.slurm import batch_script

DEADLINE_S = 30

# In place of the interpreter: `PROGRAM -m trireme.cli.NAME ...`. Ends as PLAN says, a word for each time it is started.
RECORDER = """
    import json, os, signal, subprocess, sys, time
    name = sys.argv[2].rpartition(".")[2]
    notes = os.path.join(os.environ["NOTES"], f"{name}.jsonl")
    def note(text, file=notes):
        with open(file, "a") as out:
            out.write(f"{text}\\n")
    code = 0
    def end(number, _):
        note(number, notes + ".ended")
        time.sleep(1.2 if code == "linger" else 0)  # in which the machine looks twice
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    note(json.dumps({"argv": sys.argv[3:], "pid": os.getpid(), "environ": dict(os.environ)}))
    print("says", name, flush=True)
    plan = json.loads(os.environ["PLAN"]).get(name, [0])
    code = plan[min(len(open(notes).readlines()), len(plan)) - 1]
    if code == "step":
        note("{}", os.environ["METRICS"])
        code = 1
    if code == "leave":
        note(subprocess.Popen(["sleep", "60"]).pid, notes + ".left")
        os.kill(os.getpid(), signal.SIGKILL)
    if code in ("stay", "linger"):
        note("", notes + ".stays")
        time.sleep(60)
    if code == "outlive":
        trainer = notes.replace(name, "trainer")
        while not os.path.exists(trainer) or os.path.exists(f"/proc/{json.loads(open(trainer).readline())['pid']}"):
            time.sleep(0.01)
        time.sleep(1.2)
        code = 0
    sys.exit(code)
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes_of = {name: folder / "notes" / f"{name}.jsonl" for name in ("rl", *PROCESSES)}
        (folder / "notes").mkdir()
        program = folder / "a program"
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(RECORDER)}")
        program.chmod(0o755)
        (state := folder / "it's here").mkdir()
        run, two = folder / "out puts" / "run", ClusterPlan(2, 0, 1)
        self.job = Job("20260102-030405-ab12", "run", two, run, state, state, "", python=str(program), restarts=2)

    def start(self, index: int, to_terminal: bool = False, **plan: list[Any]) -> subprocess.Popen[str]:
        """Start machine number `index`, whose processes end as `plan` says."""
        script = self.job.state / NODE_SCRIPT
        script.write_text(node_script(self.job, to_terminal=to_terminal, pause_s=0, leave_s=0))
        addresses = [f"h{machine}" for machine in range(self.job.plan.num_nodes)]
        environ = {"NOTES": str(self.folder / "notes"), "METRICS": str(self.job.run / "metrics.jsonl")}
        return subprocess.Popen(
            ["bash", str(script), str(index), *addresses], env=os.environ | environ | {"PLAN": json.dumps(plan)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, index: int = 0, to_terminal: bool = False, **plan: list[Any]) -> tuple[int, str]:
        process = self.start(index, to_terminal, **plan)
        shown, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, shown

    def notes(self, name: str) -> list[dict[str, Any]]:
        file = self.notes_of[name]
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def argv(self, name: str) -> list[list[str]]:
        return [note["argv"] for note in self.notes(name)]

    def is_alive(self, name: str) -> bool:
        return Path("/proc", str(self.notes(name)[0]["pid"])).exists()

    def extra(self, name: str, kind: str) -> str:
        file = self.notes_of[name].with_suffix(f".jsonl.{kind}")
        return file.read_text() if file.exists() else ""


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("plan", "restarts", "code", "starts"),
    [
        ([2], 2, 2, 1),
        ([1], 2, 1, 3),
        (["step", "step", "step", 2], 1, 2, 4),  # each step resets the count
    ],
)
def test_node_script_limits_restarts_by_exit_code_and_progress(machine, plan, restarts, code, starts):
    machine.job = replace(machine.job, restarts=restarts)
    assert machine.run(inference=plan)[0] == code
    assert len(machine.notes("inference")) == starts


def test_a_process_that_dies_is_restarted_alone_and_resumes(machine):
    code, shown = machine.run(1, trainer=["stay"], orchestrator=[1, 0])
    assert code == 0, shown
    assert ["--resume" in argv for argv in machine.argv("orchestrator")] == [False, True]
    assert "orchestrator died with exit code 1" in shown
    assert not machine.is_alive("trainer"), "ends with the orchestrator"


def test_node_script_kills_leftovers_before_it_restarts_a_process(machine):
    assert machine.run(inference=["leave", 2])[0] == 2
    left = Path("/proc", machine.extra("inference", "left").strip(), "stat")
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_trainer_that_has_finished_does_not_end_the_machine(machine):
    code, shown = machine.run(1, trainer=[0], orchestrator=["outlive"])
    assert (code, machine.extra("orchestrator", "ended")) == (0, ""), shown


def test_a_job_that_starts_again_resumes_from_what_it_had(machine):
    """A requeued job, or a pod in another's place. A process prints to its log, and in a pod to the terminal too."""
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
    machine.job = replace(machine.job, plan=ClusterPlan(1, 0))
    earlier = machine.job.run / "configs" / "run.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    assert [machine.run(rl=[code])[0] for code in (2, 0)] == [2, 0]
    earlier.touch()
    machine.run(rl=[2])
    own = ["@", f"{machine.job.state}/run.toml"]
    assert machine.argv("rl") == [own, own, [*own, "--resume"]]


def test_every_process_is_told_all_addresses_its_place_and_its_gpus(machine):
    machine.job = replace(machine.job, plan=ClusterPlan(3, 4, 2))
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
    process = machine.start(1, trainer=["linger"], orchestrator=["stay"])
    until(lambda: machine.extra("trainer", "stays") and machine.extra("orchestrator", "stays"))
    process.send_signal(number)
    shown, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, shown
    for name in ("trainer", "orchestrator"):
        assert (machine.extra(name, "ended"), machine.is_alive(name)) == ("15\n", False)


def test_secrets_reach_the_processes_and_no_script(machine):
    write_secrets(machine.job.state / SECRETS, {"API_KEY": "it's $HOME `x`", "TRIREME_TOKEN": "t0k3n"})
    machine.run()
    environ = machine.notes("inference")[0]["environ"]
    assert (environ["API_KEY"], environ["TRIREME_TOKEN"]) == ("it's $HOME `x`", "t0k3n")
    assert "t0k3n" not in (machine.job.state / NODE_SCRIPT).read_text()


@pytest.mark.parametrize("name", ["run", "a\n#SBATCH --uid=0", "$(touch x); 'y' %j"])
def test_a_batch_script_is_written_as_a_shell_reads_it(machine, name):
    script = batch_script(replace(machine.job, name=name), SubmitOptions(), workdir=machine.folder)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (checked.returncode, checked.stderr) == (0, "")
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert re.fullmatch(r"#SBATCH --job-name=[\w.-]+", options[0])
    assert not [line for line in options if "uid" in line and "job-name" not in line]
