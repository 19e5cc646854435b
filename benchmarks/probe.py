"""How far rounding to bfloat16 moves a probe's logprobs, in multiples of the noise by which an engine is judged.

    uv run python benchmarks/probe.py [--models 60] [--family qwen3 ...]     # a minute, at 250 models three

Each model is tiny and random (`tests/families.py`). The trainer computes its probe and the probe's noise as in a run,
and transformers the same logprobs in bfloat16 with the same weights, as an engine that is right would. A run ends where
the mean difference is more than `TIMES_NOISE` times the noise. For models that cap their attention scores the last
column is an engine that is wrong, with another cap.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import families
from trireme.config.trainer import TrainerModel
from trireme.messages import Probe
from trireme.orchestrator.weights.update import TIMES_NOISE
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.publish.probe import compute_probe

FAMILIES = ("qwen3", "gemma2", "qwen3_moe", "lfm2_moe")
OTHER_CAP = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=60, help="random models of each family")
    parser.add_argument("--family", choices=families.CONFIGS, nargs="+", default=FAMILIES)
    arguments = parser.parse_args()
    table = Table("family", "median", "largest", f"above {TIMES_NOISE:g}", "another cap, median", "and below")
    disable_progress_bar()
    with open_world("cpu", threads=1, timeout_s=60) as world:
        for kind in arguments.family:
            measured = [measure(kind, seed, world) for seed in range(arguments.models)]
            right, wrong = [each[0] for each in measured], [each[1] for each in measured if each[1] is not None]
            refused = sum(ratio > TIMES_NOISE for ratio in right)
            row = [kind, f"{statistics.median(right):.2f}", f"{max(right):.2f}", str(refused)]
            if wrong:
                row += [f"{statistics.median(wrong):.2f}", str(sum(ratio <= TIMES_NOISE for ratio in wrong))]
            table.add_row(*row)
    Console(width=100).print(table)


def measure(kind: str, seed: int, world: World) -> tuple[float, float | None]:
    """Return the mean difference of bfloat16 in multiples of the noise, and with another cap where there is one."""
    with TemporaryDirectory() as folder:
        families.save_family(Path(folder), families.build_config(kind), seed=seed)
        model = load_model(TrainerModel(attn="eager"), folder, world)
        probe = compute_probe(model, world.device, (torch.bfloat16,))
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    right = difference(half, probe) / probe.noise
    capped = [part for part in half.modules() if getattr(part, "attn_logit_softcapping", None)]
    for part in capped:
        part.attn_logit_softcapping = OTHER_CAP
    return right, difference(half, probe) / probe.noise if capped else None


@torch.no_grad()
def difference(model: PreTrainedModel, probe: Probe) -> float:
    ids = torch.tensor([probe.ids])
    logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return float((logprobs.gather(-1, ids[0, 1:, None])[:, 0] - torch.tensor(probe.logprobs)).abs().mean())


if __name__ == "__main__":
    main()
