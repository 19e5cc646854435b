"""Comparison of two runs' steps, evaluations and weights, to the bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from trireme.base.paths import RunPaths, step_folder
from trireme.journal.versions import Versions
from trireme.monitor.metrics import Row
from trireme.tools.diff.differences import Difference

STEP_ASPECTS = ("lr", "loss", "grad_norm", "training")
CLOCKED = ("time/", "perf/", "weights/", "time_s", "memory/")
"""Metrics of how long something took and what it took, and not of what came out."""

HEADER_BYTES = 8  # of a file of tensors: the length of its table, which follows
MOST_HEADER = 100_000_000


def compare_steps(step: int, a: Row, b: Row) -> Iterator[Difference]:
    """Compare the trainer's metrics of a step, causes first."""
    rest = [name for name in _common(a, b) if name not in STEP_ASPECTS]
    for aspect, names in (("lr", ["lr"]), ("loss", ["loss"]), ("grad_norm", ["grad_norm"]), ("training", rest)):
        yield from _compare_values(aspect, step, f"step {step}", {name: a.get(name) for name in names}, b)


def compare_evaluations(version: int, a: Row, b: Row) -> Iterator[Difference]:
    """Compare the metrics of one version on held-out examples."""
    ours = {name: value for name, value in a.items() if name.startswith("eval/") and name in b}
    yield from _compare_values("evaluation", version, f"version {version}", ours, b)


def _common(a: Row, b: Row) -> list[str]:
    """Return the metrics that both have: another version of Trireme may record more."""
    return sorted(
        name for name in a.keys() & b.keys() if not name.startswith(CLOCKED) and name not in ("step", "process")
    )


def _compare_values(aspect: str, step: int, where: str, a: Mapping[str, object], b: Row) -> Iterator[Difference]:
    differ = [name for name in a if a[name] != b.get(name)]
    if differ:
        note = f"and {len(differ) - 1} more of {len(a)}" if len(differ) > 1 else ""
        yield Difference(aspect, step, f"{where}, {differ[0]}", _shown(a[differ[0]]), _shown(b.get(differ[0])), note)


def _shown(value: object) -> str:
    return "not finite" if value is None else str(value)


class Weights:
    """Records of a run's weights: digests that engines confirmed, or exported files."""

    def __init__(self, paths: RunPaths) -> None:
        self._versions = Versions(paths.journal)
        self._exports = paths.weights

    def confirmed(self, version: int) -> dict[str, str] | None:
        """Return confirmed digests by tensor. Raises JournalCorrupt where the record is damaged."""
        return self._versions.read(version).digests if self._versions.has(version) else None

    def exported(self, version: int) -> dict[str, str] | None:
        """Return digests of exported tensors, reading all of them; None where the version was not exported as
        tensors."""
        files = sorted(step_folder(self._exports, version).glob("*.safetensors"))
        try:
            return {name: digest for file in files for name, digest in _digests_of(file)} or None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not such a file, or half of it
            return None


def _digests_of(file: Path) -> Iterator[tuple[str, str]]:
    """Return SHA-256 of type, shape and bytes of each tensor in a file, without loading it by a library."""
    with open(file, "rb") as tensors:
        length = int.from_bytes(tensors.read(HEADER_BYTES), "little")
        if length > MOST_HEADER:
            raise ValueError(f"{file} has a table of {length} bytes")
        table = json.loads(tensors.read(length))
        for name, entry in table.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors.seek(HEADER_BYTES + length + begin)
                head = f"{entry['dtype']} {entry['shape']} ".encode()
                yield name, hashlib.sha256(head + tensors.read(end - begin)).hexdigest()[:32]


def compare_weights(version: int, a: Weights, b: Weights) -> tuple[bool, Difference | None]:
    """Return whether there was anything to compare, and the first tensor that differs."""
    ours, theirs, source = a.confirmed(version), b.confirmed(version), "confirmed"
    if ours is None or theirs is None:
        ours, theirs, source = a.exported(version), b.exported(version), "exported"
    if ours is None or theirs is None:
        return False, None
    differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not differ:
        return True, None
    name = differ[0]
    note = f"{len(differ)} of {len(ours)} tensors differ, as {source}"
    where = f"version {version}, {name}"
    return True, Difference("weights", version, where, ours.get(name, "no"), theirs.get(name, "no"), note)
