"""How long requests stand still for a weight update, against how long the engine loads: the real engine and trainer.

    uv run python benchmarks/standstill.py [--millions 2 20 100 500] [--steps 12]

Each model is made here, and trained for a few steps on answers of a few tokens, while others are made: the figures are
those that any run writes into its `metrics.jsonl`. 500 million parameters take 14 GiB and some minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
WORD = "spread0"  # a prompt whose answers are all equally long
FIRST = 3  # steps before it warm up
LONGEST_S = 1200

CONFIG = """
name = "run"
output_dir = {folder}
max_steps = {steps}
seq_len = 64
device = "cpu"
inference.model.dtype = "bfloat16"

[model]
name = {model}

[trainer]
micro_batch_tokens = 512
model.optimization_dtype = "bfloat16"

[trainer.optim]
lr = 1e-6

[orchestrator]
batch_size = 32
rollouts_per_example = 8

[orchestrator.sampling]
max_tokens = 9

[[orchestrator.env]]
id = {environment}
name = "task"
args = {{ kind = "countdown", spread = {spread} }}
"""


@dataclass(frozen=True)
class Size:
    """Of a model, by its width and depth."""

    hidden: int
    layers: int
    heads: int


SIZES = {2: Size(192, 4, 6), 20: Size(384, 11, 6), 100: Size(768, 14, 12), 500: Size(1536, 18, 12)}
"""By millions of parameters, about."""


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
    model = write_model(size, folder / "model")
    config, run = folder / "rl.toml", folder / "run"
    config.write_text(
        CONFIG.format(
            folder=json.dumps(str(run)),
            model=json.dumps(str(model)),
            steps=steps,
            environment=json.dumps(str(HERE.with_name("trl") / "task.py")),
            spread=json.dumps(WORD),
        )
    )
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(Path(sys.executable).with_name("rl")), "@", str(config)]
        ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=LONGEST_S)
    if ended.returncode:
        sys.exit(f"The run ended with {ended.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    return figures(run / "run", model)


def write_model(size: Size, folder: Path) -> Path:
    sys.path.insert(0, str(HERE.with_name("trl")))
    from models import Spread, write_countdown

    answers = Spread(0.0, mean=6, longest=8)
    assert answers.word == WORD
    return write_countdown(folder, [answers], hidden=size.hidden, layers=size.layers, heads=size.heads)


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
