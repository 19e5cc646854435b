"""One environment, loaded in real workers and tried: from its configuration to a report.

Who answers the environment's questions is a `RolloutPolicy`: a script (`policy_script`), an engine of ours
(`policy_engine`), or somebody's chat endpoint (`policy_endpoint`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import EnvironmentSource
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.rollout.driver import Extent, Outcome, RolloutSpec, read_extent, run_rollouts
from trireme.orchestrator.rollout.runner import Finished
from trireme.tools.environments.check_report import CheckReport, Loaded, build_report
from trireme.tools.environments.policy import OpenPolicy
from trireme.tools.environments.progress import Progress

LOAD_TIMEOUT_S = 600.0


class LoadFailed(TriremeError):
    """The environment could not be loaded: that is what the check found."""


@dataclass(frozen=True)
class Check:
    """What is to be checked, and how much of it."""

    source: EnvironmentSource
    environment: EnvironmentConfig
    logs: Path
    split: Split = "train"
    num_examples: int = 20
    rollouts_per_example: int = 8
    success_at: float | None = None
    seed: int = 0
    install_s: float | None = None  # None where it was installed before
    cache: Path | None = None


async def check_environment(
    check: Check, open_policy: OpenPolicy, *, waits: Waits, progress: Progress
) -> tuple[CheckReport, list[Outcome]]:
    """First the environment, then the policy: what fails in a second must not cost the start of an engine.

    Raises:
        LoadFailed: it could not be loaded, or has no examples.
        TriremeError: the policy is gone, or refuses every question.
    """
    began = time.monotonic()
    async with _loaded(check, waits, progress) as environment:
        load_s = time.monotonic() - began
        extent = _extent(check, environment)
        async with open_policy() as policy:
            began = time.monotonic()
            with progress.rewards(extent.num_rollouts, limit_s=check.environment.rollout_timeout_s) as told:

                async def roll_out(spec: RolloutSpec) -> Finished:
                    return await policy.rollout(environment, spec)

                async def tell(outcome: Outcome) -> None:
                    told(outcome.reward)

                specs, together = extent.specs("check"), environment.group_rewards
                outcomes = await run_rollouts(specs, roll_out, tell, scored_together=together)
            report = build_report(
                _facts(check, environment, load_s),
                outcomes,
                extent,
                policy=policy.name,
                is_baseline=policy.is_policy,
                seconds=time.monotonic() - began,
                num_restarts=environment.num_restarts,
                success_at=check.success_at,
            )
    return report, outcomes


@asynccontextmanager
async def _loaded(check: Check, waits: Waits, progress: Progress) -> AsyncIterator[Environment]:
    opening = open_environment(
        check.environment,
        logs=check.logs,
        cache=check.cache,
        seed=check.seed,
        load_timeout_s=LOAD_TIMEOUT_S,
        waits=waits,
    )
    async with AsyncExitStack() as stack:
        with progress.stage(f"loading {check.source.id}", limit_s=LOAD_TIMEOUT_S):
            try:
                environment = await stack.enter_async_context(opening)
            except TriremeError as error:
                raise LoadFailed(str(error)) from error
        yield environment


def _extent(check: Check, environment: Environment) -> Extent:
    environment.check_group_size(check.rollouts_per_example)
    try:
        return read_extent(
            environment,
            split=check.split,
            num_examples=check.num_examples,
            rollouts_per_example=check.rollouts_per_example,
            is_spread=True,
        )
    except ConfigError as error:
        raise LoadFailed(str(error)) from error


def _facts(check: Check, environment: Environment, load_s: float) -> Loaded:
    return Loaded(
        id=check.source.id,
        kind=check.source.kind,
        where=_where(check.source),
        install_s=check.install_s,
        load_s=load_s,
        num_workers=check.environment.num_workers,
        num_train=environment.num_train,
        num_eval=environment.num_eval,
        versions=environment.versions,
    )


def _where(source: EnvironmentSource) -> str:
    """From here, where it is below."""
    place = Path(source.folder or source.module)
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
