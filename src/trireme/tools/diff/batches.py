"""Comparison of two journal entries of one number: the first difference of each kind, to the bit.

Rollouts are compared with those of the same group and place: a group's number determines its example, so both runs
rolled out the same example under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from trireme.algo.data.difficulty import Outcome
from trireme.journal.logprobs import logprobs_of
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.messages import Tokens
from trireme.tools.diff.aspects import Difference, count, differing, share

Decode = Callable[[Sequence[int]], str]
Scored = dict[bytes, np.ndarray]  # by sample: see `journal.logprobs`
Pair = tuple[Rollout, Rollout]  # of one group and place, in A and in B

BATCH_ASPECTS = (
    *("rules", "examples", "attempts", "prompts", "versions", "tokens", "logprobs", "kept", "texts"),
    *("components", "rewards", "teacher", "dropped", "groups", "masks", "advantages"),
)
GENERATED = ("ids", "loss_mask", "versions", "logprobs")  # columns
CONTEXT = 30  # characters before a token
LONGEST = 120  # characters of a value

TEXTS = ("prompt", "completion", "answer", "stop", "truncated", "num_turns", "temperature")
ROLLOUT_ASPECTS: dict[str, Callable[[Rollout], dict[str, Any]]] = {
    "texts": lambda rollout: {name: getattr(rollout, name) for name in TEXTS},
    "components": lambda rollout: rollout.metrics | _per_sample("rewards of steps", rollout.token_rewards),
    "rewards": lambda rollout: {"reward": rollout.reward},
    "teacher": lambda rollout: _per_sample("logprobs of the teacher", rollout.teacher),
}
"""Values of one rollout, by name."""

SHARED_ASPECTS: dict[str, Callable[[Rollout], dict[str, Any]]] = {
    "masks": lambda rollout: {"flaws": rollout.flaws, "masked": rollout.masked},
    "advantages": lambda rollout: _per_sample("advantages", [sample.advantages for sample in rollout.samples]),
}
"""Values that depend on other rollouts of the group or the batch, too."""


def _per_sample(name: str, columns: list[np.ndarray]) -> dict[str, Any]:
    return {f"{name} of sample {number}": column for number, column in enumerate(columns)}


def compare_batches(a: BatchRecord, b: BatchRecord, decode: Decode | None = None) -> Iterator[Difference]:
    """Yield the first difference of each aspect, causes before effects."""
    step, theirs = a.step, {(rollout.group, rollout.place): rollout for rollout in b.rollouts}
    pairs = [(one, other) for one in a.rollouts if (other := theirs.get((one.group, one.place)))]
    if a.rules is not None and b.rules is not None:
        rules_a, rules_b = msgspec.structs.asdict(a.rules), msgspec.structs.asdict(b.rules)
        for name in differing(rules_a, rules_b)[:1]:
            yield Difference("rules", step, f"batch {step}, rule {name}", str(rules_a[name]), str(rules_b[name]))
    examples_a, examples_b = _examples(a), _examples(b)
    if differ := sorted(set(differing(examples_a, examples_b)) & examples_a.keys() & examples_b.keys()):
        group, note = differ[0], share(differ, examples_a, "groups")
        where = f"batch {step}, group {group}"
        yield Difference("examples", step, where, examples_a[group], examples_b[group], note)
    yield from _compare_generated(step, pairs, decode)
    yield from _compare_values(step, ROLLOUT_ASPECTS, pairs)
    dropped_a, dropped_b = (
        {(each.group, each.place, each.attempt): each.reason for each in of.dropped} for of in (a, b)
    )
    if differ := sorted(differing(dropped_a, dropped_b)):
        group, place, attempt = differ[0]
        where = f"batch {step}, group {group}, place {place}, attempt {attempt}"
        fate_a, fate_b = (drops.get(differ[0], "not dropped here") for drops in (dropped_a, dropped_b))
        yield Difference("dropped", step, where, fate_a, fate_b, f"{count(differ, 'rollout')} of that kind")
    yield from _compare_groups(a, b)
    yield from _compare_values(step, SHARED_ASPECTS, pairs)


def _examples(record: BatchRecord) -> dict[int, str]:
    fates: list[Rollout | Dropped | Outcome] = [*record.rollouts, *record.dropped, *record.outcomes]
    return {fate.group: f"example {fate.example} of {fate.env}" for fate in fates}


def _compare_groups(a: BatchRecord, b: BatchRecord) -> Iterator[Difference]:
    ours, theirs = ([(rollout.group, rollout.place) for rollout in record.rollouts] for record in (a, b))
    at = next((n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if at is not None:
        where, (group_a, place_a), (group_b, place_b) = f"batch {a.step}, rollout {at}", ours[at], theirs[at]
        groups = {group for group, _ in ours}
        note = f"{len(groups & {group for group, _ in theirs})} of {len(groups)} groups are in both"
        if sorted(ours) == sorted(theirs):
            note = "the same rollouts in another order"
        one, other = f"group {group_a}, place {place_a}", f"group {group_b}, place {place_b}"
        yield Difference("groups", a.step, where, one, other, note)
    elif len(ours) != len(theirs):
        where = f"batch {a.step}, rollout {min(len(ours), len(theirs))}"
        yield Difference("groups", a.step, where, count(ours, "rollout"), count(theirs, "rollout"))


# what was generated: by the first place in a rollout at which anything differs


def _compare_generated(step: int, pairs: list[Pair], decode: Decode | None) -> Iterator[Difference]:
    """Yield the first difference of each aspect, with the number of rollouts that first differ in it."""
    found: dict[str, list[Difference]] = {}
    for pair in pairs:
        if difference := _compare_rollouts(step, *pair, decode if len(found) < 3 else None):
            found.setdefault(difference.aspect, []).append(difference)
    for differences in found.values():
        notes = (differences[0].note, share(differences, pairs, "rollouts"))
        yield replace(differences[0], note="; ".join(filter(None, notes)))


def _compare_rollouts(step: int, a: Rollout, b: Rollout, decode: Decode | None) -> Difference | None:
    where = f"batch {step}, {_name(a)}"
    if a.attempt != b.attempt:
        return Difference("attempts", step, where, f"attempt {a.attempt}", f"attempt {b.attempt}")
    for number, samples in enumerate(zip(a.samples, b.samples, strict=False)):
        sample = f", sample {number}" if len(a.samples) > 1 else ""
        if found := _compare_samples(step, f"{where}{sample}", *samples, decode):
            return found
    if len(a.samples) != len(b.samples):
        return Difference("tokens", step, where, f"{len(a.samples)} samples", f"{len(b.samples)} samples")
    return None


def _name(rollout: Rollout) -> str:
    return f"group {rollout.group}, place {rollout.place} (example {rollout.example} of {rollout.env})"


def _compare_samples(step: int, where: str, a: Tokens, b: Tokens, decode: Decode | None) -> Difference | None:
    at = {name: first_place(getattr(a, name), getattr(b, name)) for name in GENERATED}
    first = min((place for place in at.values() if place is not None), default=None)
    for one, other in zip(a.pictures, b.pictures, strict=False):
        if one != other and (first is None or one.place < first):
            name_a, name_b = (
                f"picture {each.digest[:8]}…, {each.rows} x {each.columns} tokens" for each in (one, other)
            )
            return Difference("prompts", step, f"{where}, token {one.place} of {a.length}", name_a, name_b)
    if first is None and a.length != b.length:
        where, note = f"{where}, token {min(a.length, b.length)}", "the same up to there"
        return Difference("tokens", step, where, f"{a.length} tokens", f"{b.length} tokens", note, True)
    if first is None:
        for what, *kept in (("choices of the sampler", a.kept, b.kept), ("routes", a.routed, b.routed)):
            values_a, values_b = ({} if each is None else msgspec.structs.asdict(each) for each in kept)
            if differing(values_a, values_b):
                is_there_a, is_there_b = ("others" if each else "none" for each in (values_a, values_b))
                return Difference("kept", step, f"{where}, {what}", is_there_a, is_there_b)
        return None
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


def _id(sample: Tokens, place: int, decode: Decode | None) -> str:
    number = int(sample.ids[place])
    text = f"{decode([number])!r} ({number})" if decode else str(number)
    return text if sample.loss_mask[place] else f"{text}, given"


def first_place(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the first index at which two sequences differ, as far as the shorter one goes; to the bit."""
    shorter = min(len(a), len(b))
    bits_a, bits_b = (np.ascontiguousarray(each[:shorter]).view(f"u{each.dtype.itemsize}") for each in (a, b))
    differ = np.flatnonzero(bits_a != bits_b)
    return int(differ[0]) if len(differ) else None


