"""A run on three machines, without a scheduler: real sockets, HTTP and gloo between network namespaces. A machine is
cut off without a word and comes back; strangers on the same switch are let in nowhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.processes.machines import Machine, open_machines, why_not
from support.runs.real_run import Process, Run, wait_until
from support.runs.scripted_kills import Faults
from trireme.base.token import TOKEN
from trireme.tools.audit.audit import command as audit

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SECRET = "the-machines-of-this-test-share-it"
ENGINE = Path(__file__).parents[2] / "support/engines/scripted_engine.py"
DEADLINE_S = 180.0
HELD = "trainer.batch_received"

KNOCK = """
import sys, urllib.request, urllib.error
headers = {"Authorization": "Bearer " + sys.argv[1]} if sys.argv[1] else {}
for route in sys.argv[2:]:
    method, url = route.split(" ")
    request = urllib.request.Request(url, method=method, headers=headers, data=b"{}" if method == "POST" else None)
    try:
        print(urllib.request.urlopen(request, timeout=20).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
ASK = """
import sys
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.messages import Heartbeat
from trireme.transport.control import ControlClient
client = ControlClient(sys.argv[1], Waits("stranger"), ask_again_s=1.0)
try:
    beat = Heartbeat(run_id=sys.argv[2], process="stranger", state="curious", version=0, waits=[])
    print(type(client.ask(beat, what="its heartbeat", deadline_s=2.5)).__name__)
except DeadlineExceeded:
    print("nothing")
"""
BROADCAST = """
import socket, sys, torch, torch.distributed
from trireme.trainer.parallel import mesh
mesh.BROKEN_S = 1.0
server = socket.create_server((sys.argv[1], 0))
other = socket.create_connection(server.getsockname())
with mesh.open_world("cpu", threads=1, timeout_s=3600):
    other.close()
    torch.distributed.broadcast(torch.zeros(1 << 26), src=0)
"""
CONTROL = ("pause", "resume", "update_weight_version", "collective_rpc")


@dataclass
class SpreadRun:
    folder: Path
    engines: list[Machine]
    orchestrator: Machine
    trainers: list[Machine]
    processes: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.faults = Faults(self.folder / "faults")
        self.run = Run(self.folder / "run")

    @property
    def flags(self) -> list[str]:
        inference, trainer = ([machine.address for machine in side] for side in (self.engines, self.trainers))
        return [
            *("@", "tests/e2e/hosts.toml", "--output-dir", str(self.run.root)),
            *("--hosts.inference", *inference, "--hosts.orchestrator", self.orchestrator.address),
            *("--hosts.trainer", *trainer, "--trainer.num-ranks", str(len(trainer))),
        ]

    @contextmanager
    def started(self) -> Iterator[None]:
        commands = {f"trainer-{number}": (machine, "trainer") for number, machine in enumerate(self.trainers)}
        for number, machine in enumerate(self.engines):
            commands[f"inference-{number}"] = (machine, sys.executable, str(ENGINE))
        commands["orchestrator"] = (self.orchestrator, "orchestrator")
        try:
            for name, (machine, *words) in commands.items():
                log = self.folder / f"{name}.log"
                self.processes[name] = machine.start(*words, *self.flags, log=log, env=self.faults.env)
            yield
        finally:
            for process in self.processes.values():
                process.end()

    def until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what, list(self.processes.values()), deadline_s=DEADLINE_S)

    def said(self, name: str, words: str) -> int:
        return self.processes[name].output.count(words)

    def finish(self) -> None:
        for name in self.processes:
            if not name.startswith("inference"):
                assert self.processes[name].wait(deadline_s=DEADLINE_S) == 0, self.processes[name].tail()
        assert audit([str(self.run.root)]) == 0
        assert self.run.version == 16


