"""`trireme status RUN`: the state of a run, on this machine or on the cluster that it was submitted to."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.network import url_of
from trireme.base.paths import RunPaths
from trireme.base.processes import catch_signals
from trireme.base.safe_text import clean
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.folder import launcher_of
from trireme.monitor.lines import last_bytes
from trireme.monitor.metrics import PIECE_BYTES, read_in_pieces
from trireme.monitor.progress import Progress
from trireme.monitor.run_text import evaluation_text, short_time, step_line, warning_text
from trireme.monitor.spans import read_spans
from trireme.monitor.status import Status, ask_status
from trireme.monitor.timeline import time_lines
from trireme.monitor.view import open_view
from trireme.monitor.wandb_mirror import open_wandb_mirror
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import Submission, find_submission

ANSWER_S = 5.0
POLL_S = 1.0
ASK_S = 10.0
"""Between two questions about a job that waits for its machines."""
CONFIGURED_S = 120.0
"""How long a submitted run may take to write its configuration where Slurm cannot be asked about its job."""
DESERTED_S = 30.0
"""After so long without a launcher, an answer or a step, no process works on the run."""


def command(argv: list[str]) -> int:
    """Show the state of a run, and return the exit code.

    Raises: ConfigError if the folder is not a run's and was never submitted.
    """
    parser = ArgumentParser(
        prog="trireme status",
        description="Shows the state of a run: its job on the cluster, steps, rewards, evaluations and checkpoints, "
        "and what each process waits for.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder")
    add("-f", "--follow", action="store_true", help="show each step as it comes, until the run is over")
    add("--mirror", action="store_true", help="with --follow: send metrics to W&B, if the run is configured for it")
    options = parser.parse_args(argv)
    if options.follow:
        return _follow(options)

    submission = find_submission(options.run)
    if submission:
        scheduler = slurm if submission.scheduler == "slurm" else kubernetes
        print(f"job          {submission.scheduler} {submission.job}: {scheduler.state_of(submission)}")
    print(clean("\n".join(_state_lines(options.run, submission))))
    return 0


def _state_lines(run: Path, submission: Submission | None) -> list[str]:
    if submission is None:
        return list(look_at(run).lines())
    if submission.scheduler == "kubernetes":
        answer = kubernetes.ask_inside(submission)
        return answer.splitlines() if answer else ["no pod answers (yet, or any more)"]
    try:
        return list(look_at(Path(submission.run)).lines())
    except ConfigError:
        return [f"it has written nothing yet to {submission.run}"]


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment."""

    config: RunConfig
    paths: RunPaths  # the folder's present place; it may have been moved
    progress: Progress
    status: Status | None  # None if the orchestrator does not answer
    checkpoints: list[int]
    launcher: int | None  # pid, if it runs on this machine

    def lines(self) -> Iterator[str]:
        yield f"run          {self.paths.root}"
        yield f"state        {self._state()}"
        if step := self.progress.recent(1):
            yield f"newest       {' '.join(step_line(self.progress, step[0], self.status).split())}"
        if ends := self.progress.reward_ends():
            yield f"reward       {ends.first:.3f} -> {ends.last:.3f} (mean of {ends})"
        yield from (f"held out     {evaluation_text(found)}" for found in self.progress.evaluations()[-3:])
        if self.checkpoints:
            yield f"checkpoints  {', '.join(f'step_{step}' for step in self.checkpoints[-5:])}"
        if self.status:
            yield from (f"engine       {engine}" for engine in self.status.engines)
            if self.config.weight_broadcast.type != "ipc":
                yield f"more         inference --join {self.config.hosts.orchestrator}:{self.config.ports.batches}"
            yield from (f"waits        {wait.text}" for wait in self.status.waits)
        yield from self._time_lines()
        yield from (warning_text(warned) for warned in self.progress.lasting_warnings)

    def _time_lines(self) -> Iterator[str]:
        """Yield how each side spends its time. Of a long run the newest hours count, as reading all takes seconds."""
        begin = last_bytes(self.paths.spans, PIECE_BYTES)
        spans, _ = read_spans(self.paths.spans, begin)
        if begin and spans:
            yield f"time         of the newest {short_time(spans[-1].end_s - spans[0].begin_s)}:"
        yield from (f"time         {line}" for line in time_lines(spans))

    def _state(self) -> str:
        done = f"{self.progress.num_done} of {self.config.max_steps} steps are trained"
        if self.status:
            return f"{self.status.state}, version {self.status.version}; {done}"
        if self.launcher:
            return f"starting or stopping (process {self.launcher}); {done}"
        if self.progress.num_done >= self.config.max_steps:
            return f"finished; {done}"
        return f"not running here (its orchestrator does not answer); {done}"


