"""Runs the quickstart with several seeds and says whether each one learned.

    uv run python benchmarks/quickstart.py [--seeds 0 1 2] [more flags of `rl`]

Prints a table: held-out reward before and after, training reward at both ends, the largest mismatch between trainer and
engine on tokens of lag 0, lag, seconds from the command to its end. Exit code 1 where a seed misses the promise: below
0.5 before, above 0.85 after, mismatch below 1e-6.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIG = "configs/reverse-text/rl.toml"
COLUMNS = ("seed", "held-out before", "after", "reward before", "after", "max mismatch_kl", "max lag", "seconds")


def run(seed: int, folder: Path, flags: list[str]) -> dict[str, float]:
    """One whole run of the real system."""
    began = time.perf_counter()
    command = ["rl", "@", CONFIG, "--seed", str(seed), "--output-dir", str(folder), "--name", f"seed-{seed}", *flags]
    subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
    return measure(folder / f"seed-{seed}" / "metrics.jsonl") | {"seconds": time.perf_counter() - began}


def measure(metrics: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    held_out = [value for row in rows for name, value in row.items() if name.startswith("eval/") and "reward" in name]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "first": sum(rewards[:5]) / 5,
        "last": sum(rewards[-5:]) / 5,
        "mismatch": max(row["mismatch_kl"] for row in rows if row.get("mismatch_kl") is not None),
        "lag": max(row["lag/max"] for row in rows if "lag/max" in row),
    }


def kept(result: dict[str, float]) -> bool:
    """The quickstart's promise."""
    learned = result["before"] < 0.5 and result["after"] > 0.85 and result["last"] > 0.85
    return learned and result["mismatch"] < 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("outputs/quickstart-benchmark"))
    args, flags = parser.parse_known_args()
    results = {seed: run(seed, args.folder, flags) for seed in args.seeds}
    table = Table(*COLUMNS)
    for seed, r in results.items():
        table.add_row(
            str(seed),
            f"{r['before']:.3f}",
            f"{r['after']:.3f}",
            f"{r['first']:.3f}",
            f"{r['last']:.3f}",
            f"{r['mismatch']:.1e}",
            f"{r['lag']:.0f}",
            f"{r['seconds']:.0f}",
        )
    Console(width=120).print(table)
    return 0 if all(map(kept, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
