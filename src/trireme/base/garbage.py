"""Python's collector of reference cycles, in a process that makes many objects and next to no cycles.

Left to itself it looks through everything that is alive each time that so and so many objects have been made: with
thousands of rollouts under way a third of the orchestrator's time, and pauses of a quarter of a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 1_000_000
"""More objects than there were, before it looks: some hundred MiB, if all of them were cycles."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Everything that is there now is there to stay: it is not looked through again.

    Afterwards it is, unless somebody else had set things aside before.
    """
    before, had_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(MANY, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not had_frozen:
            gc.unfreeze()
