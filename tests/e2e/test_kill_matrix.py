"""`kill -9` of every process at every point of the protocol: a synchronous run ends with the same weights to the bit.

The engine is scripted (`scripted_engine.py`), because vLLM takes half a minute to come up; everything else is the real
thing. Each victim has a run of its own, in which it is killed once per point. Two runs go on at a time: a process that
comes up uses one core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
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
OF_ALL_RANKS |= {"trainer.confirmed", "checkpoint.begun", "checkpoint.written"}

BEFORE_A_BATCH = {"rollout.finished", "environment.asked", "environment.scored"}
"""A trainer waits for one at these points, and no less at `rollout.begun` and `journal.before_append`."""
LIKE_ANOTHER_ON_DISK = {"rollout.begun", "environment.asked", "environment.scored", "update.paused", "update.loaded"}
LIKE_ANOTHER_ON_DISK |= {"trainer.batch_received", "trainer.sending", "trainer.sent", "trainer.confirmed"}
LIKE_ANOTHER_ON_DISK |= {"engine.joined", "engine.received", "engine.finished"}
"""A killed launcher takes all with it, so that only the disk can tell these points from one another."""

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


@dataclass(frozen=True)
class Work:
    """What the jobs of this file share."""

    undisturbed: Undisturbed
    model_flags: tuple[str, ...]
    folder: Path
    stop: threading.Event

    def place(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    undisturbed: Undisturbed,
    model_flags: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[Outcome]]]:
    """Of the jobs whose tests are asked for, worked on side by side in the order of the tests."""
    work = Work(undisturbed, model_flags, tmp_path_factory.mktemp("matrix"), threading.Event())
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    with ThreadPoolExecutor(AT_ONCE) as workers:
        yield {
            job: workers.submit(JOBS[job], work)
            for job in dict.fromkeys(item.callspec.params["job"] for item in items if "job" in item.callspec.params)
        }
        work.stop.set()
        workers.shutdown(cancel_futures=True)


def result(future: Future[Outcome]) -> None:
    outcome = future.result()
    print("\n".join(outcome.story))
    assert not outcome.failures, "\n\n".join(outcome.failures)


@pytest.mark.parametrize("job", VICTIMS)
def test_whoever_is_killed_wherever_the_weights_are_the_same(job: str, outcomes: dict[str, Future[Outcome]]) -> None:
    result(outcomes[job])


@pytest.mark.parametrize("job", ["ahead"])
def test_whoever_is_killed_while_generation_runs_ahead_the_audit_is_clean(
    job: str, outcomes: dict[str, Future[Outcome]]
) -> None:
    """At each point another victim."""
    result(outcomes[job])


@pytest.mark.parametrize("job", ["frozen"])
def test_whoever_freezes_is_replaced(job: str, outcomes: dict[str, Future[Outcome]]) -> None:
    """All but the launcher, one after another: nobody watches the watchman."""
    result(outcomes[job])


def kill_ahead(work: Work) -> Outcome:
    flags = [*AHEAD, *QUICKLY, *work.model_flags]
    run = KilledRun(work.place("ahead"), flags, name="ahead", ranks=2, stop=work.stop)
    with open_run(run):
        run.start()
        for number, point in enumerate(EVERY_FEW_STEPS):
            run.kill_at(VICTIMS[number % len(VICTIMS)], point)
        run.wait(END_S)
    assert {len(batch.rollouts) for batch in run.run.batches()} == {4}
    assert_clean(run)
    return Outcome(story=run.story)


def freeze_all(work: Work) -> Outcome:
    flags = [*SYNCHRONOUS, *QUICKLY, *work.model_flags, "--supervisor.frozen-after-s", "2"]
    run = KilledRun(work.place("frozen"), flags, name="frozen", ranks=2, stop=work.stop)
    with open_run(run):
        run.start()
        for victim in VICTIMS:
            if victim != "launcher":
                run.until(lambda before=run.version: run.version > before + 2, "the next version but two")
                run.freeze(victim)
                run.until(lambda before=run.version: run.version > before + 3, f"the run goes on without {victim}")
                run.say(f"{victim} was frozen, and the run goes on")
        run.wait(END_S)
    assert_same(run, work.undisturbed[2])
    return Outcome(story=run.story)


def kill_at_every_point(victim: str, work: Work) -> Outcome:
    """In one run where all goes well; where something does not, the rest is done in another."""
    outcome = Outcome()
    flags = [*SYNCHRONOUS, *QUICKLY, *work.model_flags]
    left = [point for point in points_for(victim) if point not in AT_THE_END]
    while left is not None and len(outcome.failures) < MOST_FAILURES and not work.stop.is_set():
        place = work.place(victim) / str(len(outcome.failures))
        run = KilledRun(place, flags, name=victim, ranks=ranks_for(victim), stop=work.stop)
        try:
            with open_run(run):
                start(run, victim, left)
                while left:
                    run.kill_at(victim, point := left.pop(0), wake=wake_for(victim, point))
                run.kill_at_the_end(victim, AT_THE_END)
                run.wait(END_S)
            left = None
            assert_same(run, work.undisturbed[ranks_for(victim)])
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
    rooms = ("trainer", "checkpoint", "export", "engine")
    match victim:
        case "trainer rank 0":
            return [point for point in points if point not in BEFORE_A_BATCH]
        case "trainer rank 1":  # elsewhere, nobody can tell it from rank 0
            points = [point for point in points if point.split(".")[0] in rooms]
            return [f"{point}.rank1" if point in OF_ALL_RANKS else point for point in points]
        case "environment worker":  # has nothing to do while others train, and is not there without an orchestrator
            return [point for point in points if point.split(".")[0] not in rooms and point != "orchestrator.starting"]
        case "launcher":
            return [point for point in points if point not in LIKE_ANOTHER_ON_DISK]
    return points


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


JOBS: dict[str, Callable[[Work], Outcome]] = {
    **{victim: partial(kill_at_every_point, victim) for victim in VICTIMS},
    "ahead": kill_ahead,
    "frozen": freeze_all,
}
