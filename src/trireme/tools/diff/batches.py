"""Comparison of two journal entries of one number: the first difference of each kind, to the bit.

Rollouts are compared with those of the same group and place: a group's number determines its example, so both runs
rolled out the same example under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from trireme.algo.difficulty import Outcome
from trireme.journal.logprobs import logprobs_of
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.messages import Tokens
from trireme.tools.diff.differences import Difference

Decode = Callable[[Sequence[int]], str]
Scored = dict[bytes, np.ndarray]  # by sample: see `ledger.logprobs`

BATCH_ASPECTS = (
    *("rules", "examples", "attempts", "prompts", "versions", "tokens", "logprobs", "kept", "texts"),
    *("components", "rewards", "teacher", "dropped", "groups", "masks", "advantages"),
)
GENERATED = ("ids", "loss_mask", "versions", "logprobs")  # columns
CONTEXT = 30  # characters before a token
LONGEST = 120  # characters of a value


def compare_batches(a: BatchRecord, b: BatchRecord, decode: Decode | None = None) -> Iterator[Difference]:
    """Return the first difference of each aspect, causes before effects."""
    pairs = _pairs(a, b)
    yield from _rules(a, b)
    yield from _examples(a, b)
    yield from _generated(a.step, pairs, decode)
    yield from _first_values(a.step, _OF_ROLLOUTS, pairs)
    yield from _dropped(a, b)
    yield from _groups(a, b)
    yield from _first_values(a.step, _OF_BATCHES, pairs)


def _rules(a: BatchRecord, b: BatchRecord) -> Iterator[Difference]:
    if a.rules is None or b.rules is None or a.rules == b.rules:
        return
    ours, theirs = msgspec.structs.asdict(a.rules), msgspec.structs.asdict(b.rules)
    name = next(name for name in ours if ours[name] != theirs[name])
    yield Difference("rules", a.step, f"batch {a.step}, rule {name}", str(ours[name]), str(theirs[name]))


def _examples(a: BatchRecord, b: BatchRecord) -> Iterator[Difference]:
    ours, theirs = _examples_of(a), _examples_of(b)
    differ = [group for group in sorted(ours.keys() & theirs.keys()) if ours[group] != theirs[group]]
    if differ:
        group = differ[0]
        where, (of_a, of_b) = f"batch {a.step}, group {group}", (ours[group], theirs[group])
        yield Difference("examples", a.step, where, of_a, of_b, _share(differ, ours, "groups"))


def _examples_of(record: BatchRecord) -> dict[int, str]:
    fates: list[Rollout | Dropped | Outcome] = [*record.rollouts, *record.dropped, *record.outcomes]
    return {fate.group: f"example {fate.example} of {fate.env}" for fate in fates}


def _groups(a: BatchRecord, b: BatchRecord) -> Iterator[Difference]:
    ours, theirs = _places(a), _places(b)
    if ours == theirs:
        return
    at = next((n for n, both in enumerate(zip(ours, theirs, strict=False)) if both[0] != both[1]), None)
    where = f"batch {a.step}, rollout {len(min(ours, theirs, key=len)) if at is None else at}"
    if at is None:
        yield Difference("groups", a.step, where, _count(ours, "rollout"), _count(theirs, "rollout"))
        return
    (group_a, place_a), (group_b, place_b) = ours[at], theirs[at]
    note = "the same rollouts in another order" if sorted(ours) == sorted(theirs) else _only(ours, theirs)
    yield Difference(
        "groups", a.step, where, f"group {group_a}, place {place_a}", f"group {group_b}, place {place_b}", note
    )


def _places(record: BatchRecord) -> list[tuple[int, int]]:
    return [(rollout.group, rollout.place) for rollout in record.rollouts]


def _only(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> str:
    common = len({group for group, _ in ours} & {group for group, _ in theirs})
    return f"{common} of {len({group for group, _ in ours})} groups are in both"


class _Pair:
    """One rollout in both runs."""

    def __init__(self, a: Rollout, b: Rollout) -> None:
        self.a, self.b = a, b

    def __str__(self) -> str:
        return f"group {self.a.group}, place {self.a.place} (example {self.a.example} of {self.a.env})"


def _pairs(a: BatchRecord, b: BatchRecord) -> list[_Pair]:
    theirs = {(rollout.group, rollout.place): rollout for rollout in b.rollouts}
    keys = ((rollout, theirs.get((rollout.group, rollout.place))) for rollout in a.rollouts)
    return [_Pair(rollout, other) for rollout, other in keys if other is not None]


# what was generated: by the first place in a rollout at which anything differs


def _generated(step: int, pairs: list[_Pair], decode: Decode | None) -> Iterator[Difference]:
    """Return the first difference of each aspect, with the number of rollouts that first differ in it."""
    firsts: dict[str, Difference] = {}
    counts: dict[str, int] = {}
    for pair in pairs:
        found = _attempt(step, pair) or _samples(step, pair, decode if len(firsts) < 3 else None)
        if found:
            firsts.setdefault(found.aspect, found)
            counts[found.aspect] = counts.get(found.aspect, 0) + 1
    for aspect, found in firsts.items():
        share = f"in {counts[aspect]} of {len(pairs)} rollouts"
        yield replace(found, note=f"{found.note}; {share}" if found.note else share)


def _attempt(step: int, pair: _Pair) -> Difference | None:
    if pair.a.attempt == pair.b.attempt:
        return None
    a, b = f"attempt {pair.a.attempt}", f"attempt {pair.b.attempt}"
    return Difference("attempts", step, f"batch {step}, {pair}", a, b)


def _samples(step: int, pair: _Pair, decode: Decode | None) -> Difference | None:
    for number, (a, b) in enumerate(zip(pair.a.samples, pair.b.samples, strict=False)):
        where = f"batch {step}, {pair}" + (f", sample {number}" if len(pair.a.samples) > 1 else "")
        if found := _sample(step, where, a, b, decode):
            return found
    a_count, b_count = len(pair.a.samples), len(pair.b.samples)
    if a_count == b_count:
        return None
    return Difference("tokens", step, f"batch {step}, {pair}", f"{a_count} samples", f"{b_count} samples")


def _sample(step: int, where: str, a: Tokens, b: Tokens, decode: Decode | None) -> Difference | None:
    at = {name: first_place(getattr(a, name), getattr(b, name)) for name in GENERATED}
    first = min((place for place in at.values() if place is not None), default=None)
    if first is None:
        return _lengths(step, where, a, b) or _kept(step, where, a, b)
    where = f"{where}, token {first} of {a.length}"
    same = at["logprobs"] is None or at["logprobs"] >= first
    if first == at["versions"]:
        return Difference("versions", step, where, f"version {a.versions[first]}", f"version {b.versions[first]}")
    if first in (at["ids"], at["loss_mask"]):
        aspect = "tokens" if a.loss_mask[first] or b.loss_mask[first] else "prompts"
        context = f"after {decode(a.ids[:first].tolist())[-CONTEXT:]!r}" if decode and first else ""
        return Difference(aspect, step, where, _id(a, first, decode), _id(b, first, decode), context, same)
    note = "the same token, after the same tokens, under the same version"
    return Difference("logprobs", step, where, str(a.logprobs[first]), str(b.logprobs[first]), note, same)


def _lengths(step: int, where: str, a: Tokens, b: Tokens) -> Difference | None:
    if a.length == b.length:
        return None
    at = f"{where}, token {min(a.length, b.length)}"
    return Difference("tokens", step, at, f"{a.length} tokens", f"{b.length} tokens", "the same up to there", True)


def _kept(step: int, where: str, a: Tokens, b: Tokens) -> Difference | None:
    for what, ours, theirs in (("choices of the sampler", a.kept, b.kept), ("routes", a.routed, b.routed)):
        if _arrays(ours) != _arrays(theirs):
            return Difference("kept", step, f"{where}, {what}", _is_there(ours), _is_there(theirs))
    return None


def _arrays(columns: Any) -> list[Any]:
    return [] if columns is None else [_bits(value) for value in msgspec.structs.astuple(columns)]


def _is_there(columns: Any) -> str:
    return "none" if columns is None else "others"


def _id(sample: Tokens, place: int, decode: Decode | None) -> str:
    number = int(sample.ids[place])
    text = f"{decode([number])!r} ({number})" if decode else str(number)
    return text if sample.loss_mask[place] else f"{text}, given"


def first_place(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the first index at which two sequences differ, as far as the shorter one goes; to the bit."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(_words(a[:shorter]) != _words(b[:shorter]))
    return int(differ[0]) if len(differ) else None


def _words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def compare_scored(batch: BatchRecord, a: Scored, b: Scored) -> Iterator[Difference]:
    """Compare the trainers' logprobs of the same samples. Return the first token that differs."""
    for rollout in batch.rollouts:
        for number, sample in enumerate(rollout.samples):
            ours, theirs = logprobs_of(sample, a), logprobs_of(sample, b)
            place = first_place(ours, theirs) if ours is not None and theirs is not None else None
            if ours is not None and theirs is not None and place is not None:
                where = f"batch {batch.step}, {_Pair(rollout, rollout)}, sample {number}, token {place}"
                yield Difference("scored", batch.step, where, str(ours[place]), str(theirs[place]))
                return


