"""The report of a comparison, as text and as JSON: what differs, what differed first, and what that usually means."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trireme.base.safe_text import clean
from trireme.config.resume import flatten
from trireme.tools.diff.aspects import ASPECTS, BASE_WEIGHTS
from trireme.tools.diff.compare import Comparison
from trireme.tools.record_differences import counted, some

MOST_CAUSES = 4


def as_text(comparison: Comparison) -> str:
    lines = [f"A  {comparison.a.path}: {comparison.a}", f"B  {comparison.b.path}: {comparison.b}", ""]
    telling, first = comparison.telling_keys, comparison.first
    if comparison.same:
        lines.append(f"no difference: {_extent(comparison)}")
    if telling:
        lines.append(f"first difference: configuration, {telling[0]}")
    if first is not None:
        head = "in what happened" if telling else "first difference"
        lines.append(f"{head}: {first.aspect}, {first}")
    lines += [f"  {sentence}" for sentence in meaning_of(comparison)]
    return clean("\n".join([*lines, "", *_configuration(comparison), "", *_aspects(comparison)]))


def _extent(comparison: Comparison) -> str:
    """Describe how far the comparison goes, and whether one run goes further."""
    if not comparison.compared:
        return "the configurations are the same; no batch, step or version is in both"
    text = "configuration, versions, batches and steps are the same to the bit"
    (end, shorter), (other, longer) = sorted([(comparison.a.end - 1, "A"), (comparison.b.end - 1, "B")])
    return text if end == other else f"{text}, as far as {shorter} goes: to {end}, {longer} to {other}"


def _configuration(comparison: Comparison) -> list[str]:
    telling = comparison.telling_keys
    places = [key.key for key in comparison.keys if key.is_place]
    num_keys = max(len(dict(flatten(side.configuration))) for side in (comparison.a, comparison.b))
    head = f"{counted(len(telling), 'key')} of {num_keys} not the same"
    lines = [f"configuration: {head if telling else 'all keys that count are the same'}"]
    lines += [f"  {key}" for key in telling]
    if places:
        lines.append(f"  of where it runs, {counted(len(places), 'key')}: {', '.join(places)}")
    if comparison.surroundings:
        lines += ["surroundings", *(f"  {key}" for key in comparison.surroundings)]
    return lines


def _aspects(comparison: Comparison) -> list[str]:
    """Describe the first difference of each aspect in the order found, then the aspects that are the same."""
    width = max(map(len, ASPECTS))
    lines = [f"{aspect:{width}}  {difference}" for aspect, difference in comparison.firsts.items()]
    if comparison.says_all:
        lines.append("What comes after these was not looked at: it follows from them.")
    counts: dict[int, list[str]] = {}
    for aspect in ASPECTS:
        if aspect not in comparison.firsts:
            counts.setdefault(comparison.compared[aspect], []).append(aspect)
    for number in sorted(counts, reverse=True):
        how = f"the same, {number} compared" if number else "not in both runs"
        lines.append(f"{how}: {', '.join(counts[number])}")
    return lines


def as_json(comparison: Comparison) -> dict[str, Any]:
    first, keys = comparison.first, comparison.telling_keys
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "same": comparison.same,
        "first_key": asdict(keys[0]) if keys else None,
        "first": asdict(first) if first else None,
        "meaning": meaning_of(comparison),
        "configuration": [asdict(key) | {"is_place": key.is_place} for key in comparison.keys],
        "surroundings": [asdict(key) for key in comparison.surroundings],
        "aspects": {aspect: asdict(difference) for aspect, difference in comparison.firsts.items()},
        "compared": dict(comparison.compared),
    }


def meaning_of(comparison: Comparison) -> list[str]:
    """Explain the first difference: its possible causes, and what to look at; the most important sentence first."""
    first, telling = comparison.first, comparison.telling_keys
    if first is None and not telling:
        return []

    if first is None:
        if comparison.compared:
            return ["In all that happened so far it made no difference."]
        return ["There is nothing else that both runs have, so what follows from it is not known."]

    meaning = BASE_WEIGHTS if first.aspect == "weights" and first.step == 0 else ASPECTS[first.aspect]
    sentences = [meaning]
    # a difference of the configuration is the likelier cause, so it is named first
    if telling:
        names = some([f"`{key.key}`" for key in telling], MOST_CAUSES)
        sentences = [f"It may follow from {names}. If it does not:", meaning]
    # the command line differs between any two runs
    around = [key for key in comparison.surroundings if not key.key.startswith("command")]
    if around:
        sentences.append(f"Besides the configuration, these differ: {some(around, MOST_CAUSES)}.")
    elif comparison.a.surroundings and comparison.b.surroundings:
        sentences.append("Versions and machines are the same.")
    else:
        sentences.append("Versions and machines were not written down in both, so they may differ too.")

    if first.step:
        what = "version" if first.aspect == "weights" else "batch"
        sentences.append(f"Before {what} {first.step} everything that both runs wrote down is the same.")
    return sentences
