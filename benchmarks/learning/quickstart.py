"""Runs the quickstart with several seeds, and with other families of models, and says whether each run learned.

    uv run python -m benchmarks.learning.quickstart [--seeds 0 1 2] [more flags of `rl`]
    uv run python -m benchmarks.learning.quickstart --family lfm2 --seeds 0    # or granitemoehybrid; 5 to 10 minutes

The model of another family is a tiny hybrid, drawn at random and warmed up by `sft`. A table of each run has, by 25
steps, the training reward, the held-out reward if it was evaluated, and the largest mismatch between trainer and engine
on tokens of lag 0. The last table has both ends of each run, the largest lag, and seconds from the command to its end.
Exit code 1 if a run misses the promise: held-out reward below 0.5 before (0.6 of a hybrid), rewards above 0.85 after,
mismatch below 1e-6.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

from benchmarks import ROOT
from benchmarks.measuring import command, print_table
from benchmarks.runs import start
from support.runs.real_run import Run
from trireme.monitor.metrics import Row

MODEL, CONFIGS = ROOT / "models/reverse-text-tiny", ROOT / "configs/reverse-text"
EVERY = 25  # steps of a line of the table
COLUMNS = ("seed", "held-out before", "after", "reward before", "after", "max mismatch_kl", "max lag", "seconds")

SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
SIZES |= {"max_position_embeddings": 4096, "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": None}
SIZES |= {"tie_word_embeddings": True, "intermediate_size": 256, "eos_token_id": 2, "num_hidden_layers": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    }
    | dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 128),
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
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


def main(
    *flags: str,
    family: Annotated[str | None, tuple(HYBRIDS), "a hybrid instead of the quickstart's model"] = None,
    seeds: tuple[int, ...] = (0, 1, 2),
    folder: Path = Path("outputs/quickstart-benchmark"),
) -> int:
    rows, have_learned = [], []
    for seed in seeds:
        began = time.perf_counter()
        run = train(seed, family, folder.absolute(), flags)
        found = measure(run)
        print_table(("steps", "training reward", "held-out reward after", "max mismatch_kl"), course(run))
        print()
        ends = [f"{found[name]:.3f}" for name in ("before", "after", "first", "last")]
        rows.append([seed, *ends, f"{found['mismatch']:.1e}", found["lag"], f"{time.perf_counter() - began:.0f}"])
        have_learned.append(has_learned(found, most_before=0.6 if family else 0.5))
    print_table(COLUMNS, rows)
    return 0 if all(have_learned) else 1


def train(seed: int, family: str | None, folder: Path, flags: tuple[str, ...]) -> Run:
    """Run the real system as a user does; a hybrid is written and warmed up before."""
    if family is None:
        shared = ("--seed", seed, "--output-dir", folder)
        start("rl", "@", CONFIGS / "rl.toml", *shared, "--name", f"seed-{seed}", *flags)
        return Run(folder / f"seed-{seed}")
    folder = folder / f"{family}-{seed}"
    shared = ("--seed", seed, "--output-dir", folder)
    blank = write_hybrid(family, folder / "blank")
    start("sft", "@", CONFIGS / "sft.toml", "--model.name", blank, *shared, "--name", "warm-up")
    warm = max((folder / "warm-up/weights").glob("step_*"), key=lambda each: int(each.name.partition("_")[2]))
    often = ("--orchestrator.eval.interval", EVERY)
    start("rl", "@", CONFIGS / "rl.toml", "--model.name", warm, *shared, "--name", "rl", *often, *flags)
    return Run(folder / "rl")


def write_hybrid(family: str, folder: Path) -> Path:
    """Write a config.json with the quickstart's tokenizer; random weights are drawn by `sft`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*MODEL.glob("*token*"), *MODEL.glob("*.jinja"), MODEL / "generation_config.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family} | SIZES | HYBRIDS[family], indent=1))
    return folder


def course(run: Run) -> list[list[str]]:
    """Return the rows of a run, of `EVERY` steps each."""
    held_out = run.evaluations()
    rewards = {row["step"]: row["reward/mean"] for row in run.rows("orchestrator")}
    rows = [["before", "", f"{held_out[0]:.3f}", ""]]
    for begin in range(0, max(rewards) + 1, EVERY):
        steps = range(begin, begin + EVERY)
        found = [rewards[step] for step in steps if step in rewards]
        largest = max((row["mismatch_kl"] for row in compared(run) if row["step"] in steps), default=None)
        after = f"{held_out[steps.stop]:.3f}" if steps.stop in held_out else ""
        shown = (f"{sum(found) / len(found):.3f}", after, "" if largest is None else f"{largest:.1e}")
        rows.append([f"{begin} - {begin + len(found) - 1}", *shown])
    return rows


def compared(run: Run) -> list[Row]:
    """Return the trainer's rows of steps that had tokens of lag 0; later ones may have none."""
    return [row for row in run.rows("trainer") if row.get("mismatch_kl") is not None]


def measure(run: Run) -> dict[str, float]:
    held_out, batches = run.evaluations(), run.rows("orchestrator")
    rewards = [row["reward/mean"] for row in batches]
    return {
        "before": held_out[0],
        "after": held_out[max(held_out)],
        "first": sum(rewards[:5]) / 5,
        "last": sum(rewards[-5:]) / 5,
        "mismatch": max(row["mismatch_kl"] for row in compared(run)),
        "lag": max(row["lag/max"] for row in batches if "lag/max" in row),
    }


def has_learned(found: dict[str, float], most_before: float) -> bool:
    """Return whether the quickstart's promise holds."""
    return found["before"] < most_before and min(found["after"], found["last"]) > 0.85 and found["mismatch"] < 1e-6


if __name__ == "__main__":
    command(main)
