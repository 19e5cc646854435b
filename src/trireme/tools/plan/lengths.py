"""Lengths of rollouts: given by flags, or as large as the configuration allows."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config.run import RunConfig


@dataclass(frozen=True)
class Lengths:
    """Tokens of a rollout, on average."""

    prompt: float
    sampled: float
    longest: float  # sampled
    source: str  # in words

    @property
    def total(self) -> float:
        return self.prompt + self.sampled


def lengths_of(config: RunConfig, *, prompt: float | None = None, sampled: float | None = None) -> Lengths:
    """Return the lengths that are given, or else the longest that are allowed. What is not sampled is prompt."""
    # Without a limit on sampled tokens, a quarter of the context is left for the prompt.
    context = min(config.seq_len, config.inference.model.max_model_len or config.seq_len)
    most = min(config.orchestrator.sampling.max_tokens or context * 3 // 4, context)
    if prompt is None and sampled is None:
        return Lengths(context - most, most, most, "the longest that the configuration allows")
    prompt = context - most if prompt is None else prompt
    sampled = most if sampled is None else sampled
    return Lengths(prompt, sampled, max(sampled, config.orchestrator.sampling.max_tokens or sampled), "as given")
