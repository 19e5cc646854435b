"""What is measured: rows of the table, and the runs of each.

A cell is one run of one side. Cells are kept in a JSON file as they are done: a measurement that was stopped goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.made_models import Spread

SIDES = ("trireme", "trl")
QUICKSTART = ROOT / "models" / "reverse-text-tiny"
SPREADS = [Spread(0.0, mean=32), Spread(0.75, mean=32), Spread(1.88, mean=32)]  # the last is 1.5 after cutting off
LARGE = Spread(0.0, mean=128, longest=128)
DELAYS_S = (0.1, 1.0)


@dataclass(frozen=True)
class Cell:
    """One run. Both sides read all of it; `ours` and `options` are each side's own.

    Example:
        Cell("b", "reverse-text", side="trl", seed=0, model="models/reverse-text-tiny", max_steps=70)
    """

    row: str
    name: str
    side: str
    seed: int
    model: str
    max_steps: int
    task: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    group_size: int = 16
    max_tokens: int = 16
    seq_len: int = 128
    lr: float = 5e-4
    ours: str = ""  # lines of our configuration that belong to this row
    our_trainer: str = ""  # and those of its `[trainer]`
    options: dict[str, Any] = field(default_factory=dict)  # keys of GRPOConfig
    threads: int = 0  # theirs; 0: as many as there are cores

    @property
    def key(self) -> str:
        return f"{self.row}/{self.name}/{self.side}/{self.seed}"


def cells_of(seeds: Sequence[int], folder: Path, *, quick: bool, rows: str) -> list[Cell]:
    """Return the runs in order: sides take turns, and the one that goes first changes from seed to seed."""
    drafts = [draft for draft in _drafts(folder, quick=quick) if draft.row in rows]
    return [
        Cell(**(asdict(draft) | {"seed": seed, "side": side}))
        for place, seed in enumerate(seeds)
        for draft in drafts
        for side in (SIDES if place % 2 == 0 else SIDES[::-1])
    ]


def _drafts(folder: Path, *, quick: bool) -> list[Cell]:
    shared: dict[str, Any] = {"side": "", "seed": 0}
    reverse = shared | {"model": str(QUICKSTART)}
    frozen = shared | {"lr": 1e-6}  # the lengths stay as they are, and all the work is done
    small, large = str(folder / "models" / "small"), str(folder / "models" / "large")
    found = [Cell("b", "reverse-text", **reverse, task={"kind": "reverse"}, max_steps=30 if quick else 80)]
    for delay_s in DELAYS_S:
        task: dict[str, Any] = {"kind": "reverse", "delay_s": delay_s}
        ours = slow_environment(delay_s)
        found.append(Cell("d", f"{delay_s:g} s", **reverse, task=task, max_steps=12 if quick else 20, ours=ours))
    for spread in SPREADS[:: 2 if quick else 1]:
        sizes: dict[str, Any] = {"max_tokens": spread.longest + 1, "seq_len": 640, "max_steps": 5 if quick else 8}
        task = {"kind": "countdown", "spread": spread.word}
        name, ours = f"{spread.true_variation():.2f}", "max_async_level = 3"  # while the longest answer goes on
        found.append(Cell("c", name, **frozen, model=small, task=task, ours=ours, **sizes))
    sizes = {"max_tokens": LARGE.longest + 1, "seq_len": 256, "max_steps": 5 if quick else 10, "batch_size": 64}
    task = {"kind": "countdown", "spread": LARGE.word}
    dtypes: dict[str, Any] = {"our_trainer": "threads = 2"}
    if _is_bfloat16_faster():
        dtypes = {
            "ours": 'inference.model.dtype = "bfloat16"',
            "our_trainer": 'threads = 2\nmodel.optimization_dtype = "bfloat16"',
            "options": {"model_init_kwargs": {"dtype": "bfloat16"}},
        }
    found.append(Cell("e", "20M", **frozen, **dtypes, model=large, task=task, **sizes))
    return found


def _is_bfloat16_faster() -> bool:
    """Whether this machine's processors multiply in bfloat16 faster than in float32. Some emulate it, whatever they
    call themselves: with AVX2 alone it was 57 times slower here, on a machine with AVX-512 twice."""

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(2048, 384, dtype=dtype), torch.ones(384, 1152, dtype=dtype)
        took = []
        for _ in range(10):
            began = time.perf_counter()
            left @ right
            took.append(time.perf_counter() - began)
        return min(took)

    return seconds(torch.bfloat16) < seconds(torch.float32)


def slow_environment(delay_s: float) -> str:
    """Batches that may be under way at once: answers of one are made while another waits for its environment."""
    return f"max_async_level = {2 if delay_s < 0.5 else 4}"


class Results:
    """What is known of each cell, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return None if the cell was not measured, or was another one."""
        kept = self._found.get(cell.key)
        return kept["result"] if kept and kept["cell"] == asdict(cell) else None

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        self._found[cell.key] = {"cell": asdict(cell), "result": result}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._found, indent=1))
        new.replace(self._path)
