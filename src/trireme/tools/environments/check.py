"""One environment, loaded in real workers and tried: from its configuration to a report.

Who answers the environment's questions is a `CheckPolicy`: a script (`check_script`), an engine of ours
(`check_engine`), or somebody's chat endpoint (`check_endpoint`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import TriremeError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import EnvironmentSource
from trireme.orchestrator.environments.wire import Split
from trireme.tools.environments.check_progress import CheckProgress
from trireme.tools.environments.check_report import CheckReport, Loaded, build_report
from trireme.tools.environments.check_rollouts import Attempt, CheckPolicy, Extent, extent_of, run_check

LOAD_TIMEOUT_S = 600.0

OpenPolicy = Callable[[], AbstractAsyncContextManager[CheckPolicy]]


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
    check: Check, open_policy: OpenPolicy, *, waits: Waits, progress: CheckProgress
) -> tuple[CheckReport, list[Attempt]]:
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
            with progress.rollouts(extent.num_rollouts, limit_s=check.environment.rollout_timeout_s) as told:
                attempts = await run_check(environment, policy, extent, on_attempt=told)
            report = build_report(
                _facts(check, environment, load_s),
                attempts,
                extent,
                policy=policy.name,
                is_baseline=policy.is_policy,
                seconds=time.monotonic() - began,
                num_restarts=environment.num_restarts,
                success_at=check.success_at,
            )
    return report, attempts


@asynccontextmanager
async def _loaded(check: Check, waits: Waits, progress: CheckProgress) -> AsyncIterator[Environment]:
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
    extent = extent_of(
        environment,
        split=check.split,
        num_examples=check.num_examples,
        rollouts_per_example=check.rollouts_per_example,
    )
    if extent is None:
        raise LoadFailed(
            f"Environment {check.source.id!r} has no examples, neither to train on nor held out - expected at least "
            f"one - check what its `load_environment(**{check.environment.args!r})` makes its data set of."
        )
    return extent


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