def test_run_goes_on_without_an_engine_whose_machine_is_cut_off(tmp_path):
    with open_machines(4, **{TOKEN: SECRET}) as (first, second, third, stranger):
        spread = SpreadRun(tmp_path, [first, third], first, [second])
        spread.faults.arm(HELD)
        with spread.started():
            spread.until(lambda: spread.faults.is_reached(HELD), "the first batch")
            refused_everywhere(spread, stranger)
            spread.faults.release(HELD)
            spread.until(lambda: spread.run.version >= 2, "the run to get going")
            assert spread.run.engines_of(1) == {first.address, third.address}
            third.cut()
            cut_at = spread.run.version
            run = spread.run
            spread.until(lambda: third.address not in run.engines_of(run.version), "the run to go on without it")
            spread.faults.arm(HELD)
            spread.until(lambda: spread.faults.is_reached(HELD), "the trainer to hold still")
            third.mend()
            up = f"{third.address}:8000 is up after"
            spread.until(lambda: spread.said("orchestrator", up) == 2, "the engine to be found again")
            spread.faults.release(HELD)
            spread.finish()
        assert 2 <= cut_at < 14
        assert spread.run.engines_of(16) == {first.address, third.address}


def refused_everywhere(spread: SpreadRun, stranger: Machine) -> None:
    """A stranger on the same network gets `/health` alone, no answer over ZeroMQ, and finds no other open port."""
    engines = [f"http://{machine.address}:8000" for machine in spread.engines]
    status = f"http://{spread.orchestrator.address}:8001"
    shut = [f"POST {url}/{route}" for url in engines for route in (*CONTROL, "inference/v1/generate")]
    shut += [f"GET {url}/{route}" for url in engines for route in ("weight_info", "v1/models", "metrics")]
    shut += [f"GET {status}/{route}" for route in ("status", "metrics", "openapi.json")]
    open_to_all = [f"GET {url}/health" for url in (*engines, status)]
    for token in ("", "a-token-of-a-stranger"):
        answers = stranger.run_python(KNOCK, token, *shut, *open_to_all).split()
        assert answers == ["401"] * len(shut) + ["200"] * len(open_to_all)
    control = (f"tcp://{spread.orchestrator.address}:5555", str(spread.run.root))
    assert stranger.run_python(ASK, *control) == "nothing\n"
    assert stranger.run_python(ASK, *control, env={TOKEN: "a-token-of-a-stranger"}) == "nothing\n"
    assert stranger.run_python(ASK, *control, env={TOKEN: SECRET}) == "Ok\n"
    assert stranger.run_python(KNOCK, SECRET, f"GET {status}/status").split() == ["200"]
    meant = {f"{spread.orchestrator.address}:{port}" for port in (5555, 8001, 8000)}
    assert meant <= spread.orchestrator.listening()
    assert all(address.startswith("10.77.0.") for address in spread.orchestrator.listening())


def test_ranks_resume_together_after_a_machine_was_cut_off(tmp_path):
    with open_machines(3, **{TOKEN: SECRET}) as (first, second, third):
        spread = SpreadRun(tmp_path, [first], first, [second, third])
        with spread.started():
            spread.until(lambda: spread.run.version >= 3, "the run to get going")
            third.cut()
            again = "this machine's ranks ended with code"
            spread.until(lambda: spread.said("trainer-0", again) and spread.said("trainer-1", again), "both to notice")
            third.mend()
            spread.finish()


def test_ranks_that_are_cut_off_in_the_middle_of_a_message_end_too(tmp_path):
    """gloo wakes neither who waits for the rest of a message nor who sends it. Other connections may end."""
    with open_machines(2) as machines:
        first, second = machines
        world = {"MASTER_ADDR": first.address, "MASTER_PORT": "5557", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = []
        for rank, machine in enumerate(machines):
            log, env = tmp_path / f"rank-{rank}.log", world | {"RANK": str(rank)}
            ranks.append(machine.start("python", "-c", BROADCAST, machine.address, log=log, env=env))
        try:
            first.slow_down("8mbit")  # the message takes four minutes
            wait_until(lambda: second.num_received() > 1_000_000, "a part of the message", ranks)
            second.cut()
            assert [rank.wait(deadline_s=60) for rank in ranks] == [1, 1]
        finally:
            for rank in ranks:
                rank.end()
    assert f"the connection to {second.address} broke" in ranks[0].output
    assert f"the connection to {first.address}" in ranks[1].output
