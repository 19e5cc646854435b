"""TRL's options for a CPU, tried one by one: on the quickstart's task, and on the larger model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measuring import print_table
from benchmarks.trl.cells import Cell, cells_of
from benchmarks.trl.runs import run
from benchmarks.trl.summary import cpu_per_step, seconds_per_step

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bfloat16 autocast": {"bf16": True},
    "weights in bfloat16": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "four micro-batches": {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4},
    "continuous batching": {"use_transformers_continuous_batching": True},
    "compiled": {"torch_compile": True},
    "static cache": {"cache_implementation": "static"},
    "eager attention": {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}},
}


def try_options(folder: Path, *, rows: str) -> None:
    """Print a table; what does not run at all says its last words."""
    cells = [cell for cell in cells_of([0], folder, quick=True, rows=rows) if cell.side == "trl"]
    columns = ["TRL's options", *(column for cell in cells for column in (f"{cell.name}: s per step", "CPU s"))]
    tried = (
        [name, *(_tried(replace(cell, options=options), folder) for cell in cells)] for name, options in OPTIONS.items()
    )
    print_table(columns, tried)


def _tried(cell: Cell, folder: Path) -> str:
    try:
        result = run(cell, folder / "runs" / "tuning")
    except RuntimeError:
        words = (folder / "runs" / "tuning" / "log").read_text().splitlines()
        return f"{next((word[:90] for word in reversed(words) if word.strip()), '?')} | -"
    return f"{seconds_per_step(result):.2f} | {cpu_per_step(result):.2f}"
