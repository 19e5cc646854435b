"""Rolling out N examples x G: retries, groups that are scored together, what is resumed, and what ends everything."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from trireme.base.errors import ConfigError
from trireme.journal.records import Rollout
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome, missing_specs, run_rollouts
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed

SPECS = Extent("eval", (0, 1), 3).specs("eval-say")
Events = list[tuple[str, str, int]]


def roll_out_all(
    fails: Callable[[RolloutSpec], Exception | None], *, max_concurrent: int = 3, **how: Any
) -> tuple[list[RolloutOutcome], Events]:
    """Return the outcomes, and what happened: a try or a reported outcome, its rollout, and how many were running."""
    events: Events = []
    running: set[RolloutSpec] = set()

    async def roll_out(spec: RolloutSpec) -> Rollout:
        running.add(spec)
        events.append(("try", spec.name, len(running)))
        try:
            await asyncio.sleep(0.001)
            if (error := fails(spec)) is not None:
                raise error
        finally:
            running.remove(spec)
        return Rollout(env="toy", example=spec.example, temperature=1.0, reward=1.0, num_turns=1)

    async def report(outcome: RolloutOutcome) -> None:
        await asyncio.sleep(0.001)
        events.append(("report", outcome.spec.name, len(running)))

    outcomes = asyncio.run(run_rollouts(SPECS, roll_out, report, max_concurrent=max_concurrent, **how))
    assert not running
    return outcomes, events


@pytest.mark.parametrize(
    ("scored_together", "error", "words", "failed"),
    [
        (True, RolloutFailed("score", "no number"), "score: no number", [3, 4, 5]),
        (False, ValueError("ours"), "rollout: ValueError: ours", [5]),
    ],
)
def test_failed_rollout_is_retried_up_to_max_attempts(scored_together, error, words, failed):
    def fails(spec: RolloutSpec) -> Exception | None:
        return error if spec.example == 1 and (spec.attempt == 0 or spec.rollout == 2) else None

    outcomes, events = roll_out_all(fails, scored_together=scored_together, max_attempts=3)
    assert [outcome.spec for outcome in outcomes] == SPECS
    assert [outcome.reward for outcome in outcomes] == [None if at in failed else 1.0 for at in range(6)]
    assert [index for index, outcome in enumerate(outcomes) if outcome.failure is not None] == failed
    assert str(outcomes[5].failure) == words
    tried, reported = ([name for kind, name, _ in events if kind == which] for which in ("try", "report"))
    assert [tried.count(spec.name) for spec in SPECS] == [1, 1, 1, 2, 2, 3]
    assert sorted(reported) == [spec.name for spec in SPECS]
    assert max(num_running for *_, num_running in events) == 3


def test_a_failure_that_is_final_is_not_retried():
    final = RolloutFailed("rollout", "refused", is_final=True)
    outcomes, events = roll_out_all(lambda _: final, scored_together=False, max_attempts=3)
    assert [outcome.failure for outcome in outcomes] == [final] * len(SPECS)
    assert len([event for event in events if event[0] == "try"]) == len(SPECS)


def test_a_rollout_keeps_its_slot_until_its_outcome_is_kept():
    """So a full disk, for which `on_outcome` waits, also stops rollouts whose results could not be kept."""
    _, events = roll_out_all(lambda _: None, scored_together=False, max_concurrent=1)
    assert [event[:2] for event in events] == [(what, spec.name) for spec in SPECS for what in ("try", "report")]


@pytest.mark.parametrize(("scored_together", "missing"), [(True, SPECS[:3]), (False, SPECS[1:2])])
def test_answered_rollouts_are_not_repeated_unless_scored_as_a_group(scored_together, missing):
    answered = {spec.key for spec in SPECS} - {(0, 1)}
    assert missing_specs(SPECS, answered, scored_together=scored_together) == missing


@pytest.mark.parametrize("scored_together", [True, False])
def test_an_error_that_every_rollout_would_meet_ends_all_of_them(scored_together):
    def fails(spec: RolloutSpec) -> Exception:
        return ConfigError("the key is wrong") if spec.example == 0 else RolloutFailed("score", "no")

    with pytest.raises(ConfigError, match="the key is wrong"):
        roll_out_all(fails, scored_together=scored_together, max_attempts=3)
