"""The comparison with TRL measures what it says."""

import pytest
from benchmarks.trl.summary import rate, reached


def test_benchmark_reaches_a_reward_at_a_mean_over_five_steps():
    rewards = [0.9, 0.2, 0.6, 0.7, 0.6, 0.7, 0.9, 0.9]
    steps = [
        {"step": step, "ended_s": 1000.0 + 2 * step, "reward": reward, "tokens": 100, "cpu_s": 3.0 * step}
        for step, reward in enumerate(rewards, 1)
    ]
    times = {"began_s": 990.0, "first_s": 997.0, "first_cpu_s": 5.0, "ended_s": 2000.0}
    result = times | {"steps": steps, "prompts": [[1]]}
    assert reached(result, 0.7)["step"] == 7  # (0.6 + 0.7 + 0.6 + 0.7 + 0.9) / 5
    assert reached(result, 0.8) is None
    assert rate(result) == pytest.approx(8 * 100 / 19)
