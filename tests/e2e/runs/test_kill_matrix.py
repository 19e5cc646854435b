"""`kill -9` of every process at every point of the protocol: a synchronous run ends with the same weights to the bit.

The engine is scripted (`scripted_engine.py`), because vLLM takes half a minute to start, and processes are forked
(`forkserver.py`), because imports take ten seconds; everything else is the real thing. The quick test kills each
process once in each phase of a step; the slow ones kill it at every point, in one run per process, and each once on
vLLM.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
from filelock import FileLock

from support.runs.real_run import REPOSITORY, Run, run_apart
from support.runs.scripted_kills import (
    REAL,
    SCRIPTED,
    VICTIMS,
    KilledRun,
    assert_audited,
    assert_same_weights,
    finish_undisturbed,
    open_run,
)
from trireme.base.faults import POINTS
from trireme.base.processes import free_port
from trireme.journal.turns import read_turns, turns_folder
from trireme.orchestrator.environments.venv import environment_python, find_environment

PHASES = {
    "sampling": "rollout.finished",
    "closing a batch": "journal.appended",
    "updating weights": "trainer.sending",
    "saving": "checkpoint.written",
}

ON_THE_WAY_UP = {
    "orchestrator.starting": "orchestrator",
    "orchestrator.started": "orchestrator",
    "trainer.starting": "trainer rank 0",
    "trainer.resumed": "trainer rank 0",
    "engine.joined": "engine core",
    "launcher.restarting": "orchestrator",
}
"""Points that are reached only after the death of this process."""
AT_THE_START = ("launcher.started",)
AT_THE_END = ("trainer.finishing", "orchestrator.finishing")
IN_A_SESSION = ("turn.", "request.", "session.")
"""Points that only agent programs and clients of a user's own harness come to begin so."""
EVERY_FEW_STEPS = tuple(
    point
    for point in POINTS
    if point not in {*ON_THE_WAY_UP, *AT_THE_START, *AT_THE_END} and not point.startswith(IN_A_SESSION)
)
OF_ALL_RANKS = {"trainer.batch_received", "trainer.stepped", "trainer.sending", "trainer.sent", "trainer.published"}
OF_ALL_RANKS |= {"trainer.confirmed", "checkpoint.begun", "checkpoint.written"}

BEFORE_A_BATCH = {"rollout.finished", "environment.asked", "environment.scored"}
"""A trainer waits for one at these points, and no less at `rollout.begun` and `journal.before_append`."""
LIKE_ANOTHER_ON_DISK = {"rollout.begun", "environment.asked", "environment.scored"}
LIKE_ANOTHER_ON_DISK |= {"update.paused", "update.unnamed", "update.loaded"}
LIKE_ANOTHER_ON_DISK |= {"trainer.batch_received", "trainer.sending", "trainer.sent", "trainer.confirmed"}
LIKE_ANOTHER_ON_DISK |= {"engine.joined", "engine.received", "engine.finished"}
"""A killed launcher takes all with it, so that only the disk can tell these points from one another."""

SAVING = {"checkpoint.written", "checkpoint.before_rename", "checkpoint.complete", "export.written", "trainer.recorded"}
"""Only the trainer, and the disk that a launcher leaves, can tell these points from `checkpoint.begun`."""
ENGINE_IS_IDLE = {"journal.before_append", "batch.answered", "trainer.batch_received", "trainer.stepped"}
ENGINE_IS_IDLE |= {"evaluation.before_write", "evaluation.written"}
"""No request and no update is under way: an engine cannot tell these points from `journal.appended`."""

STEPS = 58
FEW_STEPS = 42  # for each process in each phase
AHEAD = ("--max-steps", "70", "--max-async-level", "2")
QUICKLY = ("--supervisor.backoff-s", "0.2", "--weight-broadcast.timeout-s", "60")
ON_VLLM = (
    ("engine core", "engine.receiving"),
    ("inference server", "rollout.finished"),
    ("trainer rank 0", "trainer.sending"),
    ("trainer rank 1", "trainer.stepped.rank1"),
    ("orchestrator", "update.unnamed"),
    ("environment worker", "environment.asked"),
    ("launcher", "journal.appended"),
)
RECOVERY_S = 300.0  # vLLM takes most of a minute to come up beside others


