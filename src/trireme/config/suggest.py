"""Did you mean …? For a key that does not exist: a typo among its neighbours, or its name in another table."""

from __future__ import annotations

from difflib import get_close_matches

from trireme.config.aliases import KNOWN_ELSEWHERE, KNOWN_ELSEWHERE_SFT
from trireme.config.fields import walk
from trireme.config.section import Section

_MOST = 3


def suggest(root: type[Section], path: tuple[str, ...]) -> list[str]:
    """Up to three existing dotted keys that the unknown one at `path` may stand for, likeliest first."""
    known = [key for key, _ in walk(root)]
    typed = tuple(part for part in path if not part.isdigit())
    return (
        _typo_among_neighbours(known, typed)
        or _known_from_elsewhere(known, typed)
        or _same_name_in_another_table(known, typed)
        or _looks_alike(known, typed)
    )[:_MOST]


def _typo_among_neighbours(known: list[str], typed: tuple[str, ...]) -> list[str]:
    table = ".".join(typed[:-1])
    neighbours = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    return [neighbours[name] for name in get_close_matches(typed[-1], neighbours, n=_MOST, cutoff=0.75)]


def _known_from_elsewhere(known: list[str], typed: tuple[str, ...]) -> list[str]:
    """Those that the root at hand has: `sft` has no `trainer` around its tables."""
    ours = (KNOWN_ELSEWHERE_SFT.get(typed[-1], ""), KNOWN_ELSEWHERE.get(typed[-1], ""))
    here = (key if key in known else key.removeprefix("trainer.") for key in ours)
    return [key for key in here if key in known][:1]


def _same_name_in_another_table(known: list[str], typed: tuple[str, ...]) -> list[str]:
    """Those that share most with what was typed first: `tokenizer.name` is nearer to `trainer.tokenizer.name`."""
    same = [key for key in known if key.split(".")[-1] == typed[-1]]
    return sorted(same, key=lambda key: (-len(set(key.split(".")) & set(typed)), key.count(".")))


def _looks_alike(known: list[str], typed: tuple[str, ...]) -> list[str]:
    whole = get_close_matches(".".join(typed), known, n=1, cutoff=0.8)
    names = {key.rpartition(".")[2]: key for key in reversed(known)}
    return whole + [names[name] for name in get_close_matches(typed[-1], names, n=1, cutoff=0.75)]
