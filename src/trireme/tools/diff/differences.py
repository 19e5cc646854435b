"""The aspects in which two runs can differ, causes before effects, and the first difference of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

ASPECTS = {
    "weights": "tensors of confirmed or exported versions",
    "evaluation": "metrics of evaluated versions",
    "rules": "what a batch was filled by, as its journal entry says",
    "examples": "which example each group is",
    "attempts": "which attempt each rollout is",
    "prompts": "tokens given to the model",
    "versions": "which version sampled each token",
    "tokens": "tokens that were sampled",
    "logprobs": "their logprobs under the engine",
    "kept": "what a cut sampler could choose from, and routes",
    "texts": "messages, answers, and how rollouts ended",
    "components": "components of rewards, and rewards of single steps",
    "rewards": "rewards of rollouts",
    "teacher": "the teacher's logprobs",
    "dropped": "rollouts that were dropped, and why",
    "groups": "which groups a batch holds, and in which order",
    "masks": "flaws, and what is not trained on for them",
    "advantages": "advantages, token by token",
    "scored": "logprobs of the batch's tokens under the weights that are trained",
    "lr": "learning rate",
    "loss": "loss of steps",
    "grad_norm": "norm of gradients",
    "training": "what else the trainer measured",
}
"""Of version n, then of batch n, then of step n, which makes version n + 1. Beside these there is the configuration."""

MAIN = ("tokens", "rewards", "advantages", "loss", "grad_norm", "weights")
"""Once each of these was found to differ, nothing that comes later says anything new."""


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


@dataclass
class Found:
    """The first difference of each aspect, in the order in which they were found, and how much was compared."""

    firsts: dict[str, Difference] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)  # by aspect: batches, steps or versions

    def take(self, difference: Difference) -> None:
        self.firsts.setdefault(difference.aspect, difference)

    @property
    def first(self) -> Difference | None:
        """Return the first difference. An evaluation has no effects, so it is named only where nothing else differs."""
        leading = [difference for aspect, difference in self.firsts.items() if aspect != "evaluation"]
        return next(iter(leading), self.firsts.get("evaluation"))

    @property
    def says_all(self) -> bool:
        return all(aspect in self.firsts for aspect in MAIN)
