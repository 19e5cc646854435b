"""The report of a comparison, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trireme.tools.diff.compare import Comparison
from trireme.tools.diff.configuration import KeyDifference
from trireme.tools.diff.differences import ASPECTS, Difference
from trireme.tools.diff.meaning import meaning_of

MOST_KEYS = 12


def as_text(comparison: Comparison, *, everything: bool) -> str:
    """Return the report as text.

    Args:
        everything: show all differing keys, also those that only say where a run runs.
    """
    lines = [f"A  {comparison.a.folder}: {comparison.a}", f"B  {comparison.b.folder}: {comparison.b}", ""]
    lines += _verdict(comparison)
    lines += ["", *_configuration(comparison, everything=everything), "", *_aspects(comparison)]
    return "\n".join(lines)


def _verdict(comparison: Comparison) -> list[str]:
    if comparison.same:
        return [f"no difference: {_extent(comparison)}"]
    lines = []
    if comparison.telling_keys:
        lines.append(f"first difference: configuration, {comparison.telling_keys[0]}")
    if first := comparison.found.first:
        head = "in what happened" if comparison.telling_keys else "first difference"
        lines.append(f"{head}: {first.aspect}, {first}")
    return [*lines, *(f"  {sentence}" for sentence in meaning_of(comparison))]


def _extent(comparison: Comparison) -> str:
    """Describe how far the comparison goes, and whether one run goes further."""
    if not any(comparison.found.compared.values()):
        return "the configurations are the same; no batch, step or version is in both"
    ends = {"A": comparison.a.end - 1, "B": comparison.b.end - 1}
    longer, shorter = sorted(ends, key=lambda name: -ends[name])
    further = f", as far as {shorter} goes: to {ends[shorter]}, {longer} to {ends[longer]}"
    return "configuration, versions, batches and steps are the same to the bit" + (
        further if ends[longer] > ends[shorter] else ""
    )


def _configuration(comparison: Comparison, *, everything: bool) -> list[str]:
    telling = comparison.telling_keys
    places = [key for key in comparison.keys if key.is_place]
    head = f"{_keys(telling)} of {comparison.num_keys} not the same" if telling else "all keys that count are the same"
    lines = [f"configuration: {head}"]
    lines += [f"  {key}" for key in (telling if everything else telling[:MOST_KEYS])]
    if not everything and len(telling) > MOST_KEYS:
        lines.append(f"  and {len(telling) - MOST_KEYS} more: --all shows them")
    if places:
        lines.append(
            f"  of where it runs, {_keys(places)}: {', '.join(key.key for key in places[:6])}{_more(places, 6)}"
        )
    if everything:
        lines += [f"    {key}" for key in places]
    return lines + _surroundings(comparison.surroundings)


def _surroundings(keys: list[KeyDifference]) -> list[str]:
    return ["surroundings", *(f"  {key}" for key in keys)] if keys else []


def _keys(keys: list[KeyDifference]) -> str:
    return "1 key" if len(keys) == 1 else f"{len(keys)} keys"


def _more(values: list[Any], shown: int) -> str:
    return f" and {len(values) - shown} more" if len(values) > shown else ""


def _aspects(comparison: Comparison) -> list[str]:
    """Describe the first difference of each aspect in the order found, then the aspects that are the same."""
    found = comparison.found
    width = max(map(len, ASPECTS))
    lines = [f"{aspect:{width}}  {difference}" for aspect, difference in found.firsts.items()]
    if found.says_all:
        lines.append("What comes after these was not looked at: it follows from them.")
    counts: dict[int, list[str]] = {}
    for aspect in ASPECTS:
        if aspect not in found.firsts:
            counts.setdefault(found.compared[aspect], []).append(aspect)
    for count in sorted(counts, reverse=True):
        how = f"the same, {count} compared" if count else "not in both runs"
        lines.append(f"{how}: {', '.join(counts[count])}")
    return lines


def as_json(comparison: Comparison) -> dict[str, Any]:
    found, first = comparison.found, comparison.found.first
    keys = comparison.telling_keys
    return {
        "a": str(comparison.a.folder),
        "b": str(comparison.b.folder),
        "same": comparison.same,
        "first_key": asdict(keys[0]) if keys else None,
        "first": _as_table(first) if first else None,
        "meaning": meaning_of(comparison),
        "configuration": [asdict(key) | {"is_place": key.is_place} for key in comparison.keys],
        "surroundings": [asdict(key) for key in comparison.surroundings],
        "aspects": {aspect: _as_table(difference) for aspect, difference in found.firsts.items()},
        "compared": dict(found.compared),
    }


def _as_table(difference: Difference) -> dict[str, Any]:
    return {name: value for name, value in asdict(difference).items() if name != "same_before"}
