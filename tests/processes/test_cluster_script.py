"""What one machine of a run does, on this one: the real `node.sh`, with a program that notes how it was called."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trireme.launch.cluster.job import Job, Resources
from trireme.launch.cluster.node_script import NODE_SCRIPT, SECRETS, node_script
from trireme.launch.cluster.nodes import Wanted, plan_nodes
from trireme.launch.cluster.secrets import write_secrets
from trireme.launch.cluster.slurm import Options, batch_script

DEADLINE_S = 30

RECORDER = """
    import json, os, signal, sys, time
    room = sys.argv[2].rpartition(".")[2]
    notes = os.path.join(os.environ["NOTES"], f"{room}.jsonl")
    tries = sum(1 for _ in open(notes)) if os.path.exists(notes) else 0
    with open(notes, "a") as file:
        file.write(json.dumps({"argv": sys.argv[3:], "node": os.environ.get("TRIREME_NODE"), "pid": os.getpid(),
                               "token": os.environ.get("TRIREME_TOKEN"), "key": os.environ.get("API_KEY")}) + "\\n")
    def end(number, _):
        with open(notes + ".ended", "a") as file:
            file.write(f"{number}\\n")
        sys.exit(143)
    signal.signal(signal.SIGTERM, end)
    plan = json.loads(os.environ.get("PLAN", "{}")).get(room, [])
    code = plan[tries] if tries < len(plan) else plan[-1] if plan else 0
    if code == "step":
        with open(os.environ["METRICS"], "a") as file:
            file.write("{}\\n")
        code = 1
    if code == "leave":
        import subprocess
        left = subprocess.Popen(["sleep", "60"])
        with open(notes + ".left", "w") as file:
            file.write(str(left.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if code == "stay":
        time.sleep(60)
    sys.exit(code)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """In place of the interpreter: `PROGRAM -m trireme.cli.ROOM ...`."""
    file = tmp_path / "a program"
    file.write_text(f"#!{sys.executable}\n{textwrap.dedent(RECORDER)}")
    file.chmod(0o755)
    return file


@pytest.fixture
def machine(tmp_path: Path, program: Path) -> Machine:
    return Machine(tmp_path, program)


class Machine:
    """A job's folder, and what its processes noted."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        (folder / "notes").mkdir()
        state = folder / "it's here"
        state.mkdir()
        self.job = Job(
            id="20260102-030405-ab12",
            name="run",
            plan=plan_nodes(Wanted(nodes=1, gpus_per_node=0)),
            run=folder / "out puts" / "run",
            state=state,
            folder=state,
            run_toml="",
            python=str(program),
            restarts=2,
        )

    def spread(self, **wanted: int) -> None:
        self.job = replace(self.job, plan=plan_nodes(Wanted(**wanted)))

    def start(self, index: int = 0, plan: dict[str, list[Any]] | None = None) -> subprocess.Popen[str]:
        script = self.job.state / NODE_SCRIPT
        script.write_text(node_script(self.job, pause_s=0, leave_s=0))
        addresses = [f"h{node.index}" for node in self.job.plan.nodes]
        return subprocess.Popen(
            ["bash", str(script), str(index), *addresses],
            env=os.environ
            | {"NOTES": str(self.folder / "notes"), "PLAN": json.dumps(plan or {})}
            | {"METRICS": str(self.job.run / "metrics.jsonl")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, index: int = 0, plan: dict[str, list[Any]] | None = None) -> tuple[int, str]:
        process = self.start(index, plan)
        said, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, said

    def notes(self, room: str) -> list[dict[str, Any]]:
        file = self.folder / "notes" / f"{room}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, *rooms: str) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not all(self.notes(room) for room in rooms):
            assert time.monotonic() < give_up
            time.sleep(0.02)


def test_one_machine_runs_rl_and_ends_as_it_does(machine):
    code, said = machine.run(plan={"rl": [0]})
    assert code == 0, said
    assert [note["argv"] for note in machine.notes("rl")] == [["@", f"{machine.job.state}/run.toml"]]


@pytest.mark.parametrize("final", [2, 3])
def test_an_exit_code_that_is_final_is_not_tried_again(machine, final):
    machine.spread(nodes=2, gpus_per_node=0)
    assert machine.run(0, {"inference": [final]})[0] == final
    assert len(machine.notes("inference")) == 1


def test_a_process_that_dies_is_started_again_alone_and_goes_on(machine):
    machine.spread(nodes=2, gpus_per_node=0)
    code, said = machine.run(1, {"trainer": ["stay"], "orchestrator": [1, 0]})
    assert code == 0, said
    assert ["--resume" in note["argv"] for note in machine.notes("orchestrator")] == [False, True]
    assert "orchestrator died with exit code 1" in said


def test_what_a_dead_process_leaves_behind_is_gone_before_another_starts(machine):
    """An engine's core would hold the GPUs that its successor needs."""
    machine.spread(nodes=2, gpus_per_node=0)
    assert machine.run(0, {"inference": ["leave", 2]})[0] == 2
    left = (machine.folder / "notes" / "inference.jsonl.left").read_text()
    assert not is_alive(int(left))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_restarts_in_a_row_are_counted(machine):
    machine.spread(nodes=2, gpus_per_node=0)
    code, _ = machine.run(0, {"inference": [1]})
    assert code == 1
    assert len(machine.notes("inference")) == 1 + machine.job.restarts


def test_restarts_are_counted_from_anew_after_a_step(machine):
    machine.spread(nodes=2, gpus_per_node=0)
    machine.job = replace(machine.job, restarts=1)
    code, _ = machine.run(0, {"inference": ["step", "step", "step", 2]})
    assert code == 2
    assert len(machine.notes("inference")) == 4


def test_a_job_that_begins_anew_goes_on_with_what_it_had(machine):
    """A requeued job, or a pod in another's place: the marks are on disk."""
    machine.spread(nodes=2, gpus_per_node=0)
    machine.job = replace(machine.job, goes_back=True)
    machine.run(0, {"inference": [2]})
    machine.run(0, {"inference": [2]})
    first, second = (note["argv"] for note in machine.notes("inference"))
    assert "--resume" not in first
    assert second[-3:] == ["--resume", "--trainer.ckpt.resume-step", "none"]


def test_rl_goes_on_only_with_what_it_began_to_write(machine):
    """Before it has written its configuration there is nothing to resume; an older file is another run's."""
    earlier = machine.job.run / "configs" / "run.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    for _ in range(2):
        machine.run(plan={"rl": [2]})
    earlier.touch()
    machine.run(plan={"rl": [2]})
    assert ["--resume" in note["argv"] for note in machine.notes("rl")] == [False, False, True]


def test_every_process_is_told_all_addresses_its_place_and_its_gpus(machine):
    machine.spread(nodes=3, gpus_per_node=4, inference_gpus=6, trainer_gpus=4)
    hosts = ["--hosts.inference", "h0", "h1", "--hosts.orchestrator", "h2", "--hosts.trainer", "h2"]
    file = ["@", f"{machine.job.state}/run.toml"]
    machine.run(1, {"inference": [2]})
    machine.run(2, {"trainer": [0], "orchestrator": [0]})
    assert machine.notes("inference")[0]["argv"] == [*file, *hosts, "--inference-gpu-ids", "0", "1"]
    assert machine.notes("inference")[0]["node"] == "1"
    assert machine.notes("trainer")[0]["argv"] == [*file, *hosts, "--trainer-gpu-ids", "0", "1", "2", "3"]
    assert machine.notes("orchestrator")[0]["argv"] == [*file, *hosts]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGURG])
