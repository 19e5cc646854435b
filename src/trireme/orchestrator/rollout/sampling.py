"""Sampling arguments of a turn: the run's override the environment's; then a seed, and what a cut sampler needs.

Variables of the chat template are the other way round: those of the turn's own request (of an environment or a program)
replace those of the environment's table, and these the run's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from trireme.base.log import get_logger
from trireme.config.model.chat_template import unread_variables
from trireme.config.rules.sampling import OTHER_NAMES, distorting
from trireme.config.sampling import MOST_KEPT, OF_TEMPLATE, Sampling, is_cut, slots_for, template_kwargs_of

log = get_logger("rollouts")

ENVIRONMENTS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "logit_bias"}
    | {"allowed_token_ids", "include_stop_str_in_output"}
)
"""Sampling arguments of an environment that reach the engine.

The others are for OpenAI clients (`n`, `logprobs`). No seed: it would make all rollouts of a group the same, and on CPU
a seeded request may kill the engine.
"""

MOST_NOTES = 20  # arguments of one environment and its programs that are named in the log


_OF_CLIENTS = frozenset(
    {"n", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"}
)
"""Arguments by which environments ask for what they get in any case: one completion, with its tokens and logprobs."""


@dataclass
class TurnSampling:
    """Builds the arguments of each turn of one rollout."""

    sampling: Sampling
    run_seed: int | None
    key: str
    attempt: int
    trained: bool
    vocab_size: int
    num_top: int = 0  # likeliest tokens whose logprobs the loss needs, from a sampler that is not cut
    distorted: set[str] = field(default_factory=set)  # arguments of the environment that make importance ratios wrong

    def __post_init__(self) -> None:
        self.own = sampling_arguments(self.sampling)

    def of_turn(self, number: int, theirs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the `number`th turn (from 1); `theirs` are the environment's."""
        # the run's own arguments come last, so they replace the environment's
        named = _named(theirs)
        arguments = {name: value for name, value in named.items() if name in ENVIRONMENTS} | self.own

        # a seed per turn, or all turns would draw the same numbers; at temperature 0 nothing is drawn
        seed = self.sampling.seed if self.sampling.seed is not None else self.run_seed
        if seed is not None and arguments["temperature"] > 0:
            arguments["seed"] = seed_of(seed, self.key, self.attempt, number)

        if self.trained:
            top_k = arguments.get("top_k", 0)
            # `sampling_notes` warns of the run's own arguments at its start
            self.distorted |= {*distorting(arguments, cut=is_cut(arguments))} - self.own.keys()
            if is_cut(arguments):
                # the trainer has to know which tokens were kept, and engines tell that by the likeliest tokens'
                # logprobs: so a limit on how many are kept, and enough logprobs to show them
                top_k = min(top_k, self.sampling.most_kept) if top_k > 0 else MOST_KEPT
                arguments |= {"top_k": top_k, "logprobs": min(slots_for(top_k), self.vocab_size)}
            elif self.num_top:
                arguments["logprobs"] = min(self.num_top, self.vocab_size)

        return arguments


def _named(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {OTHER_NAMES.get(name, name): value for name, value in theirs.items() if value is not None}


def replaced_arguments(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, in words what an environment or a program asks for while the run sets something else."""
    return {
        name: f"{_shown(name)} = {value!r:.80} is replaced by the run's, {own[name]!r:.80}"
        for name, value in _named(theirs).items()
        if name in own and own[name] != value
    }


def _shown(name: object) -> str:
    return str(name) if str(name).isidentifier() and len(str(name)) < 60 else f"{name!r:.60}"


def ignored_arguments(theirs: Mapping[str, Any], variables: frozenset[str]) -> dict[str, str]:
    """Return, by name, in words what an environment or a program asks for and an engine of ours cannot do.

    Args:
        variables: the variables that the chat template reads.
    """
    found, known = {}, ENVIRONMENTS | {*OF_TEMPLATE}
    for name, value in _named(theirs).items():
        if name not in known | _OF_CLIENTS:
            near = get_close_matches(name, known, n=1, cutoff=0.6)
            advice = f" (did you mean `{near[0]}`?)" if near else ""
            found[name] = f"{_shown(name)} = {value!r:.80} is ignored{advice}"
    for name in unread_variables(theirs, variables):
        found[name] = f"{_shown(name)} is no variable of the model's chat template"
    return found


@dataclass
class ArgumentNotes:
    """Logs once what an environment or its programs ask for in vain, and no more names than `MOST_NOTES`."""

    known: dict[str, set[str]] = field(default_factory=dict)  # names of arguments, by environment

    def unnamed(self, environment: str, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that were not logged yet: looking for a name that is meant takes 0.1 ms."""
        known = self.known.get(environment, set())
        if len(known) >= MOST_NOTES:
            return {}
        return {name: value for name, value in theirs.items() if name not in known}

    def log(self, environment: str, found: Mapping[str, str]) -> None:
        """Log each of these once.

        Args:
            found: words by the names of arguments.
        """
        known = self.known.setdefault(environment, set())
        # an environment that makes up a new name in each request must not flood the log
        for name in [name for name in found if name not in known][: MOST_NOTES - len(known)]:
            known.add(name)
            log.warning("environment %s, of the sampling arguments that it asks for: %s", environment, found[name])


def merge_template_kwargs(*requests: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the variables of the chat template that several requests give; the last takes precedence.

    Raises: ValueError, see `template_kwargs_of`.
    """
    return {name: value for request in requests for name, value in template_kwargs_of(request).items()}


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the run's arguments under vLLM's names, without those that have their default or are the template's."""
    # `of_turn` sets the seed of each turn; the fields of `extra_body` are added at the top level below
    left_out = {"extra_body", "stop", "seed", *OF_TEMPLATE}
    given = sampling.model_dump(exclude=left_out, exclude_defaults=True, exclude_none=True)
    given["temperature"] = sampling.temperature
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    return given | {name: value for name, value in sampling.extra_body.items() if name not in OF_TEMPLATE}


def seed_of(run_seed: int, key: str, attempt: int, turn: int) -> int:
    """Return 31 bits that depend on all four arguments, and on nothing else."""
    digest = hashlib.sha256(f"{run_seed}/{key}/{attempt}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
