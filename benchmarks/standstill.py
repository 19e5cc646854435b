"""How long requests stand still for a weight update, against how long the engine loads: the real engine and trainer.

    uv run python benchmarks/standstill.py [--millions 2 20 100 500] [--steps 12]

Each model is made here, and trained for a few steps on answers of a few tokens, while others are made: the figures are
those that any run writes into its `metrics.jsonl`. 500 million parameters take 14 GiB and some minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from real_rl import SIZES, Size, run
from rich.console import Console
from rich.table import Table

FIRST = 3  # steps before it warm up

OURS = """
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, nargs="+", default=[2, 20, 100], choices=SIZES)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    table = Table("parameters", "step, s", "update, ms", "loading, ms", "standing still, ms", "of loading")
    for millions in args.millions:
        with tempfile.TemporaryDirectory(prefix="standstill-") as folder:
            found = measure(SIZES[millions], Path(folder), steps=args.steps)
        table.add_row(
            f"{found['parameters'] / 1e6:.1f} million",
            f"{found['step']:.2f}",
            *(f"{1000 * found[what]:.0f}" for what in ("update", "load", "paused")),
            f"{found['paused'] / found['load']:.2f}",
        )
        Console(width=120).print(table)


def measure(size: Size, folder: Path, *, steps: int) -> dict[str, float]:
    """Medians over the steps of one run."""
    return figures(*run(size, folder, answer_tokens=6, steps=steps, ours=OURS))


def figures(run: Path, model: Path) -> dict[str, float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["process"] == "orchestrator" and row.get("time/engines_load")]
    updates = [row for row in updates if row["step"] >= FIRST]
    names = {"update": "time/update_weights", "load": "time/engines_load", "paused": "time/engines_paused"}
    found = {short: median(row[name] for row in updates) for short, name in names.items()}
    trained = [row["time/step"] for row in rows if row["process"] == "trainer" and row["step"] >= FIRST]
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return found | {"step": median(trained), "parameters": size / 4}


if __name__ == "__main__":
    main()
