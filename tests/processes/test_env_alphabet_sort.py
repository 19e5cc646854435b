"""The alphabet-sort environment: what is right, how near an answer is, and rollouts in a worker."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from toy_environments import import_shipped, packages_folder, run_all, with_package
from trireme.orchestrator.environments.wire import Ask, Reply

episodes = import_shipped("alphabet_sort", "alphabet_sort_episodes")
MARK = " // new name!"
BOUNDS = {"num_turns": (1, 3), "names_per_turn": (1, 4), "items": "names", "sort_by": "any", "seed": 0}


def test_the_right_answer_of_an_episode_worked_by_hand():
    turns = (("Mia Stone", "Ada West"), ("Leo Hall",), ("Zoe Bell", "Ben Zhang"))
    ben, leo, zoe = "Ben Zhang // new name!", "Leo Hall // new name!", "Zoe Bell // new name!"
    assert episodes.Episode(turns, "first").expected() == [
        ["Ada West", "Mia Stone"],
        ["Ada West", leo, "Mia Stone"],
        ["Ada West", ben, "Leo Hall", "Mia Stone", zoe],
    ]
    assert episodes.Episode(turns, "last").expected()[2] == [zoe, "Leo Hall", "Mia Stone", "Ada West", ben]
    text = "\n  Ada West // new name!\n\nLeo Hall //new name!\nMia Stone\n"  # a name and its mark are two items
    assert episodes.items_in(text) == ["Ada West", "// new name!", "Leo Hall", "// new name!", "Mia Stone"]


MARKED, UNMARKED = [item for i in range(150) for item in (str(i), "// new name!")], [str(i) for i in range(150)]


@pytest.mark.parametrize(
    ("given", "expected", "similarity"),
    [
        (["a", "b", "c"], ["a", "b", "c"], 1),
        (["a", "c", "b"], ["a", "b", "c"], 2 * 2 / 6),
        (["a", "b"], ["a", "b", "// new name!"], 2 * 2 / 5),
        ([], ["a"], 0),
        (None, ["a"], 0),
        # `SequenceMatcher` leaves out what it takes for junk in lists of 200 and more, unless it is told not to.
        (MARKED, MARKED[:-1], 2 * 299 / 599),
        (UNMARKED + MARKED, MARKED + UNMARKED, 2 * 300 / 900),
    ],
)
def test_similarity_is_twice_the_items_in_common_blocks_over_all_items(given, expected, similarity):
    assert episodes.similarity(given, expected) == pytest.approx(similarity)


@pytest.mark.parametrize("items", ["names", "letters"])
def test_episodes_keep_their_bounds_have_one_right_order_and_are_either_trained_on_or_evaluated_on(items):
    names: tuple[set, set] = set(), set()
    for seed, turns in [(0, (1, 3)), (1, (1, 1)), (2, (2, 5))]:
        bounds = BOUNDS | {"items": items, "seed": seed, "num_turns": turns}
        sets = episodes.make_episodes(200, 50, **bounds)
        assert (
            sets == episodes.make_episodes(200, 50, **bounds) != episodes.make_episodes(200, 50, **BOUNDS | {"seed": 9})
        )
        assert {len(episode.turns) for episode in sets[0]} == set(range(turns[0], turns[1] + 1))
        assert {len(turn) for episode in sets[0] for turn in episode.turns} == {1, 2, 3, 4}
        for seen, some in zip(names, sets, strict=True):
            seen.update(frozenset(sum(episode.turns, ())) for episode in some)
    assert len(names[0]) > 300
    assert not names[0] & names[1]
    for of_episode in names[0] | names[1]:
        for part in (0, -1):
            assert len({name.split()[part] for name in of_episode}) == len(of_episode)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"items": "numbers"}, "expected one of 'names', 'letters'"),
        ({"sort_by": "middle"}, "expected one of 'any', 'first', 'last'"),
        ({"num_turns": (3, 2)}, "expected 1 <= min_turns <= max_turns"),
        ({"names_per_turn": (0, 2)}, "expected 1 <= min_names_per_turn"),
        ({"items": "letters", "num_turns": (1, 9)}, "asks for 36 different letters - expected at most 26"),
    ],
)
def test_arguments_that_allow_no_episode_are_refused_with_advice(arguments, advice):
    with pytest.raises(ValueError, match=advice):
        episodes.make_episodes(10, 1, **BOUNDS | arguments)


def sorted_answer(question: Ask, *, marks: bool = True, combined: bool = True) -> str:
    """Read from the conversation alone, as a policy must."""
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    names = [re.search(r": (.*)", content)[1].split(", ") for content in asked]
    part = -1 if "by last name" in asked[0] else 0
    ordered = sorted((name for some in names for name in some), key=lambda name: name.split()[part])
    lines = [name + MARK * (marks and len(asked) > 1 and name in names[-1]) for name in ordered]
    tag = "combined_" * (combined and len(asked) > 1) + "alphabetical_sorted"
    return f"<{tag}>\n{chr(10).join(lines)}\n</{tag}>"


def answers(**options: Any) -> Callable[[Ask], Awaitable[Reply]]:
    async def ask(question: Ask) -> Reply:
        return Reply(content=f"Here you are:\n{sorted_answer(question, **options)}", finish_reason="stop")

    return ask


def test_the_alphabet_sort_package_rewards_every_turn_by_how_nearly_it_is_sorted(tmp_path_factory):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (20, 5)
        policies = (answers(), answers(marks=False), answers(combined=False))
        return await asyncio.gather(*(run_all(environment, policy, 20) for policy in policies))

    args = {"min_turns": 2, "max_turns": 4, "num_train": 20, "num_eval": 5, "similarity_power": 2}
    done = with_package(packages_folder(tmp_path_factory), "alphabet-sort", use, **args)
    assert {len(rollout.info["expected"]) for rollout in done[0]} == {2, 3, 4}
    for right, unmarked, untagged in zip(*done, strict=True):
        turns = len(right.info["expected"])
        assert (right.reward, right.metrics["exact_turns"], right.stop) == (1.0, 1.0, "all_turns_answered")
        assert right.metrics["num_turns"] == len(right.completion) // 2 + 1 == turns
        assert {name for name in right.metrics if "turn_" in name} == {f"similarity_turn_{n + 1}" for n in range(turns)}
        assert untagged.reward == untagged.metrics["answered_turns"] == pytest.approx(1 / turns)
        assert unmarked.reward == pytest.approx(sum(map(worth_without_marks, right.info["expected"])) / turns)


def worth_without_marks(expected: list[str]) -> float:
    """By the formula: all names in common, no mark; squared, as `similarity_power` says."""
    names = sum(item != MARK.strip() for item in expected)
    return (2 * names / (len(expected) + names)) ** 2
