"""The quickstart with a hybrid model: a tiny one is built, warmed up by `sft` and trained by `rl`.

    uv run python benchmarks/hybrid.py                             # LFM2, in 5 to 10 minutes
    uv run python benchmarks/hybrid.py --family granitemoehybrid   # [--folder outputs/hybrid] [--seed 0] [flags of rl]

Prints the training reward and the largest mismatch of trainer and engine for every 25 steps, and held-out rewards. Exit
code 1 where it has not learned: held-out reward below 0.6 before, above 0.85 after, mismatch below 1e-6.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trireme.monitor.metrics import latest_by_step, read_metrics

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART, CONFIGS = ROOT / "models/reverse-text-tiny", ROOT / "configs/reverse-text"
EVERY = 25  # steps of a line of the table
EVALUATED = ("--orchestrator.eval.interval", EVERY)
HELD_OUT = "eval/reverse-text/reward"

SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
SIZES |= {"max_position_embeddings": 4096, "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": None}
SIZES |= {"tie_word_embeddings": True, "intermediate_size": 256, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    }
    | dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 128),
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 256,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 32,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="lfm2")
    parser.add_argument("--folder", type=Path, default=Path("outputs/hybrid"))
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    began, folder = time.perf_counter(), args.folder.absolute() / args.family
    shared = ("--output-dir", str(folder), "--seed", str(args.seed))
    blank = write_model(args.family, folder / "blank")
    start("sft", "--model.name", blank, *shared, "--name", "warm-up")
    warm = max((folder / "warm-up/weights").glob("step_*"), key=lambda each: int(each.name.partition("_")[2]))
    start("rl", "--model.name", warm, *shared, "--name", "rl", *EVALUATED, *flags)
    print(f"{args.family}, seed {args.seed}: {time.perf_counter() - began:.0f} s")
    return show(folder / "rl/metrics.jsonl")


def write_model(family: str, folder: Path) -> Path:
    """Write a config.json with the quickstart's tokenizer; random weights are drawn by `sft`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*QUICKSTART.glob("*token*"), *QUICKSTART.glob("*.jinja"), QUICKSTART / "generation_config.json"):
        shutil.copy(file, folder)
    described = {"model_type": family} | SIZES | FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    return folder


def start(program: str, *flags: object) -> None:
    command = [sys.executable, "-m", f"trireme.cli.{program}", "@", CONFIGS / f"{program}.toml", *flags]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


def show(metrics: Path) -> int:
    """Print the curve, and return the exit code."""
    rows = latest_by_step(read_metrics(metrics)[0])
    rewards = {step: row["reward/mean"] for (_, step), row in rows.items() if "reward/mean" in row}
    mismatch = {step: row["mismatch_kl"] for (_, step), row in rows.items() if row.get("mismatch_kl") is not None}
    held_out = {step: row[HELD_OUT] for (_, step), row in rows.items() if HELD_OUT in row}
    table = Table("steps", "training reward", "held-out reward after", "max mismatch_kl")
    table.add_row("before", "", f"{held_out[0]:.3f}", "")
    for begin in range(0, max(rewards) + 1, EVERY):
        steps = range(begin, begin + EVERY)
        found = [rewards[step] for step in steps if step in rewards]
        after = held_out.get(steps.stop)
        largest = max((mismatch[step] for step in steps if step in mismatch), default=None)  # of tokens of lag 0 alone
        shown = ("" if after is None else f"{after:.3f}", "" if largest is None else f"{largest:.1e}")
        table.add_row(f"{begin}-{begin + len(found) - 1}", f"{sum(found) / len(found):.3f}", *shown)
    Console(width=100).print(table)
    last = held_out[max(held_out)]
    return 0 if held_out[0] < 0.6 and last > 0.85 and max(mismatch.values()) < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