def compare_scored(batch: BatchRecord, a: Scored, b: Scored) -> Iterator[Difference]:
    """Compare the trainers' logprobs of the same samples. Yield the first token that differs."""
    for rollout in batch.rollouts:
        for number, sample in enumerate(rollout.samples):
            ours, theirs = logprobs_of(sample, a), logprobs_of(sample, b)
            if ours is not None and theirs is not None and (place := first_place(ours, theirs)) is not None:
                where = f"batch {batch.step}, {_name(rollout)}, sample {number}, token {place}"
                yield Difference("scored", batch.step, where, str(ours[place]), str(theirs[place]))
                return


# what was made of it: named values of each rollout


def _compare_values(
    step: int, aspects: dict[str, Callable[[Rollout], dict[str, Any]]], pairs: list[Pair]
) -> Iterator[Difference]:
    for aspect, read in aspects.items():
        values = [(read(a), read(b), a) for a, b in pairs]
        found = [(differ[0], *each) for each in values if (differ := differing(each[0], each[1]))]
        if found:
            name, values_a, values_b, rollout = found[0]
            place, a, b = _narrowed(values_a.get(name), values_b.get(name))
            where = f"batch {step}, {_name(rollout)}, {name}{place}"
            yield Difference(aspect, step, where, _shown(a), _shown(b), share(found, pairs, "rollouts"))


def _narrowed(a: Any, b: Any) -> tuple[str, Any, Any]:
    """Return the token, or the message, at which two columns or two lists of messages differ."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and len(a) == len(b):
        place = first_place(a, b)
        return f", token {place}", a[place], b[place]
    if isinstance(a, list) and isinstance(b, list) and all(isinstance(each, dict) for each in (*a, *b)):
        number = next((n for n, both in enumerate(zip(a, b, strict=False)) if both[0] != both[1]), min(len(a), len(b)))
        one, other = (messages[number] if number < len(messages) else None for messages in (a, b))
        return f", message {number}", one, other
    return "", a, b


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return count(value, "token")
    text = "nothing" if value is None else str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