@pytest.fixture(scope="session")
def undisturbed(tiny_model, tmp_path_factory):
    """Make, or find, the run of so many ranks and steps in which nothing dies, which all workers of a session share."""
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
    folder = shared or tmp_path_factory.mktemp("undisturbed")

    def find_or_make(ranks: int, steps: int) -> Run:
        place = folder / f"undisturbed-{ranks}-{steps}"
        flags = [*synchronous(steps), "--model.name", str(tiny_model)]
        with FileLock(f"{place}.lock"):
            run = KilledRun(place, flags, name="undisturbed", ranks=ranks)
            if not run.run.weights(steps).exists():
                finish_undisturbed(run)
        return run.run

    return find_or_make


def synchronous(steps: int) -> tuple[str, ...]:
    return ("--max-steps", str(steps), "--max-async-level", "0")


@contextmanager
def started(
    folder: Path, model: Path, *flags: str, name: str, ranks: int, command: tuple[str, ...] = SCRIPTED
) -> Iterator[KilledRun]:
    """Start a run to kill processes of, and wait for its good end after the block."""
    settings = [*flags, *QUICKLY, "--model.name", str(model)]
    run = KilledRun(folder, settings, name=name, ranks=ranks, command=command)
    with open_run(run):
        yield run
        run.wait()


def test_each_process_may_be_killed_in_each_phase_of_a_step(tiny_model, tmp_path, undisturbed):
    with started(tmp_path, tiny_model, *synchronous(FEW_STEPS), name="phases", ranks=2) as run:
        run.start()
        for point in PHASES.values():
            for victim in VICTIMS:
                run.kill_at(victim, point)
    assert_same_weights(run, undisturbed(2, FEW_STEPS), FEW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_may_be_killed_at_every_point(victim, tiny_model, tmp_path, undisturbed):
    left = [point for point in points_for(victim) if point not in AT_THE_END]
    ranks = 2 if victim.startswith("trainer") else 1
    with started(tmp_path, tiny_model, *synchronous(STEPS), name=victim, ranks=ranks) as run:
        for point in left:  # the first is armed before the start
            run.kill_at(victim, point, wake=wake_for(victim, point))
        run.kill_at_the_end(victim, AT_THE_END)
    assert_same_weights(run, undisturbed(ranks, STEPS), STEPS)


@pytest.mark.slow
def test_processes_may_be_killed_while_generation_runs_ahead(tiny_model, tmp_path):
    """At each point another one. The order of events is not that of a run without deaths, so the audit judges."""
    with started(tmp_path, tiny_model, *AHEAD, name="ahead", ranks=2) as run:
        run.start()
        for number, point in enumerate(EVERY_FEW_STEPS):
            run.kill_at(VICTIMS[number % len(VICTIMS)], point)
    assert {len(batch.rollouts) for batch in run.run.batches()} == {4}
    assert_audited(run)


@pytest.mark.slow
def test_a_process_that_freezes_is_replaced(tiny_model, tmp_path, undisturbed):
    """All but the launcher, which no process watches."""
    flags = [*synchronous(STEPS), "--supervisor.frozen-after-s", "2"]
    with started(tmp_path, tiny_model, *flags, name="frozen", ranks=2) as run:
        run.start()
        for victim in VICTIMS:
            if victim != "launcher":
                run.until(lambda before=run.version: run.version > before + 2, "the next version but two")
                run.find(victim).send_signal(signal.SIGSTOP)
                run.until(lambda before=run.version: run.version > before + 3, f"the run goes on without {victim}")
    assert_same_weights(run, undisturbed(2, STEPS), STEPS)


LORA = ("--trainer.model.lora.rank", "4", "--trainer.model.lora.sync", "adapter", "--trainer.optim.lr", "1e-3")
SMALL_STEPS = ("--inference.model.dtype", "bfloat16", "--trainer.optim.lr", "1e-6")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "delta", "ranks", "file"),
    [(LORA, (), 1, "adapter_model"), (SMALL_STEPS, ("--weight-broadcast.delta", "true"), 2, "model")],
    ids=["adapters alone", "changes alone"],
)
def test_updates_that_send_less_than_all_weights_survive_kills(tiny_model, tmp_path, flags, delta, ranks, file):
    """A restarted engine is given all weights again before changes or adapters."""
    steps = ("--max-steps", "24", "--max-async-level", "0", "--model.name", str(tiny_model))
    whole = finish_undisturbed(KilledRun(tmp_path / "whole", [*steps, *flags], name="whole", ranks=ranks))
    with started(tmp_path / "killed", tiny_model, *steps, *flags, *delta, name="less", ranks=ranks) as run:
        run.start()
        run.until(lambda: run.version >= 1, "version 1")
        run.kill_at("engine core", "engine.receiving")
        run.kill_at(f"trainer rank {ranks - 1}", "trainer.sending" + (".rank1" if ranks > 1 else ""))
        run.kill_at("engine core", "engine.finished")
        run.kill_at("orchestrator", "version.before_record")
        run.kill_at("inference server", "update.paused")
    assert_same_weights(run, whole, 24, f"{file}.safetensors")


