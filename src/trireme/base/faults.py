"""Fault injection for tests, through `TRIREME_FAULTS="name=value,name=value"`. Without it every call here is a no-op.

Production code names a point where something can go wrong; a test makes it go wrong there, in the real process.

    TRIREME_FAULTS="skip_tensor=model.norm.weight"      a fault with a value, read with `fault`
    TRIREME_FAULTS="skip_tensor.rank1=..."              the same in an engine's second worker alone
    TRIREME_FAULTS="folder=/tmp/faults"                 points of the protocol, armed while the run is under way

A file in that folder, named after a point, arms it. Its content is the action: `kill` (SIGKILL), `freeze` (SIGSTOP) or
`hold` (wait until `POINT.go` exists). The first process that reaches the point renames the file to `POINT.reached` and
writes its pid into it, so a fault happens once even if the process is restarted.

Example:
    (folder / "journal.appended").write_text("kill")    # the orchestrator dies after its next batch is on disk
    (folder / "trainer.stepped.rank1").write_text("hold")
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

POINTS = {
    # orchestrator
    "orchestrator.starting": "its ports are bound, nothing else is open",
    "orchestrator.started": "environments and journal are open, engines not yet looked at",
    "rollout.begun": "the first rollout of a group is about to be issued",
    "rollout.finished": "a rollout has its reward, its group may have others under way",
    "environment.asked": "a rollout was sent to its worker (a `kill` hits the worker)",
    "turn.sampled": "a turn of an agent program is sampled, nothing of it is on disk",
    "turn.continued": "a later turn of a rollout is sampled, nothing of it is on disk",
    "turn.written": "it is on disk, and the program has not seen it",
    "request.written": "so is the request, and the program has not been answered",
    "session.taken": "a rollout is given to a client of a user's own harness, and the client has not been answered",
    "session.rewarded": "a client's reward has come, nothing of it is on disk, and the client has not been answered",
    "environment.scored": "a worker has answered with a reward (a `kill` hits the worker)",
    "journal.before_append": "a batch is full, nothing of it is on disk",
    "journal.appended": "it is on disk, and no process knows",
    "batch.answered": "a rank is about to be handed its share",
    "update.told": "the engines are asked to receive, the trainer is not yet asked to send",
    "update.paused": "an engine is paused for new weights, none is loaded",
    "update.unnamed": "an engine has loaded every tensor, and its weights still have the old name",
    "update.loaded": "the engines have loaded, nothing is compared yet",
    "version.before_record": "a version is confirmed, and not on disk",
    "version.recorded": "its confirmation is on disk, and it is not live yet",
    "version.live": "requests are answered by it, the trainer does not know",
    "evaluation.running": "some of its rollouts are under way",
    "evaluation.before_write": "all are in, nothing is on disk",
    "evaluation.written": "its results are on disk, its metrics are not",
    "orchestrator.finishing": "all is done, the trainer may not have said good-bye",
    # trainer, each also as NAME.rank1, NAME.rank2, ...
    "trainer.starting": "the process group is joined, no model is loaded",
    "trainer.resumed": "model and checkpoint are loaded",
    "trainer.batch_received": "a batch is in memory",
    "trainer.stepped": "the optimizer has stepped, nothing is published",
    "trainer.sending": "some tensors of a version are sent, others not",
    "trainer.sent": "all are sent, no confirmation is requested",
    "trainer.published": "the engines are asked to confirm, the trainer continues meanwhile",
    "trainer.confirmed": "the new version is live, its checkpoint is not begun",
    "trainer.recorded": "the step's metrics are on disk",
    "trainer.finishing": "the last version is live and saved, the orchestrator does not know",
    "checkpoint.begun": "its folder is made, nothing is in it",
    "checkpoint.written": "its files are on disk, its manifest is not",
    "checkpoint.before_rename": "its manifest is on disk, its name is not yet its own",
    "checkpoint.complete": "it counts, older ones are not yet removed",
    "export.written": "weights in Hugging Face format are on disk under another name",
    # engine core
    "engine.joined": "it is connected to the trainer for weights",
    "engine.receiving": "some tensors have come, others not",
    "engine.received": "all have come, the layers are not yet put together",
    "engine.finished": "they are, its version is still the old one",
    # launcher
    "launcher.started": "all processes were started",
    "launcher.restarting": "a dead process's family is gone, its successor is not started",
}
"""Every point by name: what is done there, and what not yet."""

HOLD_S = 120.0


def fault(name: str) -> str | None:
    """Return the value of a fault that a test set, or None."""
    for part in os.environ.get("TRIREME_FAULTS", "").split(","):
        key, _, value = part.partition("=")
        if key == name:
            return value
    return None


def reach(point: str, *, rank: int = 0, pid: int | None = None) -> None:
    """Mark that this process has reached `point`, and take the action that a test armed there.

    Args:
        pid: the process that a `kill` or `freeze` hits; this one by default.
    """
    if "TRIREME_FAULTS" not in os.environ:
        return
    assert point in POINTS, f"{point} is no point of {sorted(POINTS)}"
    if (value := fault("folder")) is None:
        return

    folder, name, pid = Path(value), f"{point}.rank{rank}" if rank else point, os.getpid() if pid is None else pid
    reached = folder / f"{name}.reached"

    # The rename disarms the point: of several processes that reach it, exactly one takes the action.
    try:
        what = (folder / name).read_text()
        os.rename(folder / name, reached)
    except FileNotFoundError:  # not armed, or taken by another process
        return

    # The file still holds the action. It is replaced whole, so that a test never reads half a pid.
    partial = reached.with_suffix(f".{os.getpid()}")
    partial.write_text(str(pid))
    os.replace(partial, reached)

    # The action comes last, as this process may not survive it.
    match what:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "freeze":
            os.kill(pid, signal.SIGSTOP)
        case "hold":
            give_up = time.monotonic() + HOLD_S
            while not (folder / f"{name}.go").exists() and time.monotonic() < give_up:
                time.sleep(0.01)
        case _:
            raise AssertionError(f"{folder / name} asks for {what!r}; expected kill, freeze or hold")
