"""Episodes: lists that are to be sorted turn by turn, what is asked, what is expected, and how near an answer is.

Nothing here needs more than the standard library.
"""

import hashlib
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from alphabet_sort_names import FIRST_NAMES, LAST_NAMES

FIRST_TAG, LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"
MARK = "// new name!"
EVAL_SHARE = 0.2  # share of all episodes; the rest is for training
DRAWS_PER_EPISODE = 50  # short episodes repeat often; after so many draws per one that is wanted, there are no more
ORDERS = {"first": " by first name", "last": " by last name", "letters": ""}


@dataclass(frozen=True)
class Episode:
    """What each turn adds, in the order it is shown.

    Example:
        Episode(turns=(("Mia Stone", "Ada West"), ("Leo Hall",)), sort_by="first")
    """

    turns: tuple[tuple[str, ...], ...]
    sort_by: str  # a key of ORDERS

    def prompts(self) -> list[str]:
        return [
            _follow_up(turn, self.sort_by) if n else _first(turn, self.sort_by) for n, turn in enumerate(self.turns)
        ]

    def expected(self) -> list[list[str]]:
        """The lines of the right answer, for each turn."""
        return [self._expected_at(turn) for turn in range(len(self.turns))]

    def _expected_at(self, turn: int) -> list[str]:
        so_far = [name for names in self.turns[: turn + 1] for name in names]
        new = self.turns[turn] if turn else ()
        ordered = sorted(so_far, key=lambda name: _sort_key(name, self.sort_by))
        return [f"{name} {MARK}" if name in new else name for name in ordered]


def similarity(answer: list[str] | None, expected: list[str]) -> float:
    """Of two lists of items, 0 to 1; 1 is equal. Twice the items in matching blocks, over the items of both."""
    return 0.0 if answer is None else SequenceMatcher(None, answer, expected, autojunk=False).ratio()


def items_in(text: str) -> list[str]:
    """Each name and each mark is an item of its own, so that a missing mark does not spoil the name, nor the reverse.

    Example:
        "Ada West\\nLeo Hall // new name!" -> ["Ada West", "Leo Hall", "// new name!"]
    """
    return [item for line in text.split("\n") for item in _items_in_line(line.strip()) if item]


def _items_in_line(line: str) -> tuple[str, str]:
    name, slashes, remark = line.partition("//")
    return name.strip(), f"// {remark.strip()}" if slashes else ""


def make_episodes(
    num_train: int,
    num_eval: int,
    *,
    num_turns: tuple[int, int],
    names_per_turn: tuple[int, int],
    items: str,
    sort_by: str,
    seed: int,
) -> tuple[list[Episode], list[Episode]]:
    """Different episodes, as many as asked for or as there are. Training and evaluation never share one."""
    _check(num_turns=num_turns, names_per_turn=names_per_turn, items=items, sort_by=sort_by)

    # Dicts keep the order of the draws, and no episode comes twice.
    train: dict[Episode, None] = {}
    evaluation: dict[Episode, None] = {}
    draws = _draw_episodes(random.Random(seed), num_turns, names_per_turn, items, sort_by)
    for _ in range(DRAWS_PER_EPISODE * (num_train + num_eval)):
        if len(train) == num_train and len(evaluation) == num_eval:
            break
        episode = next(draws)
        wanted, limit = (evaluation, num_eval) if is_for_eval(episode) else (train, num_train)
        if len(wanted) < limit:
            wanted[episode] = None

    # Bounds may allow so few episodes that all of them are for evaluation.
    if num_train and not train:
        raise ValueError(
            f"No episode of {num_turns} turns with {names_per_turn} {items} each is left for training - expected "
            "bounds that allow many, such as 1 to 3 turns with 1 to 5 names - raise `max_turns` or "
            "`max_names_per_turn`."
        )
    return list(train), list(evaluation)


def is_for_eval(episode: Episode) -> bool:
    """A property of the names alone, in whatever order or turns they come: no choice of arguments can mix the sets."""
    names = "\n".join(sorted(name for turn in episode.turns for name in turn))
    return hashlib.sha256(names.encode()).digest()[0] < 256 * EVAL_SHARE


def _draw_episodes(
    rng: random.Random, num_turns: tuple[int, int], names_per_turn: tuple[int, int], items: str, sort_by: str
) -> Iterator[Episode]:
    while True:
        sizes = [rng.randint(*names_per_turn) for _ in range(rng.randint(*num_turns))]
        order = "letters" if items == "letters" else rng.choice(["first", "last"]) if sort_by == "any" else sort_by
        names = _draw_names(rng, sum(sizes), items)
        yield Episode(turns=tuple(tuple(names.pop() for _ in range(size)) for size in sizes), sort_by=order)


def _draw_names(rng: random.Random, count: int, items: str) -> list[str]:
    """No first and no last name comes twice, so there is one right order, whichever it is sorted by."""
    if items == "letters":
        return rng.sample(string.ascii_lowercase, count)
    pairs = zip(rng.sample(FIRST_NAMES, count), rng.sample(LAST_NAMES, count), strict=True)
    return [f"{first} {last}" for first, last in pairs]


def _sort_key(name: str, sort_by: str) -> str:
    return name.split()[-1 if sort_by == "last" else 0]


def _first(names: tuple[str, ...], sort_by: str) -> str:
    return (
        f"Sort these {_noun(sort_by)} in alphabetical order{ORDERS[sort_by]}: {', '.join(names)}\n\n"
        f"Answer in exactly this form, one per line:\n<{FIRST_TAG}>\n...\n</{FIRST_TAG}>"
    )


def _follow_up(names: tuple[str, ...], sort_by: str) -> str:
    return (
        f"Here are more: {', '.join(names)}\n\nSort ALL {_noun(sort_by)} so far in alphabetical order"
        f"{ORDERS[sort_by]}, these and the earlier ones. Put `{MARK}` after each one that is new in this message.\n\n"
        f"Answer in exactly this form, one per line:\n<{LATER_TAG}>\n...\n... {MARK}\n</{LATER_TAG}>"
    )


def _noun(sort_by: str) -> str:
    return "letters" if sort_by == "letters" else "names"


def _check(*, num_turns: tuple[int, int], names_per_turn: tuple[int, int], items: str, sort_by: str) -> None:
    _check_choice("items", items, ["names", "letters"])
    _check_choice("sort_by", sort_by, ["any", "first", "last"])
    for name, (low, high) in {"turns": num_turns, "names_per_turn": names_per_turn}.items():
        if not 1 <= low <= high:
            raise ValueError(
                f"min_{name}={low} and max_{name}={high} - expected 1 <= min_{name} <= max_{name} - change them."
            )

    # No name comes twice in an episode, so its longest list must not need more than there are.
    most, there_are = num_turns[1] * names_per_turn[1], _num_items(items)
    if most > there_are:
        raise ValueError(
            f"max_turns={num_turns[1]} with max_names_per_turn={names_per_turn[1]} asks for {most} different {items} - "
            f"expected at most {there_are} - lower one of them."
        )


def _check_choice(name: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} - expected one of {', '.join(map(repr, choices))} - change it.")


def _num_items(items: str) -> int:
    return len(string.ascii_lowercase) if items == "letters" else min(len(FIRST_NAMES), len(LAST_NAMES))
