"""Tuning of Python's cyclic garbage collector for a process that makes many objects and hardly any cycles.

By default the collector scans every live object after a number of allocations. With thousands of rollouts under way
that took a third of the orchestrator's time, in pauses of a quarter of a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 1_000_000
"""More objects than there were, before it looks: some hundred MiB, if all of them were cycles."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Exclude the objects that exist now from collection, and collect rarely, until the context ends.

    Afterwards they are collected as before, unless objects were frozen before.
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