# what came of it: one value each, or a list of columns


def _texts(rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": rollout.answer,
        "stop": rollout.stop,
        "truncated": rollout.truncated,
        "turns": rollout.num_turns,
        "temperature": rollout.temperature,
    }


def _components(rollout: Rollout) -> dict[str, Any]:
    return rollout.metrics | _per_sample("rewards of steps", rollout.token_rewards)


def _reward(rollout: Rollout) -> dict[str, Any]:
    return {"reward": rollout.reward}


def _masks(rollout: Rollout) -> dict[str, Any]:
    return {"flaws": rollout.flaws, "masked": rollout.masked}


def _teacher(rollout: Rollout) -> dict[str, Any]:
    return _per_sample("logprobs of the teacher", rollout.teacher)


def _advantages(rollout: Rollout) -> dict[str, Any]:
    return _per_sample("advantages", [sample.advantages for sample in rollout.samples])


def _per_sample(name: str, columns: list[np.ndarray]) -> dict[str, Any]:
    return {f"{name} of sample {number}": column for number, column in enumerate(columns)}


Values = Callable[[Rollout], dict[str, Any]]

_OF_ROLLOUTS: tuple[tuple[str, Values], ...] = (
    ("texts", _texts),
    ("components", _components),
    ("rewards", _reward),
    ("teacher", _teacher),
)
_OF_BATCHES: tuple[tuple[str, Values], ...] = (("masks", _masks), ("advantages", _advantages))
"""What depends on the other rollouts of its group, or of its batch."""


