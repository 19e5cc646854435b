"""`trireme status RUN`: how a run stands, on this machine or on the cluster that it was submitted to."""

from __future__ import annotations

import signal
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.launch.folder import launcher_of
from trireme.launch.run_state import look_at
from trireme.monitor.live_view import open_view
from trireme.monitor.view import View
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import Submission, find_submission
from trireme.tools.cluster.secrets import SECRETS, read_token

POLL_S = 1.0
DESERTED_S = 30.0
"""So long without a launcher, an answer or a step: nobody is at work."""


def status(argv: list[str]) -> int:
    """Raises: ConfigError for a folder that is no run and was never submitted."""
    options = _parse(argv)
    if options.follow:
        return _follow(options)
    submission = find_submission(options.run)
    if submission:
        print(f"job          {submission.scheduler} {submission.job}: {_state(submission)}")
    print("\n".join(_standing(options.run, submission)))
    return 0


def _state(submission: Submission) -> str:
    return slurm.state_of(submission) if submission.scheduler == "slurm" else kubernetes.state_of(submission)


def _standing(run: Path, submission: Submission | None) -> list[str]:
    if submission is None:
        return list(look_at(run).lines())
    if submission.scheduler == "kubernetes":
        said = kubernetes.ask_inside(submission)
        return said.splitlines() if said else ["the orchestrator's pod does not answer (yet, or any more)"]
    try:
        token, address = read_token(submission.folder / SECRETS), _leader(submission)
        return list(look_at(Path(submission.run), token=token, address=address).lines())
    except ConfigError:
        return [f"it has written nothing yet to {submission.run}"]


def _leader(submission: Submission) -> str | None:
    """The orchestrator's machine; None where the run is on one, and then hears only that one."""
    if len(set(submission.processes.values())) == 1:
        return None
    machines = slurm.machines_of(submission)
    return machines[submission.leader] if submission.leader < len(machines) else None


def _follow(options: Namespace) -> int:
    """Until the run is over, nobody is at work on it any more, or somebody asks this to end; what was mirrored is sent
    then. Of one that is over, or has stopped, it tells how it stands."""
    config = _wait_for_config(options.run)
    is_far = options.mirror or find_submission(options.run) is not None
    if not is_far and _is_over(options.run):
        print("\n".join(look_at(options.run).lines()))
        return 0
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: asked.append(received))
    watch = _Watch(options.run, config.max_steps, is_far=is_far)
    with _mirror(config) if options.mirror else nullcontext(), open_view(config) as view:
        while not asked and watch.goes_on(view):
            view.tick(())
            time.sleep(POLL_S)
        view.tick((), final=True)
    if watch.is_deserted and not asked:
        print("\n".join(look_at(options.run).lines()))
    return 0


def _is_over(run: Path) -> bool:
    standing = look_at(run)
    is_trained = standing.progress.num_done >= standing.config.max_steps
    return is_trained and standing.status is None and standing.launcher is None


class _Watch:
    """Whether there is more to follow. Of a run on other machines only its orchestrator can be asked, and that may be
    about to go on with a run that had come to its end."""

    def __init__(self, run: Path, max_steps: int, *, is_far: bool) -> None:
        self._run = run
        self._max_steps = max_steps
        self._is_far = is_far
        self._has_answered = False
        self._num_done = -1
        self._seen_at = time.monotonic()

    @property
    def is_deserted(self) -> bool:
        return time.monotonic() - self._seen_at > DESERTED_S

    def goes_on(self, view: View) -> bool:
        self._look(view)
        is_trained = view.progress.num_done >= self._max_steps
        if is_trained and view.status is None and (self._has_answered or not self._is_far):
            return False
        return not self.is_deserted or (self._is_far and not is_trained)

    def _look(self, view: View) -> None:
        moved, self._num_done = view.progress.num_done != self._num_done, view.progress.num_done
        self._has_answered |= view.status is not None
        if moved or view.status is not None or launcher_of(RunPaths(self._run)) is not None:
            self._seen_at = time.monotonic()


def _mirror(config: RunConfig):  # type: ignore[no-untyped-def]
    from trireme.monitor.wandb_mirror import open_wandb_mirror

    return open_wandb_mirror(config)


def _wait_for_config(run: Path) -> RunConfig:
    """A run that was only just started has none yet."""
    while True:
        try:
            return read_run(RunConfig, find_run_file(run, "orchestrator"))
        except ConfigError:
            if not run.is_dir():
                raise
            time.sleep(POLL_S)


def _parse(argv: list[str]) -> Namespace:
    parser = ArgumentParser(
        prog="trireme status",
        description="Says how a run stands: its job on the cluster, its steps, rewards, evaluations and checkpoints, "
        "and what each process waits for.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("-f", "--follow", action="store_true", help="show each step as it comes, until the run is over")
    parser.add_argument(
        "--mirror", action="store_true", help="with --follow: metrics to Weights & Biases, where the run wants that"
    )
    return parser.parse_args(argv)
