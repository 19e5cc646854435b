"""`kill -9` of every process at every point of the protocol: a synchronous run ends with the same weights to the bit.

The engine is scripted (`scripted_engine.py`), because vLLM takes half a minute to come up; everything else is the real
thing. Each victim has a run of its own, in which it is killed once per point. Two runs go on at a time: a process that
comes up uses one core.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from real_run import Run
from scripted_kills import VICTIMS, KilledRun, audit, first_other_version, open_run
from trireme.base.faults import POINTS

pytestmark = pytest.mark.e2e

ON_THE_WAY_UP = {
    "orchestrator.starting": "orchestrator",
    "orchestrator.started": "orchestrator",
    "trainer.starting": "trainer rank 0",
    "trainer.resumed": "trainer rank 0",
    "engine.joined": "engine core",
    "launcher.restarting": "orchestrator",
}
"""Points that are come to after somebody's death only."""
AT_THE_START = ("launcher.started",)
AT_THE_END = ("trainer.finishing", "orchestrator.finishing")
EVERY_FEW_STEPS = tuple(point for point in POINTS if point not in {*ON_THE_WAY_UP, *AT_THE_START, *AT_THE_END})
OF_ALL_RANKS = {"trainer.batch_received", "trainer.stepped", "trainer.sending", "trainer.sent", "trainer.published"}
OF_ALL_RANKS |= {"checkpoint.begun", "checkpoint.written"}

STEPS = 100
SYNCHRONOUS = ("--max-steps", str(STEPS), "--max-async-level", "0")
AHEAD = ("--max-steps", str(STEPS), "--max-async-level", "2")
QUICKLY = ("--supervisor.backoff-s", "0.2", "--weight-broadcast.timeout-s", "60")
MOST_FAILURES = 3  # of one victim; each begins another run with the points that are left
AT_ONCE = 2
END_S = 240.0


@dataclass
class Outcome:
    """What came of one victim's kills."""

    failures: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def model_flags(tiny_model: Path) -> tuple[str, ...]:
    return ("--model.name", str(tiny_model))


