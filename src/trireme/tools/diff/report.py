"""`trireme diff RUN RUN`: what differs, what differed first, and what that usually means, as text and as JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trireme.base.safe_text import clean
from trireme.config.resume import flatten
from trireme.tools.diff.aspects import ASPECTS, BASE_WEIGHTS
from trireme.tools.diff.compare import Comparison, compare_runs
from trireme.tools.record_differences import counted, some

MOST_CAUSES = 4


def command(argv: list[str]) -> int:
    """Compare two runs, and return the exit code.

    Raises: ConfigError if a folder is not a run's; JournalCorrupt if an entry is not what was written.
    """
    parser = ArgumentParser(
        prog="trireme diff",
        description="Compares two runs from their folders alone, to the bit: configuration, versions of weights, and "
        "of each batch examples, tokens, logprobs, rewards and advantages, then loss and norm of the gradient. Says "
        "which difference came first and what usually leads to it. The runs may be going on. Writes nothing.",
        epilog="Ends with 0 where nothing differs as far as both go (ports, paths and the like do not count), 1 where "
        "something does, 2 where a folder is not a run's, 3 where a journal is damaged. docs/diff.md has examples.",
    )
    parser.add_argument("a", metavar="RUN", type=Path, help="the folder of a run, called A")
    parser.add_argument("b", metavar="RUN", type=Path, help="the folder of another one, called B")
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args(argv)
    comparison = compare_runs(arguments.a, arguments.b)
    print(json.dumps(as_json(comparison), indent=1) if arguments.json else as_text(comparison))
    return 0 if comparison.same else 1


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