PORT = free_port()
AGENT = ("--orchestrator.env.0.agent.command", "python3", str(REPOSITORY / "tests/e2e/talker.py"), "{prompt}")
HARNESS = ("--orchestrator.env.0.agent.external", "true", "--orchestrator.env.0.agent.port", str(PORT))
V1 = ("--orchestrator.env.0.id", "tests/environments/v1_echo", "--orchestrator.env.0.args", '{"numbers": 40}')
IN_SESSIONS = {
    "turn.sampled": ("orchestrator",),
    "turn.written": ("orchestrator", "environment worker", "launcher"),
    "turn.continued": (
        "orchestrator",
        "environment worker",
        "engine core",
        "trainer rank 0",
        "launcher",
        "agent programs",
    ),
    "request.written": ("orchestrator",),
    "session.taken": ("orchestrator", "engine core"),
    "session.rewarded": ("orchestrator", "environment worker", "launcher"),
    "environment.scored": ("orchestrator", "environment worker", "engine core"),
    "journal.appended": ("orchestrator",),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "points"),
    [
        (AGENT, {point for point in IN_SESSIONS if not point.startswith("session.")}),
        (HARNESS, IN_SESSIONS.keys() - {"request.written"}),
        (V1, {"turn.continued", "environment.scored"}),
    ],
    ids=["agent program", "own harness", "verifiers v1"],
)
def test_sessions_lose_no_turn_whatever_is_killed(environment, points, tiny_model, tmp_path):
    """The weights are those of the run in which nothing dies, and no turn was sampled twice."""
    environment_python(find_environment(V1[1]))  # a run would wait while it is installed
    kills = [(victim, point) for point in IN_SESSIONS if point in points for victim in IN_SESSIONS[point]]
    kills = [(victim, point) for victim, point in kills if victim != "agent programs" or environment is AGENT]
    steps = len(kills) + 6
    flags = ("--max-steps", str(steps), "--seq-len", "256", "--no-orchestrator.eval", *environment)
    plain = KilledRun(tmp_path / "plain", [*flags, "--model.name", str(tiny_model)], name="plain")
    with clients_of_a_harness(tmp_path) if environment is HARNESS else nullcontext(Counter()) as statuses:
        undisturbed = finish_undisturbed(plain)
        with started(tmp_path / "killed", tiny_model, *flags, name="sessions", ranks=1) as run:
            run.start()
            for victim, point in kills:
                run.kill_at(victim, point)
    assert_same_weights(run, undisturbed, steps)
    assert statuses.keys() <= {200, 401, 403, 404, 429}, statuses
    assert len(list(turns_folder(run.run.paths.journal).glob("*.turns"))) >= steps * 4
    assert_no_turn_twice(run)


OUTLIVED = ("turn.continued", "request.written", "turn.written")


@pytest.mark.parametrize(
    "tries", [pytest.param(3, id="asks again"), pytest.param(1, id="gives up", marks=pytest.mark.slow)]
)
def test_an_agent_program_outlives_the_orchestrator_and_its_worker(tries, tiny_model, tmp_path):
    """One that gives up when its connection breaks is played again, from the turns on disk."""
    file = tmp_path / "had"
    env = json.dumps({"TALKER_LOG": str(file), "TALKER_TRIES": str(tries)})
    flags = ("--max-steps", "10", "--seq-len", "256", "--no-orchestrator.eval", *AGENT)
    at_work: dict[int, str] = {}

    def turns_had() -> Counter[tuple[str, int]]:
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return Counter((rollout, int(pid)) for rollout, pid in map(str.split, lines))

    with started(tmp_path, tiny_model, *flags, "--orchestrator.env.0.agent.env", env, name="outlived", ranks=1) as run:
        run.start()
        for point in OUTLIVED:
            for victim in ("orchestrator", "environment worker"):
                run.faults.arm(point)
                run.until(lambda point=point: run.faults.is_reached(point), point)
                had = turns_had()
                programs = {pid: rollout for pid, rollout in talkers(run) if had[rollout, pid] < 3}
                assert programs, f"no program waits at {point}"
                at_work |= programs
                run.kill(victim)
                run.faults.release(point)
                version = run.version
                run.until(lambda version=version: run.version > version, f"a version after {victim} died at {point}")
    assert_audited(run)
    had = turns_had()
    for pid, rollout in at_work.items() if tries > 1 else ():
        assert {each: count for each, count in had.items() if each[0] == rollout} == {(rollout, pid): 3}
    assert_no_turn_twice(run)