@pytest.fixture(scope="session")
def undisturbed(model_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"), [*SYNCHRONOUS, *model_flags])


class Undisturbed:
    """What others are compared with, by number of ranks; made when it is first asked for."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self._folder = folder
        self._flags = flags
        self._runs: dict[int, Run] = {}
        self._lock = threading.Lock()

    def __getitem__(self, ranks: int) -> Run:
        with self._lock:
            if ranks not in self._runs:
                self._runs[ranks] = self._make(ranks)
            return self._runs[ranks]

    def _make(self, ranks: int) -> Run:
        run = KilledRun(self._folder / f"of-{ranks}", self._flags, name="undisturbed", ranks=ranks)
        with open_run(run):
            run.start()
            run.wait(END_S)
        return run.run


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    undisturbed: Undisturbed,
    model_flags: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[Outcome]]]:
    """Of the victims whose tests are asked for, worked on side by side."""
    stop = threading.Event()
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    victims = dict.fromkeys(item.callspec.params["victim"] for item in items if "victim" in item.callspec.params)
    with ThreadPoolExecutor(AT_ONCE) as workers:
        yield {
            victim: workers.submit(
                kill_at_every_point,
                victim,
                tmp_path_factory.mktemp(victim.replace(" ", "-")),
                [*SYNCHRONOUS, *QUICKLY, *model_flags],
                undisturbed,
                stop,
            )
            for victim in victims
        }
        stop.set()
        workers.shutdown(cancel_futures=True)


@pytest.mark.parametrize("victim", sorted(VICTIMS, key=lambda victim: victim in ("launcher", "environment worker")))
def test_whoever_is_killed_wherever_the_weights_are_the_same(victim: str, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[victim].result()
    print("\n".join(outcome.story))
    assert not outcome.failures, "\n\n".join(outcome.failures)


def test_whoever_is_killed_while_generation_runs_ahead_the_audit_is_clean(
    model_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """At each point another victim."""
    run = KilledRun(tmp_path, [*AHEAD, *QUICKLY, *model_flags], name="ahead", ranks=2)
    with open_run(run):
        run.start()
        for number, point in enumerate(EVERY_FEW_STEPS):
            run.kill_at(VICTIMS[number % len(VICTIMS)], point)
        run.wait(END_S)
    assert {len(batch.rollouts) for batch in run.run.batches()} == {4}
    assert_clean(run)


@pytest.mark.parametrize("frozen", [victim for victim in VICTIMS if victim != "launcher"])
def test_whoever_freezes_is_replaced(
    frozen: str, undisturbed: Undisturbed, model_flags: tuple[str, ...], tmp_path: Path
) -> None:
    ranks = ranks_for(frozen)
    flags = [*SYNCHRONOUS, *QUICKLY, *model_flags, "--supervisor.frozen-after-s", "2"]
    run = KilledRun(tmp_path, flags, name=f"{frozen} frozen", ranks=ranks)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 3, "version 3")
        run.freeze(frozen)
        version = run.version
        run.until(lambda: run.version > version + 3, f"the run goes on after {frozen} was frozen")
        run.wait(END_S)
    assert_same(run, undisturbed[ranks])


def kill_at_every_point(
    victim: str, folder: Path, flags: Sequence[str], undisturbed: Undisturbed, stop: threading.Event
) -> Outcome:
    """In one run where all goes well; where something does not, the rest is done in another."""
    outcome = Outcome()
    left = [point for point in points_for(victim) if point not in AT_THE_END]
    while left is not None and len(outcome.failures) < MOST_FAILURES and not stop.is_set():
        place = folder / str(len(outcome.failures))
        run = KilledRun(place, list(flags), name=victim, ranks=ranks_for(victim), stop=stop)
        try:
            with open_run(run):
                start(run, victim, left)
                while left:
                    run.kill_at(victim, point := left.pop(0), wake=wake_for(victim, point))
                run.kill_at_the_end(victim, AT_THE_END)
                run.wait(END_S)
            left = None
            assert_same(run, undisturbed[ranks_for(victim)])
        except AssertionError as error:
            outcome.failures.append(str(error))
        outcome.story += run.story
    return outcome


def start(run: KilledRun, victim: str, left: list[str]) -> None:
    """Points that are come to only once must be armed before."""
    first = [point for point in left if point in AT_THE_START]
    for point in first:
        left.remove(point)
        run.start_and_kill_at(victim, point)
    if not first:
        run.start()


def points_for(victim: str) -> list[str]:
    """Rank 1 dies at its own end of what all ranks do."""
    points = [*AT_THE_START, *EVERY_FEW_STEPS, *ON_THE_WAY_UP, *AT_THE_END]
    if victim == "environment worker":  # there is none without an orchestrator
        return [point for point in points if point != "orchestrator.starting"]
    if victim != "trainer rank 1":
        return points
    return [f"{point}.rank1" if point in OF_ALL_RANKS else point for point in points]


def wake_for(victim: str, point: str) -> str | None:
    """Who dies first where the point is come to after somebody's death only. The victim must be there then."""
    if point == "launcher.restarting" and victim in ("orchestrator", "environment worker"):
        return "trainer rank 0"
    return ON_THE_WAY_UP.get(point)


def ranks_for(victim: str) -> int:
    return 2 if victim.startswith("trainer") else 1


def assert_same(run: KilledRun, undisturbed: Run) -> None:
    other = first_other_version(run.run, undisturbed)
    assert other is None, f"{other}\n{run.tell()}"
    ours, theirs = run.run.weights(STEPS), undisturbed.weights(STEPS)
    assert ours.read_bytes() == theirs.read_bytes(), f"{ours} is not {theirs}\n{run.tell()}"
    assert_clean(run)


def assert_clean(run: KilledRun) -> None:
    found = audit(run.run)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}\n{run.tell()}"
