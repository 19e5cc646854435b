"""What a check says of its rollouts: figures worked by hand, and the advice at its bounds."""

import math

import pytest

from trireme.journal.records import Rollout
from trireme.orchestrator.evaluation.results import EvalResult
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed
from trireme.tools.environments.check_report import Loaded, advice_of, build_report, text_of
from trireme.tools.evaluate.report import conversation_of
from trireme.tools.policies.rewards import Rewards, difficulty_in_words

LOADED = Loaded("toy", "toy.py", 0.1, 10, 0, {"python": "3.11.7"})


def outcome(example, place, reward, *, truncated=False, **metrics):
    """A rollout with a reward, or that failed with an error."""
    spec = RolloutSpec("train", example, place, name=f"{example}-{place}")
    if isinstance(reward, str):
        return RolloutOutcome(spec, 2.0, failure=RolloutFailed("score", reward))
    ended = {"truncated": truncated, "stop": "stop", "num_turns": 1 + place, "num_sampled": 10 * (1 + place)}
    rollout = Rollout(env="toy", example=example, temperature=1.0, reward=reward, metrics=metrics, **ended)
    return RolloutOutcome(spec, 0.5, rollout)


def report_of(outcomes, **options):
    examples = tuple(sorted({outcome.spec.example for outcome in outcomes}))
    settings = {"policy": "p", "is_baseline": True, "seconds": 1.0, "num_restarts": 0} | options
    return build_report(LOADED, outcomes, Extent("train", examples, 1), **settings)


def groups(*rewards, **options):
    return report_of(
        [outcome(e, p, reward) for e, group in enumerate(rewards) for p, reward in enumerate(group)], **options
    )


def test_figures_worked_by_hand():
    """Groups 0, 1 | 1, 1 | 0, 0.5: means 0.5, 1, 0.25; standard deviations 0.5, 0, 0.25."""
    rewards, mean = groups([0.0, 1.0], [1.0, 1.0], [0.0, 0.5]).rewards, 1.75 / 3
    error = math.sqrt(((0.5 - mean) ** 2 + (1 - mean) ** 2 + (0.25 - mean) ** 2) / 2 / 3)
    found = (rewards.mean, rewards.error, rewards.group_std, rewards.without_signal, rewards.success)
    assert found == pytest.approx((mean, error, 0.25, 1 / 3, mean))
    assert (rewards.least, rewards.most) == (0.0, 1.0)
    single = groups([0.5], [0.25])  # one rollout of each example has no spread
    assert (single.rewards.group_std, single.rewards.without_signal) == (None, None)
    assert any("take `-r 8`" in line for line in advice_of(single))
    report = report_of([outcome(0, 0, 1.0, right=1.0), outcome(0, 1, 0.0, right=0.0, tries=4.0), outcome(0, 2, "e")])
    assert report.components == {"right": 0.5, "tries": 4.0}
    assert report.lengths == {"turns": 1.5, "tokens sampled": 15.0}


def test_an_example_counts_the_same_however_many_of_its_rollouts_failed():
    report = groups([1.0, "e"], [0.0, 0.0])
    assert (report.rewards.mean, report.num_done, report.num_failed, report.holds) == (0.5, 3, 1, False)
    report = groups([1.0], num_restarts=1)
    assert not report.holds
    assert "workers died" in text_of(report)


def test_what_a_model_or_an_environment_wrote_moves_no_cursor():
    written = "\x1b[2J\x1b[1;1Hreward 1"
    answer = {"role": "assistant", "content": written}
    for text in (
        text_of(groups([1.0, written])),
        conversation_of(EvalResult(example_id=1, reward=None, error=written)),
        conversation_of(EvalResult(example_id=1, reward=1.0, completion=[answer])),
    ):
        assert ("\x1b" in text, "␛[2J" in text) == (False, True)


def test_difficulty_at_its_bounds():
    for said, *bounds in (
        ("too hard", 0, 0.049),
        ("on the hard side", 0.05, 0.099),
        ("good", 0.1, 0.7),
        ("on the easy side", 0.701, 0.8),
        ("too easy", 0.801, 1),
    ):
        for success in bounds:
            rewards = Rewards(success, None, 0.0, 1.0, 0.1, 0.0, success)
            assert difficulty_in_words(rewards).startswith(f"{said}: ")
    assert "from -3 to 7 are no shares of success" in difficulty_in_words(groups([-3.0, 2.0], [2.5, 7.0]).rewards)


def test_what_hinders_learning_is_pointed_out():
    cut_off = report_of([outcome(0, place, float(place % 2), truncated=place < 2) for place in range(8)])
    for report, words in (
        (groups(*[[0.5, 0.5]] * 6, *[[0.0, 1.0]] * 5), "55% of the groups have no signal"),
        (groups(*[[0.5, 0.52]] * 12), "differ little within groups (standard deviation 0.010)"),
        (cut_off, "25% of the rollouts were cut off"),
        (groups([0.9, 1.0], is_baseline=False), "earned 0.95: a reward that anything earns teaches nothing"),
    ):
        assert any(words in line for line in advice_of(report))
    [line] = advice_of(groups(*[[0.0, 1.0]] * 12))
    assert line.startswith("good")
    [line] = advice_of(groups([0.0, 0.1], is_baseline=False))
    assert line.startswith("no baseline")
