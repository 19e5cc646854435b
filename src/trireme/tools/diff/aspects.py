"""The aspects in which two runs can differ, causes before effects, and what a difference of each usually means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.tools.record_differences import differences, shown

_ARITHMETIC = (
    "other numbers from the same batch and the same weights: the arithmetic is not the same. On a CPU that depends on "
    "threads, ranks, the processor and the version of torch; on GPUs also on kernels that sum up in no fixed order. "
    "`trireme replay RUN` tells which of the two comes out again."
)
_TIMING = (
    "Runs that generate ahead of training (`max_async_level` above 0) differ so from one time to the next; "
    "`--max-async-level 0` is the way that repeats to the bit on a CPU. Where a synchronous run differs so, a rollout "
    "failed or timed out: the reasons of dropped rollouts and logs/orchestrator.stdout tell which."
)
_RESUMED = "one of the runs was resumed with another configuration. Look at configs/run.earlier-*.json."

ASPECTS = {
    "weights": f"An optimizer step made {_ARITHMETIC}",
    "evaluation": "The same weights were measured otherwise: answers were drawn again (`orchestrator.eval.sampling`), "
    "engines put other requests together, or the environment is another one.",
    "rules": f"The batches were filled by other rules: {_RESUMED}",
    "examples": "Other data in the same places: the environment's data set is another one, or its order was moved by "
    "what happened before (difficulty pools, a curriculum).",
    "attempts": f"Timing: a rollout failed in one of the runs and was tried again. {_TIMING}",
    "prompts": "The model was given something else: another data set, system prompt, chat template or tokenizer.",
    "versions": f"Timing: new weights reached the engine at another token. {_TIMING}",
    "tokens": "Up to there all is the same to the bit, the probabilities too, and then another token was drawn. That "
    "is as it should be in runs that generate ahead of training (`max_async_level` above 0): turns have no seeds of "
    "their own, and the engine draws for requests as they come. `--max-async-level 0` gives each its seed; with seeds "
    "it is another version of the engine, or was changed by hand.",
    "logprobs": "The engine computed another probability for the same token after the same tokens: its arithmetic "
    "depends on how requests are put together in one forward pass, on threads, kernels and the version of vLLM. "
    "Nothing else has to be wrong, and everything after it may differ.",
    "kept": "The sampler was cut otherwise, or tokens went to other experts, with the same probabilities.",
    "texts": "The tokens are the same and what was made of them is not: another tokenizer, parser or environment.",
    "components": "The same answers were scored otherwise: the environment's code changed, or it is not a function of "
    "the answer alone (a judge, a clock, random numbers).",
    "rewards": "The same answers got other rewards from the same components: weights of the rubric, or a reward that "
    "is not a function of the answer alone.",
    "teacher": "The teacher says something else about the same tokens: it is another model, or computes otherwise.",
    "dropped": f"Timing: what was trained on is the same, and other rollouts were dropped. {_TIMING}",
    "groups": f"Timing: the same groups were begun, and others of them were finished first. {_TIMING}",
    "masks": "The same rollouts were found to have other flaws: the filters are others.",
    "advantages": "Other advantages from the same rewards: another estimator, or what is compared with differs (the "
    "other rewards of a group, or the running mean of `ema`).",
    "lr": f"Another learning rate from the same configuration: {_RESUMED}",
    "loss": f"The trainer got {_ARITHMETIC}",
    "grad_norm": f"The loss is the same and its gradient is not: {_ARITHMETIC}",
    "training": f"The loss and its gradient are the same, and another metric is not: {_ARITHMETIC}",
}
"""Meaning of a first difference in each: of version n, then of batch n, then of step n, which makes version n + 1."""

BASE_WEIGHTS = "The runs began with other weights: the model's files are not the same, or were drawn again."
"""Instead of `weights`, at version 0."""

MAIN = ("tokens", "rewards", "advantages", "loss", "grad_norm", "weights")
"""Once each of these was found to differ, later differences say nothing new."""


@dataclass(frozen=True)
class Difference:
    """One place at which two runs differ.

    Example:
        Difference("tokens", 12, "batch 12, group 40, place 2, token 23 of 61", "'a' (77)", "'b' (78)")
    """

    aspect: str
    step: int  # the number of the version, the batch, or the step that trained on it
    where: str
    a: str
    b: str
    note: str = ""  # how far it goes, or what was the same right before it

    def __str__(self) -> str:
        return f"{self.where}: {self.a} in A, {self.b} in B" + (f" ({self.note})" if self.note else "")


def compare_tables(
    aspect: str, step: int, where: str, a: Mapping[Any, Any], b: Mapping[Any, Any], *, unit: str
) -> Iterator[Difference]:
    """Yield the first name whose values differ, with the number of such names.

    Args:
        where: text before the name.
        unit: word for what is named, in the plural.
    """
    if found := differences(a, b):
        name, (place, one, other) = next(iter(found.items()))
        note = f"in {len(found)} of {len(a)} {unit}" if len(a) > 1 else ""
        yield Difference(aspect, step, f"{where}{name}{place}", shown(one), shown(other), note)