def look_at(run: Path) -> RunState:
    """Return the state of the run in a folder.

    Raises: ConfigError if the folder holds no run.
    """
    config = read_run(RunConfig, find_run_file(run, "orchestrator"))
    paths = RunPaths(run)
    progress = Progress(config.max_steps)
    for rows, _ in read_in_pieces(paths.metrics):
        progress.add(rows)

    server = config.orchestrator.server
    where = url_of(server.host, server.port or 8001, known=config.hosts.orchestrator)
    return RunState(
        config=config,
        paths=paths,
        progress=progress,
        status=ask_status(where, run, timeout_s=ANSWER_S),
        checkpoints=complete_steps(paths.checkpoints),
        launcher=launcher_of(paths),
    )


def _follow(options: Namespace) -> int:
    """Show a run until it is over, until no process works on it, or until a signal; then send what was mirrored."""
    config = _wait_for_config(options.run, is_mirror=options.mirror)
    submission = find_submission(options.run)
    is_remote = options.mirror or submission is not None

    # A run that is over is shown once; there is nothing to follow.
    state = look_at(options.run)
    is_over = state.progress.num_done >= config.max_steps and state.status is None and state.launcher is None
    if is_over and not is_remote:
        print(clean("\n".join(state.lines())))
        return 0

    # Leave when the run is over, or when nothing has been heard of it for `DESERTED_S`.
    has_answered, num_done, seen_at, is_deserted = False, -1, time.monotonic(), False
    mirror = open_wandb_mirror(config) if options.mirror else nullcontext()
    with catch_signals() as signals, mirror, open_view(config, options.run) as view:
        while not signals:
            moved, num_done = view.progress.num_done != num_done, view.progress.num_done
            has_answered |= view.status is not None
            if moved or view.status is not None or launcher_of(RunPaths(options.run)) is not None:
                seen_at = time.monotonic()
            is_deserted, is_trained = time.monotonic() - seen_at > DESERTED_S, num_done >= config.max_steps
            # Of a run on other machines only its orchestrator can be asked, and that may be about to resume a run that
            # was over.
            if is_trained and view.status is None and (has_answered or not is_remote):
                break
            if is_deserted and (is_trained or not is_remote or (not options.mirror and _has_ended(submission))):
                break
            if is_deserted:
                seen_at = time.monotonic()  # the job is asked about again only after as long

            view.tick(())
            time.sleep(POLL_S)
        view.tick((), final=True)
    if is_deserted and not signals:
        print(clean("\n".join(look_at(options.run).lines())))
    return 0


def _has_ended(submission: Submission | None) -> bool:
    """Return whether Slurm knows that the run's job is over, so that no process will work on it."""
    if submission is None or submission.scheduler != "slurm" or not slurm.is_here():
        return False
    return not slurm.may_run(slurm.state_of(submission))


def _wait_for_config(run: Path, *, is_mirror: bool) -> RunConfig:
    """Return the run's configuration. Wait for it while the run is queued, or was only just started.

    Args:
        is_mirror: the run's own script asks, which ends this process itself.

    Raises: ConfigError if the folder is not a run's, and none is about to be started in it.
    """
    began, ask_at, awaited = time.monotonic(), 0.0, ""
    since, configs = time.strftime("%H:%M:%S"), RunPaths(run).configs
    while not any((configs / f"{name}.json").exists() for name in ("run", "orchestrator")):
        if time.monotonic() >= ask_at:
            # Asked every `ASK_S` only, to spare Slurm. A line is printed only if the answer has changed.
            before, awaited = awaited, _awaited(run, time.monotonic() - began, is_mirror=is_mirror)
            ask_at = time.monotonic() + ASK_S
            if not awaited:
                break
            if awaited != before:
                print(f"{run} has no configuration yet: status waits since {since} for {awaited}", flush=True)
        time.sleep(POLL_S)
    return read_run(RunConfig, find_run_file(run, "orchestrator"))


def _awaited(run: Path, waited_s: float, *, is_mirror: bool) -> str:
    """Return what is about to write the run's configuration, and the path of its log; "" if nothing is.

    Raises: ConfigError if the run's job is over, or writes to another machine's disk.
    """
    if is_mirror or launcher_of(RunPaths(run)) is not None:
        return f"the run's processes; their logs: {RunPaths(run).logs}"

    submission = find_submission(run)
    if submission is None:
        return ""
    if submission.scheduler == "kubernetes":
        raise ConfigError(
            f"{run} cannot be followed from here: job {submission.job} in Kubernetes writes to its volume, at "
            f"{submission.run} - expected a run's folder on this machine. `trireme logs {run} -f` follows the run, and "
            f"`trireme status {run}` asks it once."
        )

    # Without its commands Slurm cannot be asked: then a limit of time decides.
    job, log = f"Slurm's job {submission.job}", submission.folder / f"slurm-{submission.job}.log"
    state = slurm.state_of(submission)
    if not slurm.may_run(state) if slurm.is_here() else waited_s > CONFIGURED_S:
        raise ConfigError(
            f"{run} has no configuration after {waited_s:.0f} s, and {job}: {state} - expected a job that is queued or "
            f"running. Look at {log}, and submit the run again, or follow it where Slurm's commands are."
        )
    return f"{job}: {state}; its log: {log}"
