"""How many tokens an engine is asked about where its sampler is cut, so that all that it could choose from are known.

A token's logprob under a cut sampler (`top_p`, `top_k`, `min_p`) is that among what was kept; the trainer can compute
the same only if it knows what that was. Engines say so through the logprobs of the likeliest tokens: those that were
left out have none. That needs a limit on how many may be kept.
"""

from __future__ import annotations

from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig

MOST_KEPT = 64
"""Where `top_p` or `min_p` cut and no `top_k` is given, this is the `top_k`."""

_VLLMS_OWN = 20
"""Logprobs per token that vLLM gives at most when nobody says otherwise."""


def most_kept(sampling: Sampling) -> int:
    """Tokens that a sampler may keep, where it is cut."""
    return max(MOST_KEPT, sampling.top_k or 0)


def slots_for(top_k: int) -> int:
    """Likeliest tokens to ask for: some more than `top_k`, as tokens that tie for the last place are all kept."""
    return top_k + top_k // 4 + 8


def max_logprobs(config: RunConfig) -> int:
    """Of the engine: enough for what any training turn may keep."""
    return max(_VLLMS_OWN, slots_for(most_kept(config.orchestrator.sampling)))
