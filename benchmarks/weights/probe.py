"""How far rounding to bfloat16 moves a probe's logprobs, in multiples of the noise by which an engine is judged.

    uv run python -m benchmarks.weights.probe [--models 60] [--family qwen3 ...]   # 1 minute, at 250 models 3
    uv run python -m benchmarks.weights.probe --drift [--family qwen3 ...]         # how fast the noise changes

Each model is tiny and random (`tests/support/models/families.py`). The trainer computes its probe and the probe's noise
as in a run, and transformers the same logprobs in bfloat16 with the same weights, as an engine that is right would. A
run ends if the mean difference is more than `TIMES_NOISE` times the noise. For models that cap their attention scores
the last column is an engine that is wrong, with another cap.

`--drift` trains one model of each family for 160 steps at the quickstart's learning rate, on random tokens that it
learns by heart, so that its weights change faster than in a run. Printed is by which factor the noise grew or shrank,
at most, between two versions that many steps apart.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.measuring import command, print_table
from support.models import families
from trireme.config.trainer import TrainerModel
from trireme.messages import Probe
from trireme.orchestrator.weights.update import TIMES_NOISE
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.publish.probe import compute_noise, compute_probe
from trireme.trainer.publish.publisher import NOISE_EVERY

FAMILIES = ("qwen3", "gemma2", "qwen3_moe", "lfm2_moe")
OTHER_CAP = 0.5
DRIFT_STEPS, LR = 160, 5e-4
APART = (1, 4, NOISE_EVERY, 64)


def main(
    models: Annotated[int, "random models of each family"] = 60,
    family: Annotated[tuple[str, ...], tuple(families.CONFIGS)] = FAMILIES,
    drift: Annotated[bool, "how much the noise changes from version to version"] = False,
) -> None:
    disable_progress_bar()
    with open_world("cpu", threads=1, timeout_s=60) as world:
        if drift:
            columns = ["family", "noise at first", "at last", *(f"{apart} apart: grew, shrank" for apart in APART)]
            print_table(columns, (drift_row(kind, world) for kind in family))
        else:
            columns = ["family", "median", "largest", f"above {TIMES_NOISE:g}", "another cap, median", "and below"]
            print_table(columns, (noise_row(kind, models, world) for kind in family))


def noise_row(kind: str, num_models: int, world: World) -> list[str]:
    measured = [measure(kind, seed, world) for seed in range(num_models)]
    right, wrong = [each[0] for each in measured], [each[1] for each in measured if each[1] is not None]
    refused = sum(ratio > TIMES_NOISE for ratio in right)
    accepted = [f"{median(wrong):.2f}", str(sum(ratio <= TIMES_NOISE for ratio in wrong))] if wrong else ["", ""]
    return [kind, f"{median(right):.2f}", f"{max(right):.2f}", str(refused), *accepted]


def measure(kind: str, seed: int, world: World) -> tuple[float, float | None]:
    """Return the mean difference of bfloat16 in multiples of the noise, and with another cap if there is one."""
    with TemporaryDirectory() as folder:
        families.save_family(Path(folder), families.build_config(kind), seed=seed)
        model = load_model(TrainerModel(attn="eager"), folder, world)
        probe = compute_probe(model, world.device)
        noise = compute_noise(model, world.device, probe, (torch.bfloat16,))
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    right = difference(half, probe) / noise
    capped = [part for part in half.modules() if getattr(part, "attn_logit_softcapping", None)]
    for part in capped:
        part.attn_logit_softcapping = OTHER_CAP
    return right, difference(half, probe) / noise if capped else None


def drift_row(kind: str, world: World) -> list[str]:
    noise = measure_drift(kind, world)
    later = [(noise[apart:], noise[:-apart]) for apart in APART]
    factors = [f"{(new / old).max():.2f}, {(old / new).max():.2f}" for new, old in later]
    return [kind, f"{noise[0]:.4f}", f"{noise[-1]:.4f}", *factors]


def measure_drift(kind: str, world: World) -> np.ndarray:
    """Return the noise of each version of a model that is trained."""
    with TemporaryDirectory() as folder:
        families.save_family(Path(folder), families.build_config(kind), seed=0)
        model = load_model(TrainerModel(attn="eager"), folder, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (8, 24), generator=torch.manual_seed(0))

    noise = []
    for _ in range(DRIFT_STEPS + 1):
        probe = compute_probe(model, world.device)
        noise.append(compute_noise(model, world.device, probe, (torch.bfloat16,)))
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return np.array(noise)


@torch.no_grad()
def difference(model: PreTrainedModel, probe: Probe) -> float:
    ids = torch.tensor([probe.ids])
    logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return float((logprobs.gather(-1, ids[0, 1:, None])[:, 0] - torch.tensor(probe.logprobs)).abs().mean())


if __name__ == "__main__":
    command(main)