def test_asked_to_end_it_asks_each_process_once_and_waits(machine, number):
    """Twice would mean "at once" to `rl`."""
    machine.spread(nodes=2, gpus_per_node=0)
    process = machine.start(1, {"trainer": ["stay"], "orchestrator": ["stay"]})
    machine.wait_for("trainer", "orchestrator")
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, said
    for room in ("trainer", "orchestrator"):
        assert (machine.folder / "notes" / f"{room}.jsonl.ended").read_text() == "15\n"
        assert not Path(f"/proc/{machine.notes(room)[0]['pid']}").exists()


def test_the_orchestrators_end_is_its_machines_and_the_trainer_is_ended_too(machine):
    machine.spread(nodes=2, gpus_per_node=0)
    code, said = machine.run(1, {"trainer": ["stay"], "orchestrator": [0]})
    assert code == 0, said
    assert not Path(f"/proc/{machine.notes('trainer')[0]['pid']}").exists()


def test_a_trainer_that_has_said_good_bye_does_not_end_the_machine(machine):
    machine.spread(nodes=2, gpus_per_node=0)
    process = machine.start(1, {"trainer": [0], "orchestrator": ["stay"]})
    machine.wait_for("trainer", "orchestrator")
    time.sleep(2.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=DEADLINE_S)


def test_secrets_reach_the_processes_and_no_script(machine):
    machine.spread(nodes=2, gpus_per_node=0)
    write_secrets(machine.job.state / SECRETS, {"API_KEY": "it's $HOME `x`", "TRIREME_TOKEN": "t0k3n"})
    machine.run(0, {"inference": [0]})
    note = machine.notes("inference")[0]
    assert (note["key"], note["token"]) == ("it's $HOME `x`", "t0k3n")
    assert stat.S_IMODE((machine.job.state / SECRETS).stat().st_mode) == 0o600
    assert "t0k3n" not in (machine.job.state / NODE_SCRIPT).read_text()


@pytest.mark.parametrize("wanted", [{"nodes": 1, "gpus_per_node": 8}, {"nodes": 4, "gpus_per_node": 8}])
def test_scripts_are_written_as_a_shell_reads_them(machine, wanted):
    machine.spread(**wanted)
    batch = batch_script(machine.job, Resources(), Options(), workdir=machine.folder)
    for script in (batch, node_script(machine.job), node_script(machine.job, to_terminal=True)):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_what_a_process_prints_is_in_its_log_and_in_a_pod_in_the_terminal_too(machine, tmp_path):
    machine.spread(nodes=2, gpus_per_node=0)
    echo = tmp_path / "echo.sh"
    echo.write_text("#!/bin/bash\necho says $2\nexit 2\n")
    echo.chmod(0o755)
    machine.job = replace(machine.job, python=str(echo))
    script = tmp_path / "pod.sh"
    for to_terminal in (False, True):
        script.write_text(node_script(machine.job, to_terminal=to_terminal))
        shown = subprocess.run(["bash", script, "0", "a", "b"], capture_output=True, text=True, timeout=DEADLINE_S)
        assert ("says trireme.cli.inference\n" in shown.stdout) == to_terminal
    assert (machine.job.run / "logs" / "inference.stdout").read_text() == "says trireme.cli.inference\n" * 2
