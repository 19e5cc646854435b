"""`trireme env check`: load one environment in real workers, roll it out, and report what happened.

A script, an engine of ours or a chat endpoint answers the environment's questions (`policy`).
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.folder import hold_folder
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.venv import EnvironmentSource, find_environment
from trireme.orchestrator.environments.worker_process import LOAD_TIMEOUT_S
from trireme.orchestrator.evaluation.results import EvalResult, write_eval_results
from trireme.orchestrator.rollout.driver import Extent, RolloutOutcome, read_extent, run_rollouts
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Reply, RunTask, Split
from trireme.tools import progress
from trireme.tools.environments.catalog import ROOT
from trireme.tools.environments.check_report import CheckReport, Loaded, Trouble, build_report
from trireme.tools.environments.sessions import SessionWatch
from trireme.tools.policies.endpoint_file import find_key
from trireme.tools.policies.environments import install_missing, open_environments
from trireme.tools.policies.script import ScriptedPolicy
from trireme.tools.policies.selection import OpenPolicy, PolicyWanted, build_opener

MAX_CONCURRENT = 32
ROLLOUTS = "rollouts.jsonl"


class LoadFailed(TriremeError):
    """The environment could not be loaded: that is what the check found."""


@dataclass(frozen=True)
class CheckOptions:
    """The environment, the number of rollouts, and the policy."""

    name: str  # id, folder or file of the environment, or its name in the configuration
    args: dict[str, Any] | None = None
    num_examples: int = 20
    rollouts_per_example: int = 8
    split: Split = "train"
    model: str | None = None
    base_url: str | None = None
    api_key_var: str | None = None
    scripted: bool = False
    path: Path = ROOT
    output: Path | None = None


def run_check(options: CheckOptions, config: RunConfig) -> CheckReport:
    """Check an environment, and write its rollouts and logs to a folder of their own.

    Args:
        config: the environment's `args`, sampling, lengths and the model are taken from it.

    Raises: LoadFailed; ConfigError for what was typed; TriremeError if the policy is gone.
    """
    entries = config.orchestrator.all_environments
    # a name in the configuration is more specific than an id, which several entries may share
    named = [entry for entry in entries if options.name == entry.resolved_name]
    named += [entry for entry in entries if options.name == entry.id]
    entry = named[0] if named else EnvironmentConfig(id=options.name)
    source = find_environment(entry.id, root=options.path)
    name = re.sub(r"[^\w.-]+", "_", entry.name or Path(source.module).stem)

    root = options.output or config.output_dir / "env-check" / (config.name or name)
    # files of the check must not be mixed with those of a run
    config = updated(config, {"output_dir": root, "name": None})
    if config.paths.holds_run:
        raise ConfigError(f"{root} is a run's folder - expected one for the check alone. Give another `--output`.")

    # all that can be refused is refused before anything is installed or started
    values: dict[str, Any] = {
        "id": str(source.folder or entry.id),
        "name": name,
        "args": entry.args | (options.args or {}),
        "max_concurrent": min(entry.max_concurrent, max(MAX_CONCURRENT, options.rollouts_per_example)),
    }
    environment, waits = updated(entry, values), Waits("the check", config.paths.logs)
    key = find_key("--api-key-var", options.api_key_var, url=options.base_url)
    wanted = PolicyWanted(options.model, options.base_url, key, options.scripted)
    open_policy = build_opener(wanted, config, waits)

    with hold_folder(config.paths):
        for file in (root / ROLLOUTS, *config.paths.logs.glob("*.stdout")):  # files of an earlier check
            file.unlink(missing_ok=True)
        install_missing([environment])
        report, outcomes = asyncio.run(_check(options, config, source, environment, open_policy, waits))
        write_eval_results(root / ROLLOUTS, map(EvalResult.of, outcomes))
    progress.show(f"every rollout: {root / ROLLOUTS}; logs: {config.paths.logs}")
    return report


async def _check(
    options: CheckOptions,
    config: RunConfig,
    source: EnvironmentSource,
    environment_config: EnvironmentConfig,
    open_policy: OpenPolicy,
    waits: Waits,
) -> tuple[CheckReport, list[RolloutOutcome]]:
    """Load the environment before the policy: an error of a second must not cost the start of an engine."""
    # an environment that does not load is what the check found, and not an error of the command
    loading = open_environments([environment_config], config.paths.logs, waits, seed=config.seed)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        try:
            [environment] = await stack.enter_async_context(loading)
        except TriremeError as error:
            raise LoadFailed(str(error)) from error

        place = Path(source.folder or source.module)
        loaded = Loaded(
            id=source.id,
            where=str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place),
            load_s=time.monotonic() - began,
            num_train=environment.num_train,
            num_eval=environment.num_eval,
            versions=environment.versions,
        )

        environment.check_group_size(options.rollouts_per_example)
        try:
            extent = read_extent(
                environment,
                split=options.split,
                num_examples=options.num_examples,
                rollouts_per_example=options.rollouts_per_example,
                is_spread=True,
            )
        except ConfigError as error:
            raise LoadFailed(str(error)) from error

        # tasks that bring solutions show whether the tests work, without any policy
        solved, unsound = await check_solutions(environment, extent)
        policy = await stack.enter_async_context(open_policy())
        if environment.offers is not None:
            url, name = environment.offers.gateway.url, environment.name
            progress.show(f'start your clients: POST {url}/sessions {{"env": "{name}"}}')

        began = time.monotonic()
        with progress.rewards(extent.num_rollouts, limit_s=environment_config.rollout_timeout_s) as add:

            async def show(outcome: RolloutOutcome) -> None:
                add(outcome.reward)

            # sessions are watched to see whether the tokens of an agent program are exact
            specs = extent.specs("check")
            watch = SessionWatch(environment)
            watched = cast(Environment, watch) if environment.uses_gateway else environment
            roll_out = partial(policy.rollout, watched)
            outcomes = await run_rollouts(specs, roll_out, show, scored_together=environment.group_rewards)

        report = build_report(
            loaded,
            outcomes,
            extent,
            policy=policy.name,
            is_baseline=not isinstance(policy, ScriptedPolicy),
            seconds=time.monotonic() - began,
            num_restarts=environment.num_restarts,
            sessions=watch.report(outcomes),
        )
    report = replace(report, components=solved | report.components, troubles=[*unsound, *report.troubles])
    return report, outcomes


async def check_solutions(environment: Environment, extent: Extent) -> tuple[dict[str, float], list[Trouble]]:
    """Score each task's own solution, and no solution at all.

    Returns: the mean that they earn, and the tasks whose tests cannot tell them apart.
    """
    if not environment.has_solutions:
        return {}, []

    async def refuse(question: Ask) -> Reply:
        return Reply(error="A task's own solution asked the policy.", error_kind="engine")

    async def solve(example: int, solve: Any) -> tuple[float, str]:
        task = RunTask(task=f"{solve}-{example}", split=extent.split, index=example, solve=solve)
        try:
            done = await environment.run(Session(task, refuse))
            return done.reward, f"task {done.example_id}"
        except RolloutFailed as failure:
            return 0.0, f"example {example} ({failure})"

    rewards: dict[str, list[float]] = {"oracle": [], "nothing": []}
    # "nothing" is no solution at all, which must earn nothing
    troubles = []
    for kind, earned in rewards.items():
        solution = "with their own solutions" if kind == "oracle" else "without a solution"
        with progress.stage(f"scoring {len(extent.examples)} tasks {solution}", limit_s=LOAD_TIMEOUT_S):
            results = await asyncio.gather(*(solve(example, kind) for example in extent.examples))
        for example, (reward, name) in zip(extent.examples, results, strict=True):
            earned.append(reward)
            if (reward > 0) != (kind == "oracle"):
                what = "its own solution" if kind == "oracle" else "no solution at all"
                troubles.append(Trouble(kind, f"{name}: {what} earned {reward:g}", 1, [example], ""))
    return {kind: fmean(earned) for kind, earned in rewards.items()}, troubles
