"""TRL's options for a CPU, tried one by one: on the quickstart's task, and on the larger model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import Cell, cells_of
from runs import run
from summary import cpu_per_step, seconds_per_step

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


def tune(folder: Path, *, rows: str) -> str:
    """A table; what does not run at all says its last words."""
    cells = [cell for cell in cells_of([0], folder, quick=True, rows=rows) if cell.side == "trl"]
    table = [f"| TRL's options | {' | '.join(f'{cell.name}: s per step | CPU s' for cell in cells)} |"]
    table.append("|---|" + "---|---|" * len(cells))
    for name, options in OPTIONS.items():
        tried = [_tried(replace(cell, options=options), folder) for cell in cells]
        table.append(f"| {name} | {' | '.join(tried)} |")
        print(table[-1], flush=True)
    return "\n".join(table)


def _tried(cell: Cell, folder: Path) -> str:
    try:
        result = run(cell, folder / "runs" / "tuning")
    except RuntimeError:
        words = (folder / "runs" / "tuning" / "log").read_text().splitlines()
        return f"{next((word[:90] for word in reversed(words) if word.strip()), '?')} | -"
    return f"{seconds_per_step(result):.2f} | {cpu_per_step(result):.2f}"