def talkers(run: KilledRun) -> Iterator[tuple[int, str]]:
    """Find the agent programs of a run, with their rollouts."""
    folders = f"{run.run.paths.logs}/agents/"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            folder = process.environ().get("TRIREME_ROLLOUT", "")
            if folder.startswith(folders) and "talker.py" in " ".join(process.cmdline()):
                yield process.pid, os.path.basename(folder)


def assert_no_turn_twice(run: KilledRun) -> None:
    files = list(turns_folder(run.run.paths.journal).glob("*.turns"))
    assert files
    for file in files:
        prompts = [turn.prompt for turn in read_turns(file)]
        assert len(set(prompts)) == len(prompts) <= 3, file


@contextmanager
def clients_of_a_harness(folder: Path) -> Iterator[Counter[int]]:
    """Play what the newest run in a folder wants, four rollouts at once. A session that breaks is left alone."""
    statuses: Counter[int] = Counter()
    is_over = Event()

    def post(http: httpx.Client, path: str, key: str, **body: Any) -> Any:
        answer = http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        statuses[answer.status_code] += 1
        return answer.raise_for_status().json()

    def play(http: httpx.Client) -> None:
        newest = max(folder.glob("*/run/.token"), key=os.path.getmtime)
        session = post(http, "/sessions", newest.read_text(), env="say")
        key, messages = session["api_key"], session["prompt"]
        for _ in range(3):
            said = post(http, "/v1/chat/completions", key, messages=messages)["choices"][0]["message"]
            messages += [said, {"role": "user", "content": f"sure? {len(said['content'])}"}]
        post(http, f"/sessions/{session['id']}/reward", key)  # the environment's

    def play_on() -> None:
        while not is_over.wait(0.02):
            with suppress(httpx.HTTPError, OSError, ValueError):  # also while there is no token yet
                with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http:
                    play(http)

    with ThreadPoolExecutor(4) as pool:
        playing = [pool.submit(play_on) for _ in range(4)]
        try:
            yield statuses
        finally:
            is_over.set()
            for each in playing:
                each.result()


@pytest.mark.slow
def test_each_process_may_be_killed_on_vllm(engine, tmp_path):
    flags = ["--max-steps", "9"]
    undisturbed = run_apart(engine, tmp_path / "undisturbed", *flags, "--trainer.num-ranks", "2")
    run = KilledRun(tmp_path, flags, command=REAL, name="on vLLM", ranks=2, patience_s=RECOVERY_S)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 0, "version 0")
        for victim, point in ON_VLLM:
            run.kill_at(victim, point)
        run.wait(RECOVERY_S)
    assert_same_weights(run, undisturbed, 9)


def points_for(victim: str) -> list[str]:
    """Rank 1 dies at its own end of what all ranks do."""
    points = [*AT_THE_START, *EVERY_FEW_STEPS, *ON_THE_WAY_UP, *AT_THE_END]
    rooms = ("trainer", "checkpoint", "export", "engine")
    match victim:
        case "trainer rank 0":
            return [point for point in points if point not in BEFORE_A_BATCH]
        case "trainer rank 1":  # elsewhere, it is like rank 0
            points = [point for point in points if point.split(".")[0] in rooms]
            return [f"{point}.rank1" if point in OF_ALL_RANKS else point for point in points]
        case "environment worker":  # has nothing to do while others train, and is not there without an orchestrator
            return [point for point in points if point.split(".")[0] not in rooms and point != "orchestrator.starting"]
        case "launcher":
            return [point for point in points if point not in LIKE_ANOTHER_ON_DISK]
        case "orchestrator":
            return [point for point in points if point not in SAVING]
        case "inference server" | "engine core":
            return [point for point in points if point not in SAVING | ENGINE_IS_IDLE]
    return points


def wake_for(victim: str, point: str) -> str | None:
    """The process to kill first, for a point that is reached only after a death. The victim must be alive then."""
    if point == "launcher.restarting" and victim in ("orchestrator", "environment worker"):
        return "trainer rank 0"
    return ON_THE_WAY_UP.get(point)
