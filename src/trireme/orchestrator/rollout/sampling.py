"""Sampling arguments of a turn: the run's override the environment's; then a seed, and what a cut sampler needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from trireme.config.orchestrator import MOST_KEPT, Sampling, distorting, slots_for

ENVIRONMENTS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "logit_bias"}
    | {"allowed_token_ids", "include_stop_str_in_output"}
)
"""Sampling arguments of an environment that reach the engine.

The others are for OpenAI clients (`n`, `logprobs`). No seed: it would make all rollouts of a group the same, and on CPU
a seeded request may kill the engine.
"""

_OTHER_NAMES = {"max_completion_tokens": "max_tokens"}


@dataclass
class TurnSampling:
    """Builds the arguments of each turn of one rollout."""

    sampling: Sampling
    run_seed: int | None
    key: str
    attempt: int
    trained: bool
    vocab_size: int
    distorted: set[str] = field(default_factory=set)  # arguments of the environment that make importance ratios wrong

    def __post_init__(self) -> None:
        self.own = sampling_arguments(self.sampling)

    def of_turn(self, number: int, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the `number`th turn (from 1); `theirs` are the environment's."""
        named = {_OTHER_NAMES.get(name, name): value for name, value in theirs.items() if value is not None}
        arguments = {name: value for name, value in named.items() if name in ENVIRONMENTS} | self.own
        seed = self.sampling.seed if self.sampling.seed is not None else self.run_seed
        if seed is not None and arguments["temperature"] > 0:
            arguments["seed"] = seed_of(seed, self.key, self.attempt, number)
        if self.trained:
            # whether the sampler chooses among a part of the vocabulary only; at temperature 0 it does not choose
            top_k = arguments.get("top_k", 0)
            cuts = arguments.get("top_p", 1.0) < 1 or arguments.get("min_p", 0.0) > 0 or top_k > 0
            is_cut = cuts and arguments["temperature"] > 0
            self.distorted |= {*distorting(arguments, cut=is_cut)} - self.own.keys()
            if is_cut:
                top_k = min(top_k, self.sampling.most_kept) if top_k > 0 else MOST_KEPT
                arguments |= {"top_k": top_k, "logprobs": min(slots_for(top_k), self.vocab_size)}
        return arguments


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the run's arguments under vLLM's names, without those that have their default."""
    given = sampling.model_dump(exclude={"extra_body", "stop", "seed"}, exclude_defaults=True, exclude_none=True)
    given["temperature"] = sampling.temperature
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    return given | sampling.extra_body


def seed_of(run_seed: int, key: str, attempt: int, turn: int) -> int:
    """Return 31 bits that depend on all four arguments, and on nothing else."""
    digest = hashlib.sha256(f"{run_seed}/{key}/{attempt}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
