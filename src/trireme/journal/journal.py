"""The journal: one file per batch, on disk before any trainer can see the batch. It is also the archive of rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import move_aside
from trireme.journal.entry import read_entry, write_entry
from trireme.journal.origin import first_version, read_origin
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.journal.turns import turns_folder
from trireme.messages import encode


class Journal:
    """The entries of a run, in order, without gaps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: BatchRecord | None = None

    def path(self, step: int) -> Path:
        return self._folder / f"batch_{step:06d}.msgpack"

    def append(self, record: BatchRecord) -> None:
        """Append a batch and return when it is on disk.

        Raises:
            OSError: it could not be written (a full disk); nothing was.
            JournalCorrupt: another orchestrator has written that entry.
        """
        # Encode rollout by rollout, which gives the same bytes: one call for all would block other threads for as long.
        rollouts = [msgspec.Raw(_encoded(rollout)) for rollout in record.rollouts]
        pieces = msgspec.structs.replace(record, rollouts=rollouts)
        write_entry(self.path(record.step), record.step, pieces, replace=False)

        # Only now, when it is on disk: `read` must never return a batch that a crash could lose.
        self._last = record

    def read(self, step: int) -> BatchRecord:
        """Read a batch. Raises JournalCorrupt if it is not what was written."""
        # The batch that was just committed is asked for by the trainer next: it need not be read back.
        if self._last is not None and self._last.step == step:
            return self._last
        ways_out = f"Restore it, or go on from before it with --trainer.ckpt.resume-step {step} or less."
        return read_entry(self.path(step), step, BatchRecord, ways_out=ways_out)

    def has(self, step: int) -> bool:
        return self.path(step).exists()

    def steps(self) -> list[int]:
        names = [path.stem.removeprefix("batch_") for path in self._folder.glob("batch_*.msgpack")]
        return sorted(int(name) for name in names if name.isdecimal())

    def first(self) -> int:
        """Return the number of the first batch: 0, or that of the version which the run took from another one."""
        return first_version(self._folder.parent)

    def require_all(self, steps: range | None = None, *, ways_out: str = "") -> list[int]:
        """Return the steps of the entries, all of them or those within a range.

        Args:
            ways_out: a sentence with alternatives to restoring a missing entry.

        Raises: JournalCorrupt if an entry before the newest is missing.
        """
        there = self.steps()
        begin, end = self.first(), there[-1] + 1 if there else 0
        wanted = [step for step in range(begin, end) if steps is None or step in steps]
        if missing := sorted(set(wanted) - set(there)):
            raise JournalCorrupt(
                f"{self._folder} misses batch {missing[0]} of {there[-1]}. Restore {self.path(missing[0])}."
                f"{' ' * bool(ways_out)}{ways_out}"
            )
        return wanted

    def head_state(self) -> State:
        """Return the state after the newest entry; the one that the run begins with if there is none. Raises
        JournalCorrupt."""
        steps = self.require_all()
        return self.state_before(steps[-1] + 1 if steps else self.first())

    def state_before(self, step: int) -> State:
        """Return the state that a batch continues from. Raises JournalCorrupt if the entry before is damaged."""
        origin = read_origin(self._folder.parent)
        if step > (origin.begins_at if origin else 0):
            return self.read(step - 1).state
        return origin.state if origin else State()

    def rewind(self, step: int) -> None:
        """Move aside the entries from `step` on. Nothing is deleted."""
        later = [self.path(number) for number in self.steps() if number >= step]

        # Turns of rollouts in progress continue from the batches that are moved, so they go with them.
        under_way = turns_folder(self._folder)
        move_aside(self._folder, [*later, under_way] if under_way.exists() else later)
        self._last = None


def _encoded(rollout: Rollout) -> bytes:
    """Encode a rollout. Integers of an environment or an agent program that exceed 64 bits are written as text."""
    try:
        return encode(rollout)
    except OverflowError:
        return encode(_in_64_bits(rollout))


def _in_64_bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_64_bits(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **_in_64_bits(msgspec.structs.asdict(value)))
    if isinstance(value, list):
        return [_in_64_bits(item) for item in value]

    # msgpack holds -2^63 to 2^64 - 1.
    is_too_large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return str(value) if is_too_large else value
