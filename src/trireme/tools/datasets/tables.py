"""The data sets: for each its file, its columns, and its rows out of a batch. Pure.

Tokens are in the order of the journal; `loss_mask` has many names, and means the same under each: 1 where the policy
sampled the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trireme.journal.records import Rollout
from trireme.journal.targets import by_group
from trireme.messages import Tokens
from trireme.tools.datasets.messages import MessageTypes, to_rows

INTS, FLOATS, MASK = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.uint8())
SAMPLE = pa.struct(
    [("ids", INTS), ("loss_mask", MASK), ("logprobs", FLOATS), ("advantages", FLOATS), ("versions", INTS)]
)
METRIC = pa.struct([("name", pa.string()), ("value", pa.float64())])

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """How a reward is read, and what is left out."""

    pass_threshold: float = 1.0
    tokens: bool = True


@dataclass(frozen=True)
class Table:
    """One file of a data set."""

    name: str
    columns: Callable[[MessageTypes], dict[str, pa.DataType]]
    rows: Callable[[int, list[Rollout], Options], Rows]
    once: tuple[str, ...] = ()  # columns by which later rows that are the same are left out

    def schema(self, types: MessageTypes) -> pa.Schema:
        return pa.schema(list(self.columns(types).items()))


def place_of(step: int, rollout: Rollout) -> dict[str, Any]:
    """What says which rollout it is."""
    return {"env": rollout.env, "example": rollout.example, "step": step, "group": rollout.group}


PLACE = {"env": pa.string(), "example": pa.int64(), "step": pa.int64(), "group": pa.int64()}


# everything


def _all_columns(types: MessageTypes) -> dict[str, pa.DataType]:
    return {
        **PLACE,
        "place": pa.int64(),
        "attempt": pa.int64(),
        "reward": pa.float64(),
        "prompt": types.prompt,
        "completion": types.completion,
        "answer": pa.string(),
        "metrics": pa.list_(METRIC),
        "truncated": pa.bool_(),
        "stop": pa.string(),
        "num_turns": pa.int64(),
        "flaws": pa.list_(pa.string()),
        "masked": pa.string(),
        "temperature": pa.float64(),
        "samples": pa.list_(SAMPLE),
    }


def _all_rows(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for rollout in rollouts:
        yield place_of(step, rollout) | {
            "place": rollout.place,
            "attempt": rollout.attempt,
            "reward": rollout.reward,
            "prompt": to_rows(rollout.prompt),
            "completion": to_rows(rollout.completion),
            "answer": rollout.answer,
            "metrics": [{"name": name, "value": value} for name, value in rollout.metrics.items()],
            "truncated": rollout.truncated,
            "stop": rollout.stop,
            "num_turns": rollout.num_turns,
            "flaws": rollout.flaws,
            "masked": rollout.masked,
            "temperature": rollout.temperature,
            "samples": [_sample(sample) for sample in rollout.samples] if options.tokens else [],
        }


def _sample(sample: Tokens) -> dict[str, np.ndarray]:
    return {name: getattr(sample, name) for name in ("ids", "loss_mask", "logprobs", "advantages", "versions")}


# TRL


def _prompts(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for rollout in rollouts:
        yield {"prompt": to_rows(rollout.prompt), "answer": rollout.answer} | place_of(step, rollout)


def _completions(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for rollout in rollouts:
        said = {"prompt": to_rows(rollout.prompt), "completion": to_rows(rollout.completion)}
        yield said | {"reward": rollout.reward} | place_of(step, rollout)


def _labelled(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for row in _completions(step, rollouts, options):
        yield row | {"label": row["reward"] >= options.pass_threshold}


def _pairs(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    """Of each group the best against the worst; none where all are equal. Of equals the first counts."""
    for group in by_group(rollouts).values():
        best = max(group, key=lambda rollout: rollout.reward)
        worst = min(group, key=lambda rollout: rollout.reward)
        if best.reward > worst.reward:
            yield {
                "prompt": to_rows(best.prompt),
                "chosen": to_rows(best.completion),
                "rejected": to_rows(worst.completion),
                "score_chosen": best.reward,
                "score_rejected": worst.reward,
                "margin": best.reward - worst.reward,
            } | place_of(step, best)


def _trl_tokens(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for rollout, sample in _samples(rollouts):
        yield {
            "input_ids": sample.ids,
            "completion_mask": sample.loss_mask,
            "logprobs": sample.logprobs,
            "advantages": sample.advantages,
            "versions": sample.versions,
            "reward": rollout.reward,
        } | place_of(step, rollout)


def _samples(rollouts: list[Rollout]) -> Iterator[tuple[Rollout, Tokens]]:
    """Of those that are trained on."""
    for rollout in rollouts:
        if rollout.masked is None:
            yield from ((rollout, sample) for sample in rollout.samples)


TRL = (
    Table(
        "prompt_only",
        lambda types: {"prompt": types.prompt, "answer": pa.string(), **PLACE},
        _prompts,
        once=("env", "example"),
    ),
    Table(
        "prompt_completion",
        lambda types: {"prompt": types.prompt, "completion": types.completion, "reward": pa.float64(), **PLACE},
        _completions,
    ),
    Table(
        "unpaired_preference",
        lambda types: {
            "prompt": types.prompt,
            "completion": types.completion,
            "label": pa.bool_(),
            "reward": pa.float64(),
            **PLACE,
        },
        _labelled,
    ),
    Table(
        "preference",
        lambda types: {
            "prompt": types.prompt,
            **dict.fromkeys(("chosen", "rejected"), types.completion),
            **{name: pa.float64() for name in ("score_chosen", "score_rejected", "margin")},
            **PLACE,
        },
        _pairs,
    ),
    Table(
        "tokens",
        lambda types: {
            "input_ids": INTS,
            "completion_mask": MASK,
            "logprobs": FLOATS,
            "advantages": FLOATS,
            "versions": INTS,
            "reward": pa.float64(),
            **PLACE,
        },
        _trl_tokens,
    ),
)


# verl


REWARD_MODEL = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
EXTRA = pa.struct([("split", pa.string()), ("index", pa.int64())])


def _verl_prompts(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for rollout in rollouts:
        yield {
            "data_source": rollout.env,
            "prompt": to_rows(rollout.prompt),
            "ability": rollout.env,
            "reward_model": {"style": "rule", "ground_truth": rollout.answer or ""},
            "extra_info": {"split": "train", "index": rollout.example},
        }


def _conversations(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    for rollout in rollouts:
        messages = to_rows([*rollout.prompt, *rollout.completion])
        yield {"messages": messages, "data_source": rollout.env, "reward": rollout.reward} | place_of(step, rollout)


def _verl_tokens(step: int, rollouts: list[Rollout], options: Options) -> Rows:
    """The response begins with the first token that was sampled."""
    for rollout, sample in _samples(rollouts):
        first = int(sample.loss_mask.argmax()) if sample.loss_mask.any() else sample.length
        yield {
            "uid": str(rollout.group),
            "prompts": sample.ids[:first],
            "responses": sample.ids[first:],
            "response_mask": sample.loss_mask[first:],
            "rollout_log_probs": sample.logprobs[first:],
            "advantages": sample.advantages[first:],
            "versions": sample.versions[first:],
            "reward": rollout.reward,
        } | place_of(step, rollout)


VERL = (
    Table(
        "train",
        lambda types: {
            "data_source": pa.string(),
            "prompt": types.prompt,
            "ability": pa.string(),
            "reward_model": REWARD_MODEL,
            "extra_info": EXTRA,
        },
        _verl_prompts,
        once=("data_source", "extra_info"),
    ),
    Table(
        "sft",
        lambda types: {"messages": types.both, "data_source": pa.string(), "reward": pa.float64(), **PLACE},
        _conversations,
    ),
    Table(
        "tokens",
        lambda types: {
            "uid": pa.string(),
            **dict.fromkeys(("prompts", "responses"), INTS),
            "response_mask": MASK,
            **dict.fromkeys(("rollout_log_probs", "advantages"), FLOATS),
            "versions": INTS,
            "reward": pa.float64(),
            **PLACE,
        },
        _verl_tokens,
    ),
)

ALL = Table("rollouts", _all_columns, _all_rows)
TABLES: dict[str, tuple[Table, ...]] = {"trl": TRL, "verl": VERL, "parquet": (ALL,), "jsonl": (ALL,)}
"""By what is given to `--to`."""
