"""Reward functions of TRL are called as its trainers call them."""

import asyncio
import functools
from typing import Any

import pytest

from trireme_worker.trl_rewards import as_environment, think_format_reward

CHAT = [{"role": "user", "content": "1 + 1?"}]
ROWS = [{"prompt": CHAT, "answer": "2", "level": 1}, {"prompt": CHAT, "answer": "3", "level": 2}]


def scored(rewards: Any, completions: list[str], rows: list[dict] | None = None, **more: Any) -> list[dict]:
    """Score one rollout of each row, as a group."""
    rows = ROWS if rows is None else rows
    made = as_environment(train=rows, rewards=rewards, **more)
    conversations = [
        [*([] if isinstance(row["prompt"], str) else row["prompt"]), {"role": "assistant", "content": text}]
        for row, text in zip(rows, completions, strict=True)
    ]
    return asyncio.run(made["reward"](completions, conversations, rows))


def test_function_gets_lists_of_messages_with_each_column():
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0, 0.0]

    scored(reward, ["2", "x"])
    assert seen["prompts"] == [CHAT, CHAT]
    assert seen["completions"] == [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "x"}]]
    assert (seen["answer"], seen["level"]) == (["2", "3"], [1, 2])


def test_text_prompts_have_text_completions():
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [0.0]

    scored(reward, [" blue"], [{"prompt": "The sky is"}])
    assert seen == {"prompts": ["The sky is"], "completions": [" blue"]}


def test_reward_is_the_weighted_sum_by_hand():
    async def later(completions, **columns):
        await asyncio.sleep(0)
        return [1.0, 0.5]

    def now(completions, answer):
        return [2, 4]

    found = scored([later, now], ["a", "b"], weights=[2.0, 0.25])
    assert [each["reward"] for each in found] == [2.5, 2.0]
    assert [(each["later"], each["now"]) for each in found] == [(1.0, 2.0), (0.5, 4.0)]


def test_none_leaves_a_function_out_of_the_sum():
    found = scored([lambda **given: [1.0, None], lambda **given: [0.5, 0.25]], ["a", "b"])
    assert [each["reward"] for each in found] == [1.5, 0.25]


def test_unjudged_rollout_neither_gets_nor_changes_an_advantage():
    rows = [*ROWS, {"prompt": CHAT, "answer": "4", "level": 3}]
    found = scored(lambda **given: [1.0, float("nan"), 0.0], ["a", "b", "c"], rows)
    rewards = [each["reward"] for each in found]
    assert rewards == [1.0, 0.5, 0.0]  # the mean of the others, so its advantage is 0 and the mean stays
    assert [each["unscored"] for each in found] == [0.0, 1.0, 0.0]


def test_logged_metric_reaches_each_rollout():
    def reward(completions, log_metric, log_extra, **columns):
        log_extra("length", [1, 2])
        log_metric("shortest", 1.0)
        return [0.0, 0.0]

    assert [each["shortest"] for each in scored(reward, ["a", "bb"])] == [1.0, 1.0]


def test_partial_function_is_called():
    def reward(completions, bonus, **columns):
        return [bonus for _ in completions]

    assert [each["reward"] for each in scored([functools.partial(reward, bonus=3.0)], ["a", "b"])] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("rewards", "rows", "words"),
    [
        (lambda completion_ids, **columns: [0.0], ROWS, "completion_ids"),
        (lambda completions, missing: [0.0], ROWS, "missing"),
        ("owner/reward-model", ROWS, "reward model"),
        (lambda **given: [0.0], [{"question": "?"}], "prompt"),
        (lambda **given: [0.0], [{"prompt": "?", "image": b""}], "docs/pictures.md"),
        (lambda **given: [0.0], iter(ROWS), "streaming"),
    ],
)
def test_what_no_rollout_can_give_is_refused_at_load(rewards, rows, words):
    with pytest.raises((TypeError, ValueError), match=words):
        as_environment(train=rows, rewards=rewards)


def test_number_of_weights_must_be_that_of_functions():
    with pytest.raises(ValueError, match="2 reward weights for 1"):
        as_environment(train=ROWS, rewards=[lambda **given: [0.0, 0.0]], weights=[1.0, 2.0])


def test_list_of_the_wrong_length_is_an_error_of_the_reward():
    with pytest.raises(Exception, match="1 rewards for 2"):
        scored(lambda **given: [1.0], ["a", "b"])


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>\nx\n</think>\ny", 1.0),
        ("<think></think>", 1.0),
        ("<think>x", 0.0),
        ("y <think>x</think>", 0.0),
        ("<think>a<think>b</think>", 0.0),
        ("<think>a</think><think>b</think>", 0.0),
    ],
)
def test_think_format_reward_wants_one_thought_in_front(text, reward):
    assert think_format_reward([[{"role": "assistant", "content": text}]]) == [reward]
