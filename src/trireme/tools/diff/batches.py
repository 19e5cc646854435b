"""Comparison of two journal entries of one number: the first difference of each kind, to the bit.

Rollouts are compared with those of the same group and place: a group's number determines its example, so both runs
rolled out the same example under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trireme.algo.data.difficulty import Outcome
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.messages import Tokens
from trireme.tools.diff.aspects import Difference, compare_tables
from trireme.tools.record_differences import first_difference, first_place, shown
from trireme.tools.tokenizer import Decode

Pair = tuple[Rollout, Rollout]  # rollouts of one group and place, in A and in B

BATCH_ASPECTS = (
    *("rules", "examples", "attempts", "prompts", "versions", "tokens", "logprobs", "kept", "texts"),
    *("components", "rewards", "teacher", "dropped", "groups", "masks", "advantages"),
)
GENERATED = ("ids", "loss_mask", "versions", "logprobs")  # columns
CONTEXT = 30  # characters before a token

TEXTS = ("prompt", "completion", "answer", "stop", "truncated", "num_turns", "temperature")
ROLLOUT_ASPECTS: dict[str, Callable[[Rollout], dict[str, Any]]] = {
    "texts": lambda rollout: {name: getattr(rollout, name) for name in TEXTS},
    "components": lambda rollout: {"metrics": rollout.metrics, "token_rewards": rollout.token_rewards},
    "rewards": lambda rollout: {"reward": rollout.reward},
    "teacher": lambda rollout: {"teacher": rollout.teacher},
}
"""Values of one rollout, by name."""

SHARED_ASPECTS: dict[str, Callable[[Rollout], dict[str, Any]]] = {
    "masks": lambda rollout: {"flaws": rollout.flaws, "masked": rollout.masked},
    "advantages": lambda rollout: {"advantages": [sample.advantages for sample in rollout.samples]},
}
"""Values that depend on other rollouts of the group or the batch, too."""


def compare_batches(a: BatchRecord, b: BatchRecord, decode: Decode | None = None) -> Iterator[Difference]:
    """Yield the first difference of each aspect, causes before effects."""
    step, theirs = a.step, {(rollout.group, rollout.place): rollout for rollout in b.rollouts}
    pairs = [(one, other) for one in a.rollouts if (other := theirs.get((one.group, one.place)))]
    # older journals do not record the rules
    if a.rules is not None and b.rules is not None:
        rules = ({"rules": of.rules} for of in (a, b))
        yield from compare_tables("rules", step, f"batch {step}, ", *rules, unit="rules")
    # only groups that ended with both batches can be compared: timing decides which others did
    examples = [_examples(record) for record in (a, b)]
    common = examples[0].keys() & examples[1].keys()
    tables = ({group: name for group, name in sorted(of.items()) if group in common} for of in examples)
    yield from compare_tables("examples", step, f"batch {step}, group ", *tables, unit="groups")
    yield from _compare_generated(step, pairs, decode)

    yield from _compare_values(step, ROLLOUT_ASPECTS, pairs)
    reasons = (
        {f"group {it.group}, place {it.place}, attempt {it.attempt}": it.reason for it in of.dropped} for of in (a, b)
    )
    yield from compare_tables("dropped", step, f"batch {step}, dropped ", *reasons, unit="rollouts")
    places = ({n: f"group {one.group}, place {one.place}" for n, one in enumerate(of.rollouts)} for of in (a, b))
    yield from compare_tables("groups", step, f"batch {step}, rollout ", *places, unit="rollouts")
    # flaws and advantages depend on the other rollouts too, so they come last
    yield from _compare_values(step, SHARED_ASPECTS, pairs)


def _examples(record: BatchRecord) -> dict[int, str]:
    """Return the example of each group that the batch decided."""
    ended: list[Rollout | Dropped | Outcome] = [*record.rollouts, *record.dropped, *record.outcomes]
    return {each.group: f"example {each.example} of {each.env}" for each in ended}


# what was generated: by the first place in a rollout at which anything differs


def _compare_generated(step: int, pairs: list[Pair], decode: Decode | None) -> Iterator[Difference]:
    """Yield the first difference of each aspect, with the number of rollouts that first differ in it."""
    found: dict[str, list[Difference]] = {}
    # decoding is slow, and only the first difference of an aspect is shown
    for a, b in pairs:
        if difference := _compare_rollouts(step, a, b, decode if len(found) < 3 else None):
            found.setdefault(difference.aspect, []).append(difference)
    for differences in found.values():
        notes = (differences[0].note, f"in {len(differences)} of {len(pairs)} rollouts")
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
    # the first token at which any column differs decides the aspect
    at = {name: first_place(getattr(a, name), getattr(b, name)) for name in GENERATED}
    first = min((place for place in at.values() if place is not None), default=None)
    # a picture is part of the prompt, and its tokens have the same ids whatever it shows
    for one, other in zip(a.pictures, b.pictures, strict=False):
        if one != other and (first is None or one.place < first):
            name_a, name_b = (
                f"picture {each.digest[:8]}…, {each.rows} x {each.columns} tokens" for each in (one, other)
            )
            return Difference("prompts", step, f"{where}, token {one.place} of {a.length}", name_a, name_b)

    if first is None and a.length != b.length:
        where, note = f"{where}, token {min(a.length, b.length)}", "the same up to there"
        return Difference("tokens", step, where, f"{a.length} tokens", f"{b.length} tokens", note)
    # tokens and probabilities are the same: the sampler may still have been cut differently
    if first is None:
        kept = [
            {"choices of the sampler": each.kept, "routes": each.routed, "likeliest tokens": each.top_logprobs}
            for each in (a, b)
        ]
        return next(compare_tables("kept", step, f"{where}, ", *kept, unit="kinds"), None)
    # at the first token that differs, in order of cause: weights, then the token, then its probability
    where = f"{where}, token {first} of {a.length}"
    if first == at["versions"]:
        return Difference("versions", step, where, f"version {a.versions[first]}", f"version {b.versions[first]}")
    if first in (at["ids"], at["loss_mask"]):
        aspect = "tokens" if a.loss_mask[first] or b.loss_mask[first] else "prompts"
        context = f"after {decode(a.ids[:first].tolist())[-CONTEXT:]!r}" if decode and first else ""
        return Difference(aspect, step, where, _id(a, first, decode), _id(b, first, decode), context)
    note = "the same token, after the same tokens, under the same version"
    return Difference("logprobs", step, where, str(a.logprobs[first]), str(b.logprobs[first]), note)


def _id(sample: Tokens, place: int, decode: Decode | None) -> str:
    number = int(sample.ids[place])
    text = f"{decode([number])!r} ({number})" if decode else str(number)
    return text if sample.loss_mask[place] else f"{text}, given"


# what was made of it: named values of each rollout


def _compare_values(
    step: int, aspects: dict[str, Callable[[Rollout], dict[str, Any]]], pairs: list[Pair]
) -> Iterator[Difference]:
    # the text between them is named once, with how many rollouts it concerns
    for aspect, read in aspects.items():
        found = [(a, *differ) for a, b in pairs if (differ := first_difference(read(a), read(b)))]
        if found:
            rollout, place, one, other = found[0]
            where, note = f"batch {step}, {_name(rollout)}, {place[1:]}", f"in {len(found)} of {len(pairs)} rollouts"
            yield Difference(aspect, step, where, shown(one), shown(other), note)
