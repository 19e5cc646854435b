"""The aspects in which two runs can differ, causes before effects, and what a difference of each usually means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trireme.tools.record_differences import differing, shown


@dataclass(frozen=True)
class Aspect:
    """One aspect in which runs are compared.

    Example:
        Aspect("A rollout got another reward from the same answer.", keys=("orchestrator.env",),
               because="that decides what a rollout is worth")
    """

    meaning: str  # where no key of the configuration explains the difference
    keys: tuple[str, ...] = ()  # tables and keys that the difference may follow from
    because: str = ""  # what these keys decide


_ROUNDING = (
    *("device", "model", "seq_len", "trainer.model", "trainer.threads", "trainer.num_ranks"),
    *("trainer.micro_batch_tokens", "micro_batch_tokens", "num_ranks", "threads"),
)
_TIMING = (
    *("max_async_level", "weight_broadcast", "orchestrator.max_concurrent", "orchestrator.oversampling_factor"),
    *("orchestrator.max_off_policy_steps", "orchestrator.max_rollout_attempts", "orchestrator.filters", "inference"),
    *("orchestrator.batch_size", "orchestrator.rollouts_per_example", "orchestrator.buffer", "orchestrator.env"),
)
_DATA = (
    *("seed", "orchestrator.env", "orchestrator.buffer", "orchestrator.curriculum", "orchestrator.batch_size"),
    *("orchestrator.rollouts_per_example", "data", "source", "subset", "split", "batch_size"),
)
_ENGINE = ("model", "inference", "orchestrator.sampling", "device", "weight_broadcast")
_WORTH = ("orchestrator.env", "orchestrator.advantage", "orchestrator.length_penalty", "orchestrator.teacher")
_LEARNING_RATE = ("trainer.optim", "trainer.scheduler", "optim", "scheduler", "max_steps")
_LOSS = ("trainer.loss", "trainer.num_iterations", *_ROUNDING)

_ARITHMETIC = (
    "other numbers from the same batch and the same weights: the arithmetic is not the same. On a CPU that depends on "
    "threads, ranks, the processor and the version of torch; on GPUs also on kernels that sum up in no fixed order. "
    "`trireme replay RUN` tells which of the two comes out again."
)
_OTHER_TIMING = (
    "Runs that generate ahead of training (`max_async_level` above 0) differ so from one time to the next; "
    "`--max-async-level 0` is the way that repeats to the bit on a CPU."
)
_RESUMED = "one of the runs was resumed with another configuration. Look at configs/run.earlier-*.json."
_SUMMED = "that decides what is computed from a batch, and in which order it is summed up"

ASPECTS = {
    "weights": Aspect(
        f"An optimizer step made {_ARITHMETIC}",
        (*_LEARNING_RATE, *_LOSS),
        "that decides where weights begin, and how an optimizer step changes them",
    ),
    "evaluation": Aspect(
        "The same weights were measured otherwise: answers were drawn again (`orchestrator.eval.sampling`), engines "
        "put other requests together, or the environment is another one.",
        ("orchestrator.eval", "orchestrator.env", *_ENGINE),
    ),
    "rules": Aspect(
        f"The batches were filled by other rules: {_RESUMED}",
        ("seed", "max_async_level", "orchestrator"),
    ),
    "examples": Aspect(
        "Other data in the same places: the environment's data set is another one, or its order was moved by what "
        "happened before (difficulty pools, a curriculum).",
        _DATA,
        "that decides which examples come, and in which order",
    ),
    "attempts": Aspect(
        f"Timing: a rollout failed in one of the runs and was tried again. {_OTHER_TIMING}",
        _TIMING,
    ),
    "prompts": Aspect(
        "The model was given something else: another data set, system prompt, chat template or tokenizer.",
        ("orchestrator.env", "orchestrator.trajectory_strategy", "model", "trainer.tokenizer"),
    ),
    "versions": Aspect(f"Timing: new weights reached the engine at another token. {_OTHER_TIMING}", _TIMING),
    "tokens": Aspect(
        "The engine had other probabilities before it drew another token; see the logprobs.",
        ("seed", "orchestrator.env", *_ENGINE),
        "that decides what is asked, and how answers are drawn",
    ),
    "logprobs": Aspect(
        "The engine computed another probability for the same token after the same tokens: its arithmetic depends on "
        "how requests are put together in one forward pass, on threads, kernels and the version of vLLM. Nothing else "
        "has to be wrong, and everything after it may differ.",
        _ENGINE,
        "that decides how the engine computes",
    ),
    "kept": Aspect(
        "The sampler was cut otherwise, or tokens went to other experts, with the same probabilities.",
        ("orchestrator.sampling", "trainer.model.moe"),
    ),
    "texts": Aspect(
        "The tokens are the same and what was made of them is not: another tokenizer, parser or environment.",
        ("orchestrator.env", "trainer.tokenizer", "model"),
    ),
    "components": Aspect(
        "The same answers were scored otherwise: the environment's code changed, or it is not a function of the answer "
        "alone (a judge, a clock, random numbers).",
        ("orchestrator.env",),
    ),
    "rewards": Aspect(
        "The same answers got other rewards from the same components: weights of the rubric, or a reward that is not a "
        "function of the answer alone.",
        ("orchestrator.env",),
        "that decides what a rollout is worth",
    ),
    "teacher": Aspect(
        "The teacher says something else about the same tokens: it is another model, or computes otherwise.",
        ("orchestrator.teacher",),
    ),
    "dropped": Aspect(
        f"Timing: what was trained on is the same, and other rollouts were dropped. {_OTHER_TIMING}",
        _TIMING,
    ),
    "groups": Aspect(
        f"Timing: the same groups were begun, and others of them were finished first. {_OTHER_TIMING}",
        _TIMING,
    ),
    "masks": Aspect(
        "The same rollouts were found to have other flaws: the filters are others.",
        ("orchestrator.filters", "orchestrator.trajectory_strategy"),
    ),
    "advantages": Aspect(
        "Other advantages from the same rewards: another estimator, or what is compared with differs (the other "
        "rewards of a group, or the running mean of `ema`).",
        _WORTH,
        "that decides what a reward is compared with",
    ),
    "scored": Aspect(
        f"The trainer computed other probabilities for the same tokens: {_ARITHMETIC}",
        _ROUNDING,
        "that decides how the trainer computes",
    ),
    "lr": Aspect(f"Another learning rate from the same configuration: {_RESUMED}", _LEARNING_RATE),
    "loss": Aspect(f"The trainer got {_ARITHMETIC}", _LOSS, _SUMMED),
    "grad_norm": Aspect(f"The loss is the same and its gradient is not: {_ARITHMETIC}", _LOSS, _SUMMED),
    "training": Aspect(
        f"The loss and its gradient are the same, and another metric is not: {_ARITHMETIC}",
        _LOSS,
    ),
}
"""Aspects of version n, then of batch n, then of step n, which makes version n + 1. The configuration comes first."""

BASE_WEIGHTS = Aspect(
    "The runs began with other weights: the model's files are not the same, or were drawn again.",
    ("model", "trainer.model", "seed", "inference.model.dtype"),
    "that decides where weights begin, and how an optimizer step changes them",
)
"""Instead of `weights`, at version 0."""

SYNCHRONOUS_TIMING = (
    "A synchronous run should do the same each time: a rollout failed, or timed out. The reasons of dropped rollouts "
    "and logs/orchestrator.stdout tell which."
)
DRAWN_WITHOUT_SEEDS = (
    "Up to there all is the same to the bit, the probabilities too, and then another token was drawn. That is as it "
    "should be: in runs that generate ahead of training (`max_async_level` above 0) turns have no seeds of their own, "
    "and the engine draws for requests as they come. `--max-async-level 0` gives each its seed."
)
DRAWN_WITH_SEEDS = (
    "Up to there all is the same to the bit, the probabilities too, and then another token was drawn, although each "
    "turn has its seed: another version of the engine, or changed by hand."
)

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
    same_before: bool = False  # of tokens: whether all logprobs before it are the same

    def __str__(self) -> str:
        return f"{self.where}: {self.a} in A, {self.b} in B" + (f" ({self.note})" if self.note else "")


def compare_tables(
    aspect: str,
    step: int,
    where: str,
    a: Mapping[Any, Any],
    b: Mapping[Any, Any],
    *,
    unit: str,
    show: Callable[[Any], str] = shown,
    missing: str = "nothing",
) -> Iterator[Difference]:
    """Yield the first name whose values differ, with the number of such names.

    Args:
        where: text before the name.
        unit: word for what is named, in the plural.
        missing: text for a value that is not there.
    """
    if names := differing(a, b):
        one, other = (missing if of.get(names[0]) is None else show(of[names[0]]) for of in (a, b))
        note = f"in {len(names)} of {len(a)} {unit}" if len(a) > 1 else ""
        yield Difference(aspect, step, f"{where}{names[0]}", one, other, note)
