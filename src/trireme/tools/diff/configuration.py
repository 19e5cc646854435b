"""Comparison of two configurations by key.

Files are compared as they are on disk, so configurations of other versions of Trireme can be compared too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config.files import find_run_file, read_table, toml_value, without_secrets
from trireme.config.resume import flatten, when_of
from trireme.tools.record_differences import differences

Table = dict[str, Any]

ABSENT = "not there"


@dataclass(frozen=True)
class KeyDifference:
    """One key that differs.

    Example:
        KeyDifference("trainer.optim.lr", "0.0005", "0.001")
    """

    key: str
    a: str  # value as a file would have it
    b: str

    @property
    def is_place(self) -> bool:
        """Return whether it decides where a run runs, what it keeps and how long it waits, not what it computes."""
        return "at once" in (when_of(self.key), when_of(self.key, is_sft=True))

    def __str__(self) -> str:
        return f"{self.key}: {self.a} in A, {self.b} in B"


def read_configuration(run: Path) -> Table:
    """Read the configuration of a run. Raises ConfigError if the folder holds no run."""
    return without_secrets(read_table(find_run_file(run, "trainer")))


def compare_configurations(a: Table, b: Table) -> list[KeyDifference]:
    """Return differing keys, those that affect results first, in the order of the file."""
    flat_a, flat_b = dict(flatten(a)), dict(flatten(b))
    keys = [KeyDifference(key, _shown(flat_a, key), _shown(flat_b, key)) for key in differences(flat_a, flat_b)]
    # a stable sort: keys stay in the order of the file within each half
    return sorted(keys, key=lambda key: key.is_place)


def _shown(flat: Table, key: str) -> str:
    return toml_value(flat[key]) if key in flat else ABSENT
