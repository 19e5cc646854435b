"""A rank's share of a batch, asked for while the batch before is trained on and its weights are sent.

The orchestrator hands out what is in its journal to whoever asks, however early, so nothing else is decided by that.
Only rank 0 asks in its turn: it may be told that an engine needs weights first, and those it has only then. Where a
step's weights must be live before the next batch can begin (`max_async_level = 0`) nobody asks early, for there would
be nothing to have.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.messages import BatchReply, GetBatch
from trireme.trainer.checkpoint.background import Background
from trireme.trainer.parallel.mesh import World
from trireme.transport.control import ControlClient

CHECK_S = 1.0
"""After so long the thread looks whether it is still wanted."""

CLOSE_S = 1.0


class Prefetch:
    """Of one rank. At most one batch is under way."""

    def __init__(self, config: RunConfig, world: World, waits: Waits, *, address: str) -> None:
        """
        Args:
            address: the orchestrator's.
        """
        self._config = config
        self._world = world
        self._who = waits.who
        self._address = address
        self._background = Background(waits, peer="orchestrator")
        self._stop = threading.Event()
        self._step: int | None = None  # what was begun, and not taken
        self._found: BatchReply | None = None

    def begin_if_ahead(self, step: int) -> None:
        """Where batch `step` may be there before its turn."""
        is_ahead = self._config.max_async_level > 0 and step < self._config.max_steps
        if is_ahead and self._world.cp_rank == 0 and not self._world.is_main:
            self._step, self._found = step, None
            self._background.begin(f"batch {step}", lambda: self._fetch(step))

    def take(self, step: int) -> BatchReply | None:
        """None where it was not asked for. Returns when it is there; raises what asking raised.

        Raises: DeadlineExceeded, counted from here.
        """
        if self._step != step:
            return None
        self._background.wait(self._config.trainer.batch_timeout_s)
        found, self._step, self._found = self._found, None, None
        return found

    def _fetch(self, step: int) -> None:
        """In a thread of its own, with a socket of its own; what it waits for is shown once this rank waits for it."""
        client = ControlClient(self._address, Waits(self._who))
        request = request_for(self._config, self._world, step)
        try:
            while not self._stop.is_set() and self._found is None:
                with suppress(DeadlineExceeded):
                    reply = client.ask(request, what=f"batch {step}", deadline_s=CHECK_S)
                    assert isinstance(reply, BatchReply), reply
                    self._found = reply
        finally:
            client.close()

    def close(self) -> None:
        self._stop.set()
        self._background.close(CLOSE_S if self._step is not None else 0.0)


def request_for(config: RunConfig, world: World, step: int) -> GetBatch:
    """Ranks that share their rows ask as one."""
    return GetBatch(run_id=config.run_id, step=step, rank=world.dp_rank, world=world.dp_size)
