"""What a check says of its rollouts: figures worked by hand, and the advice at its bounds."""

import math

import pytest

from trireme.journal.records import Rollout
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools.environments import check_report

LOADED = check_report.Loaded("toy", "file", "toy.py", None, 0.1, 1, 10, 0, {"python": "3.11.7"})


def scored(example: int, place: int, reward: float, *, truncated: bool = False, **metrics: float) -> RolloutOutcome:
    ended = {"truncated": truncated, "stop": "stop", "num_turns": 1 + place, "num_sampled": 10 * (1 + place)}
    rollout = Rollout(env="toy", example=example, temperature=1.0, reward=reward, metrics=metrics, **ended)
    return RolloutOutcome(RolloutSpec("train", example, place, name=f"{example}-{place}"), 0.5, rollout)


def failed(example: int, place: int, error: str, stage: str = "score") -> RolloutOutcome:
    failure = RolloutFailed(stage, error, f"Traceback\n  {error}")
    return RolloutOutcome(RolloutSpec("train", example, place, name=f"{example}-{place}"), 2.0, failure=failure)


def report_of(outcomes: list[RolloutOutcome], **options: object) -> check_report.CheckReport:
    examples = tuple(sorted({outcome.spec.example for outcome in outcomes}))
    size = max(outcome.spec.rollout for outcome in outcomes) + 1
    settings = {"policy": "p", "is_baseline": True, "seconds": 1.0, "num_restarts": 0} | options
    return check_report.build_report(LOADED, outcomes, Extent("train", examples, size), **settings)  # type: ignore[arg-type]


def rewards_of_report(report: check_report.CheckReport) -> check_report.Rewards:
    assert report.rewards is not None
    return report.rewards


def groups(*rewards: list[float]) -> check_report.CheckReport:
    return report_of([scored(e, p, reward) for e, group in enumerate(rewards) for p, reward in enumerate(group)])


def test_figures_worked_by_hand() -> None:
    """Groups 0, 1 | 1, 1 | 0, 0.5: means 0.5, 1, 0.25; standard deviations 0.5, 0, 0.25."""
    rewards, mean = check_report.rewards_of([[0.0, 1.0], [1.0, 1.0], [0.0, 0.5]]), 1.75 / 3
    error = math.sqrt(((0.5 - mean) ** 2 + (1 - mean) ** 2 + (0.25 - mean) ** 2) / 2 / 3)
    found = (rewards.mean, rewards.error, rewards.group_std, rewards.without_signal, rewards.success)
    assert found == pytest.approx((mean, error, 0.25, 1 / 3, mean))
    assert (rewards.least, rewards.most) == (0.0, 1.0)


def test_an_example_counts_the_same_however_many_of_its_rollouts_failed() -> None:
    report = report_of([scored(0, 0, 1.0), failed(0, 1, "e"), scored(1, 0, 0.0), scored(1, 1, 0.0)])
    assert rewards_of_report(report).mean == 0.5
    assert (report.num_done, report.num_failed, report.holds) == (3, 1, False)
    report = report_of([scored(0, 0, 1.0)], num_restarts=1)
    assert not report.holds
    assert "workers died and were restarted 1 time:" in check_report.text_of(report)


def test_success_is_the_share_above_a_bound_where_one_is_given() -> None:
    attempts = [scored(0, 0, -3.0), scored(0, 1, 2.0), scored(1, 0, 2.5), scored(1, 1, 7.0)]
    without = rewards_of_report(report_of(attempts))
    assert (rewards_of_report(report_of(attempts, success_at=2.0)).success, without.success) == (0.75, None)
    assert "from -3 to 7 are no shares of success. `--success-at X`" in check_report.difficulty_in_words(without)
    single = groups([0.5], [0.25])  # one rollout of each example has no spread
    assert (rewards_of_report(single).group_std, rewards_of_report(single).without_signal) == (None, None)
    assert any("take `-r 8`" in line for line in check_report.advice_of(single))


def test_components_and_lengths_are_those_of_the_rollouts_that_have_them() -> None:
    attempts = [scored(0, 0, 1.0, right=1.0), scored(0, 1, 0.0, right=0.0, tries=4.0), failed(0, 2, "e")]
    report = report_of(attempts)
    found = {name: (n.mean, n.least, n.most) for name, n in report.components.items()}
    assert found == {"right": (0.5, 0.0, 1.0), "tries": (4.0, 4.0, 4.0)}
    assert report.turns is not None
    assert report.sampled is not None
    assert (report.turns.mean, report.sampled.mean, report.tokens, report.slowest_s) == (1.5, 15.0, None, 2.0)


@pytest.mark.parametrize(
    ("success", "said"),
    [(0.801, "too easy"), (0.8, "on the easy side"), (0.701, "on the easy side"), (0.7, "good"), (0.1, "good"),
     (0.099, "on the hard side"), (0.05, "on the hard side"), (0.049, "too hard"), (0.0, "too hard")],
)  # fmt: skip
def test_difficulty_at_its_bounds(success: float, said: str) -> None:
    rewards = check_report.Rewards(success, None, 0.1, 0.0, 1.0, 0.1, 0.0, success)
    assert check_report.difficulty_in_words(rewards).startswith(f"{said}: ")


def test_what_hinders_learning_is_pointed_out() -> None:
    same = groups(*[[0.5, 0.5]] * 6, *[[0.0, 1.0]] * 5)
    close = groups(*[[0.5, 0.52]] * 12)
    few = report_of([scored(0, place, float(place % 2), truncated=place < 2) for place in range(8)])
    for report, words in (
        (same, "55% of the groups have no signal"),
        (close, "differ little within groups (standard deviation 0.010)"),
        (few, "only 1 example:"),
        (few, "25% of the rollouts were cut off"),
    ):
        assert any(words in line for line in check_report.advice_of(report))
    assert [line.split(":")[0] for line in check_report.advice_of(groups(*[[0.0, 1.0]] * 12))] == ["good"]


def test_a_script_measures_no_difficulty_and_warns_where_nonsense_earns() -> None:
    [line] = check_report.advice_of(report_of([scored(0, 0, 0.0), scored(0, 1, 0.1)], is_baseline=False))
    assert line.startswith("no baseline was measured")
    first, _ = check_report.advice_of(report_of([scored(0, 0, 0.9), scored(0, 1, 1.0)], is_baseline=False))
    assert "earned 0.95: a reward that anything earns teaches nothing" in first
