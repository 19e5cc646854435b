"""Rolling out N examples x G: retries, groups that are scored together, what is resumed, and what ends everything."""

import asyncio
from collections.abc import Callable

import pytest

from trireme.base.errors import ConfigError
from trireme.journal.records import Rollout
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome, missing_specs, run_rollouts
from trireme.orchestrator.rollout.runner import RolloutSpec

SPECS = Extent("eval", (0, 1), 3).specs("eval-say")


def roll_out_all(
    specs: list[RolloutSpec],
    fails: Callable[[RolloutSpec], Exception | None] = lambda spec: None,
    *,
    scored_together: bool = False,
    max_attempts: int = 3,
    max_concurrent: int = 3,
) -> tuple[list[RolloutOutcome], list[RolloutOutcome], list[RolloutSpec], int]:
    told, tried, running, most = [], [], 0, 0

    async def roll_out(spec: RolloutSpec) -> Rollout:
        nonlocal running, most
        tried.append(spec)
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0.001)
            if (error := fails(spec)) is not None:
                raise error
        finally:
            running -= 1
        return Rollout(env="toy", example=spec.example, temperature=1.0, reward=1.0, num_turns=1)

    async def tell(outcome: RolloutOutcome) -> None:
        told.append(outcome)

    how = {"scored_together": scored_together, "max_attempts": max_attempts, "max_concurrent": max_concurrent}
    outcomes = asyncio.run(run_rollouts(specs, roll_out, tell, **how))  # type: ignore[arg-type]
    assert running == 0
    return outcomes, told, tried, most


@pytest.mark.parametrize("scored_together", [True, False])
@pytest.mark.parametrize("error", [RolloutFailed("score", "no number"), ValueError("ours")])
def test_a_failed_rollout_is_retried_under_the_same_name_and_each_outcome_is_told_once_in_order(scored_together, error):
    outcomes, told, tried, most = roll_out_all(
        SPECS, lambda spec: error if spec.example == 1 and spec.attempt == 0 else None, scored_together=scored_together
    )
    assert [outcome.spec for outcome in outcomes] == SPECS
    assert {outcome.spec for outcome in told} == set(SPECS)
    assert len(told) == len(SPECS)
    assert [outcome.reward for outcome in outcomes] == [1.0] * 6
    assert sorted((spec.name, spec.attempt) for spec in tried if spec.example == 1) == [
        (f"eval-say-1-{rollout}", attempt) for rollout in range(3) for attempt in range(2)
    ]
    assert most == 3


def test_a_rollout_keeps_its_slot_until_its_outcome_is_kept():
    """So a full disk, for which `on_outcome` waits, also stops rollouts whose results could not be kept."""
    events: list[tuple[str, str]] = []

    async def roll_out(spec: RolloutSpec) -> Rollout:
        events.append(("rollout", spec.name))
        return Rollout(env="toy", example=spec.example, temperature=1.0, reward=1.0, num_turns=1)

    async def keep(outcome: RolloutOutcome) -> None:
        await asyncio.sleep(0.001)
        events.append(("kept", outcome.spec.name))

    asyncio.run(run_rollouts(SPECS, roll_out, keep, scored_together=False, max_concurrent=1))
    assert events == [(what, spec.name) for spec in SPECS for what in ("rollout", "kept")]


@pytest.mark.parametrize(("scored_together", "failed"), [(True, [3, 4, 5]), (False, [5])])
def test_a_rollout_that_fails_for_good_costs_one_outcome_or_its_group(scored_together, failed):
    last = SPECS[5].name
    outcomes, told, _, _ = roll_out_all(
        SPECS, lambda spec: RolloutFailed("score", "no number") if spec.name == last else None,
        scored_together=scored_together,
    )  # fmt: skip
    assert [index for index, outcome in enumerate(outcomes) if outcome.failure is not None] == failed
    assert str(outcomes[5].failure) == "score: no number"
    assert sorted(told, key=lambda outcome: outcome.spec.name) == outcomes


@pytest.mark.parametrize(("scored_together", "missing"), [(True, [0, 1, 2]), (False, [1])])
def test_what_has_a_result_is_not_made_again_unless_it_is_scored_with_one_that_is_missing(scored_together, missing):
    answered = {spec.key for spec in SPECS} - {(0, 1)}
    assert missing_specs(SPECS, answered, scored_together=scored_together) == [SPECS[index] for index in missing]
    assert missing_specs(SPECS, answered | {(0, 1)}, scored_together=scored_together) == []


@pytest.mark.parametrize("scored_together", [True, False])
def test_an_error_that_every_rollout_would_meet_ends_all_of_them(scored_together):
    with pytest.raises(ConfigError, match="the key is wrong"):
        roll_out_all(
            SPECS, lambda spec: ConfigError("the key is wrong") if spec.example == 0 else RolloutFailed("score", "no"),
            scored_together=scored_together,
        )  # fmt: skip