def _first_values(step: int, aspects: Iterable[tuple[str, Values]], pairs: list[_Pair]) -> Iterator[Difference]:
    for aspect, values in aspects:
        found = [(pair, one) for pair in pairs if (one := _first_value(values(pair.a), values(pair.b)))]
        if found:
            pair, (name, a, b) = found[0]
            yield Difference(aspect, step, f"batch {step}, {pair}, {name}", a, b, _share(found, pairs, "rollouts"))


def _first_value(a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str, str] | None:
    for name in {**a, **b}:
        ours, theirs = a.get(name), b.get(name)
        if _bits(ours) == _bits(theirs):
            continue
        place, ours, theirs = _narrowed(ours, theirs)
        return f"{name}{place}", _shown(ours), _shown(theirs)
    return None


def _narrowed(a: Any, b: Any) -> tuple[str, Any, Any]:
    """Return the token, or the message, at which two columns or two lists of messages differ."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and len(a) == len(b):
        place = first_place(a, b)
        return f", token {place}", a[place], b[place]
    if isinstance(a, list) and isinstance(b, list) and all(isinstance(each, dict) for each in (*a, *b)):
        number = next((n for n, both in enumerate(zip(a, b, strict=False)) if both[0] != both[1]), min(len(a), len(b)))
        return f", message {number}", _at(a, number), _at(b, number)
    return "", a, b


def _at(messages: list[Any], number: int) -> Any:
    return messages[number] if number < len(messages) else None


def _bits(value: Any) -> Any:
    """Return the bits of a value, which are equal only for identical values."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value) if isinstance(value, float) else value


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _count(value, "token")
    text = "nothing" if value is None else str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _dropped(a: BatchRecord, b: BatchRecord) -> Iterator[Difference]:
    ours, theirs = _drops(a), _drops(b)
    differ = [key for key in sorted({**ours, **theirs}) if ours.get(key) != theirs.get(key)]
    if differ:
        group, place, attempt = differ[0]
        where = f"batch {a.step}, group {group}, place {place}, attempt {attempt}"
        a_fate, b_fate = (drops.get(differ[0], "not dropped here") for drops in (ours, theirs))
        yield Difference("dropped", a.step, where, a_fate, b_fate, f"{_count(differ, 'rollout')} of that kind")


def _drops(record: BatchRecord) -> dict[tuple[int, int, int], str]:
    def key(fate: Dropped) -> tuple[int, int, int]:
        return fate.group, fate.place, fate.attempt

    return {key(fate): fate.reason for fate in record.dropped}


def _share(some: Any, of: Any, what: str) -> str:
    return f"in {len(some)} of {len(of)} {what}"


def _count(values: Any, what: str) -> str:
    return f"{len(values)} {what}{'' if len(values) == 1 else 's'}"
