"""The alphabet-sort environment: what is right, how near an answer is, and the whole of it in a worker of its own."""

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path

import pytest

from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
MARK = " // new name!"
BOUNDS = {"num_turns": (1, 3), "names_per_turn": (1, 4), "items": "names", "sort_by": "any", "seed": 0}


@pytest.fixture(scope="module")
def episodes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS / "alphabet_sort")
        yield importlib.import_module("alphabet_sort_episodes")


def test_the_right_answer_of_an_episode_worked_by_hand(episodes):
    turns = (("Mia Stone", "Ada West"), ("Leo Hall",), ("Zoe Bell", "Ben Zhang"))
    assert episodes.Episode(turns, "first").expected() == [
        ["Ada West", "Mia Stone"],
        ["Ada West", "Leo Hall // new name!", "Mia Stone"],
        ["Ada West", "Ben Zhang // new name!", "Leo Hall", "Mia Stone", "Zoe Bell // new name!"],
    ]
    assert episodes.Episode(turns, "last").expected()[2] == [
        "Zoe Bell // new name!",
        "Leo Hall",
        "Mia Stone",
        "Ada West",
        "Ben Zhang // new name!",
    ]


def test_a_name_and_its_mark_are_two_items(episodes):
    text = "\n  Ada West // new name!\n\nLeo Hall //new name!\nMia Stone\n"
    assert episodes.items_in(text) == ["Ada West", "// new name!", "Leo Hall", "// new name!", "Mia Stone"]


def test_similarity_is_twice_the_items_in_common_blocks_over_all_items(episodes):
    assert episodes.similarity(["a", "b", "c"], ["a", "b", "c"]) == 1
    assert episodes.similarity(["a", "c", "b"], ["a", "b", "c"]) == pytest.approx(2 * 2 / 6)
    assert episodes.similarity(["a", "b"], ["a", "b", "// new name!"]) == pytest.approx(2 * 2 / 5)
    assert episodes.similarity([], ["a"]) == 0
    assert episodes.similarity(None, ["a"]) == 0


def test_a_long_list_is_compared_as_a_short_one_is(episodes):
    """`SequenceMatcher` leaves out what it takes for junk in lists of 200 and more, unless it is told not to."""
    marked = [item for number in range(150) for item in (str(number), "// new name!")]
    unmarked = [str(number) for number in range(150)]
    assert episodes.similarity(marked, marked[:-1]) == pytest.approx(2 * 299 / 599)
    assert episodes.similarity(unmarked + marked, marked + unmarked) == pytest.approx(2 * 300 / 900)


@pytest.mark.parametrize("items", ["names", "letters"])
def test_an_episode_keeps_its_bounds_and_has_one_right_order(episodes, items):
    train, evaluation = episodes.make_episodes(300, 60, **BOUNDS | {"items": items})
    assert (len(train), len(evaluation)) == (300, 60)
    assert {len(episode.turns) for episode in train} == {1, 2, 3}
    assert {len(turn) for episode in train for turn in episode.turns} == {1, 2, 3, 4}
    for episode in train + evaluation:
        for part in (0, -1):
            keys = [name.split()[part] for turn in episode.turns for name in turn]
            assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("items", ["names", "letters"])
def test_no_names_are_both_trained_on_and_evaluated_on_in_whatever_order_or_turns(episodes, items):
    train, evaluation = set(), set()
    for seed, turns in [(0, (1, 3)), (1, (1, 1)), (2, (2, 5))]:
        some, others = episodes.make_episodes(200, 50, **BOUNDS | {"items": items, "seed": seed, "num_turns": turns})
        train.update(frozenset(sum(episode.turns, ())) for episode in some)
        evaluation.update(frozenset(sum(episode.turns, ())) for episode in others)
    assert len(train) > 300
    assert not train & evaluation


def test_the_episodes_depend_on_the_seed_and_on_nothing_else(episodes):
    assert episodes.make_episodes(50, 5, **BOUNDS) == episodes.make_episodes(50, 5, **BOUNDS)
    assert episodes.make_episodes(50, 5, **BOUNDS) != episodes.make_episodes(50, 5, **BOUNDS | {"seed": 1})


def test_there_are_fewer_episodes_where_the_bounds_allow_no_more(episodes):
    only_one_letter = BOUNDS | {"items": "letters", "num_turns": (1, 1), "names_per_turn": (1, 1)}
    train, evaluation = episodes.make_episodes(100, 100, **only_one_letter)
    assert len(train) + len(evaluation) == 26


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
def test_arguments_that_allow_no_episode_are_refused_with_advice(episodes, arguments, advice):
    with pytest.raises(ValueError, match=advice):
        episodes.make_episodes(10, 1, **BOUNDS | arguments)


def names_in(message: dict) -> list[str]:
    listed = re.search(r": (.*)", message["content"])
    assert listed is not None
    return listed[1].split(", ")


def sorted_answer(question: Ask, *, marks: bool = True) -> str:
    """Read from the conversation alone, as a policy must."""
    asked = [message for message in question.messages if message["role"] == "user"]
    part = -1 if "by last name" in asked[0]["content"] else 0
    new = names_in(asked[-1])
    names = sorted((name for message in asked for name in names_in(message)), key=lambda name: name.split()[part])
    if len(asked) == 1:
        return f"<alphabetical_sorted>\n{chr(10).join(names)}\n</alphabetical_sorted>"
    lines = [name + MARK * (marks and name in new) for name in names]
    return f"<combined_alphabetical_sorted>\n{chr(10).join(lines)}\n</combined_alphabetical_sorted>"


async def sort_all(question: Ask) -> Reply:
    return Reply(content=f"Here you are:\n{sorted_answer(question)}", finish_reason="stop")


async def forget_marks(question: Ask) -> Reply:
    return Reply(content=sorted_answer(question, marks=False), finish_reason="stop")


async def always_use_the_first_tag(question: Ask) -> Reply:
    return Reply(content=sorted_answer(question).replace("combined_", ""), finish_reason="stop")


@pytest.mark.e2e
def test_the_alphabet_sort_package_rewards_every_turn_by_how_nearly_it_is_sorted(tmp_path):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (20, 5)
        policies = {"right": sort_all, "unmarked": forget_marks, "untagged": always_use_the_first_tag}
        return {
            name: [await environment.run(RunTask(task=f"{name}-{i}", index=i), policy) for i in range(20)]
            for name, policy in policies.items()
        }

    async def main():
        args = {"min_turns": 2, "max_turns": 4, "num_train": 20, "num_eval": 5, "similarity_power": 2}
        config = EnvironmentConfig(id="primeintellect/alphabet-sort", args=args)
        async with open_environment(
            config, logs=tmp_path / "logs", root=ENVIRONMENTS, cache=tmp_path / "cache"
        ) as environment:
            return await use(environment)

    done = asyncio.run(main())
    assert {len(rollout.info["expected"]) for rollout in done["right"]} == {2, 3, 4}
    for right, unmarked, untagged in zip(*done.values(), strict=True):
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
