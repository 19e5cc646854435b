"""A worker that dies in the middle of rollouts: they are issued again, and nothing said before counts."""

from __future__ import annotations

import pytest

from whole_run import build_config, run

DIES_ONCE = """
    import os
    import pathlib

    calls = 0
    died = pathlib.Path(__file__).with_name("died")

    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

    def reward(completion, answer):
        global calls
        calls += 1
        if calls == 3 and not died.exists():
            died.touch()
            os._exit(1)
        return (len(completion) * 7 + ord(completion[0])) % 10 / 10
"""
STEPS = 2


@pytest.mark.parametrize("max_async_level", [0, 1])
def test_a_rollout_that_is_issued_again_is_trained_on_once(tmp_path, max_async_level: int) -> None:
    outcome = run(build_config(tmp_path, DIES_ONCE, max_steps=STEPS, max_async_level=max_async_level))
    assert (tmp_path / "died").exists()
    assert outcome.error is None
    rollouts = [rollout for record in outcome.records for rollout in record.rollouts]
    assert [len(rollout.samples) for rollout in rollouts] == [1] * 8 * STEPS
    assert [drop for record in outcome.records for drop in record.dropped] == []
