"""Comparison of two configurations by key.

Files are compared as they are on disk, so configurations of other versions of Trireme can be compared too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config.files import find_run_file, read_table, toml_value, without_secrets
from trireme.tools.record_differences import differences

Table = dict[str, Any]

ABSENT = "not there"

PLACES = (
    *("name", "output_dir", "resume", "log_level", "disk_timeout_s", "wandb", "ports", "hosts", "supervisor"),
    *("console", "dashboard", "inference_gpu_ids", "trainer_gpu_ids", "inference_gpus", "trainer_gpus"),
    *("weight_broadcast.timeout_s", "weight_broadcast.bucket_mib", "weight_broadcast.probe_tolerance"),
    *("trainer.ckpt", "trainer.batch_timeout_s", "trainer.save_logprobs", "inference.server", "ckpt"),
    *("inference.start_timeout_s", "orchestrator.server", "orchestrator.engine_timeout_s"),
    "orchestrator.trainer_timeout_s",
)
"""Keys that decide where a run runs, what it keeps and how long it waits, not what it computes."""


@dataclass(frozen=True)
class KeyDifference:
    """One key that differs.

    Example:
        KeyDifference("trainer.optim.lr", "0.0005", "0.001")
    """

    key: str
    a: str  # as it would stand in a file
    b: str

    @property
    def is_place(self) -> bool:
        """Return whether the key is one of `PLACES`, or lies in one of these tables."""
        return any(self.key == table or self.key.startswith(f"{table}.") for table in PLACES)

    def __str__(self) -> str:
        return f"{self.key}: {self.a} in A, {self.b} in B"


def read_configuration(run: Path) -> Table:
    """Read the configuration of a run. Raises ConfigError where the folder holds no run."""
    return without_secrets(read_table(find_run_file(run, "trainer")))


def compare_configurations(a: Table, b: Table) -> list[KeyDifference]:
    """Return differing keys, those that affect results first, in the order of the file."""
    flat_a, flat_b = dict(flatten(a)), dict(flatten(b))
    keys = [KeyDifference(key, _shown(flat_a, key), _shown(flat_b, key)) for key in differences(flat_a, flat_b)]
    return sorted(keys, key=lambda key: key.is_place)


def flatten(table: Table, above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tables into dotted keys. Items of a list are numbered from 0."""
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from flatten({str(number): item for number, item in enumerate(value)}, f"{key}.")
        elif value != {} and value != []:
            yield key, value


def _shown(flat: Table, key: str) -> str:
    return toml_value(flat[key]) if key in flat else ABSENT
