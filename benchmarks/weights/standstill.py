"""How long requests stand still for a weight update, against how long the engine loads: the real engine and trainer.

    uv run python -m benchmarks.weights.standstill [--millions 2 20 100 500] [--steps 12]

Each model is made here, and trained for a few steps on answers of a few tokens, while others are made: the figures are
those that any run writes into its `metrics.jsonl`. 500 million parameters take 14 GiB and some minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.measuring import command, print_table
from benchmarks.runs import run_countdown

FIRST = 3  # steps before it warm up
TIMES = ("time/update_weights", "time/engines_load", "time/engines_paused")
COLUMNS = ("parameters", "step, s", "update, ms", "loading, ms", "standing still, ms", "of loading")
SETTINGS = """
seq_len = 64
inference.model.dtype = "bfloat16"

[trainer]
micro_batch_tokens = 512
model.optimization_dtype = "bfloat16"

[trainer.optim]
lr = 1e-6

[orchestrator]
batch_size = 32
rollouts_per_example = 8
sampling.max_tokens = 9
"""


def main(millions: tuple[Literal[2, 20, 100, 500], ...] = (2, 20, 100), steps: int = 12) -> None:
    print_table(COLUMNS, (measure(each, steps) for each in millions))


def measure(millions: int, steps: int) -> list[str]:
    """Return the row of one run: medians over its steps."""
    with tempfile.TemporaryDirectory(prefix="standstill-") as name:
        folder = Path(name)
        run = run_countdown(millions, folder, answer_tokens=6, steps=steps, settings=SETTINGS)
        updates = [row for row in run.rows("orchestrator") if row.get("time/engines_load") and row["step"] >= FIRST]
        update, load, paused = (1000 * median(row[name] for row in updates) for name in TIMES)
        step_s = median(row["time/step"] for row in run.rows("trainer") if row["step"] >= FIRST)
        size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors")) / 4e6
    return [
        f"{size:.1f} million",
        f"{step_s:.2f}",
        *(f"{ms:.0f}" for ms in (update, load, paused)),
        f"{paused / load:.2f}",
    ]


if __name__ == "__main__":
    command(main)
