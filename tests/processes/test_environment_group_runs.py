"""A whole orchestrator with an environment whose rewards compare the rollouts of a group, or belong to turns."""

from __future__ import annotations

from collections import defaultdict

import pytest

from whole_run import build_config, run

FIRST_OF_ITS_GROUP = """
    import os
    import pathlib

    died = pathlib.Path(__file__).with_name("died")
    calls = 0

    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

    def reward(completions):
        global calls
        calls += 1
        if calls == 2 and not died.exists():
            died.touch()
            os._exit(1)
        first = min(completions)
        return [{"reward": float(each == first), "size": len(completions)} for each in completions]
"""
STEPS = 2


@pytest.mark.parametrize("max_async_level", [0, 1])
def test_each_group_that_is_trained_on_was_compared_within_itself(tmp_path, max_async_level):
    """One worker's death in the middle of a group's scoring included."""
    outcome = run(build_config(tmp_path, FIRST_OF_ITS_GROUP, max_steps=STEPS, max_async_level=max_async_level))
    assert (tmp_path / "died").exists()
    assert outcome.error is None
    groups = defaultdict(list)
    for record in outcome.records:
        for rollout in record.rollouts:
            groups[rollout.group].append(rollout)
    assert [len(rollouts) for rollouts in groups.values()] == [4] * 2 * STEPS
    for rollouts in groups.values():
        said = [rollout.completion[0]["content"] for rollout in rollouts]
        assert [rollout.reward for rollout in rollouts] == [float(text == min(said)) for text in said]
        assert {rollout.metrics["size"] for rollout in rollouts} == {4.0}


def test_a_run_whose_groups_do_not_fit_ends_in_words(tmp_path):
    toy = {"id": str(tmp_path / "toy.py"), "name": "say", "max_concurrent": 3}
    outcome = run(build_config(tmp_path, FIRST_OF_ITS_GROUP, max_steps=STEPS, orchestrator={"env": [toy]}))
    assert "compare the 4 rollouts of a group, and its `max_concurrent` is 3" in str(outcome.error)
