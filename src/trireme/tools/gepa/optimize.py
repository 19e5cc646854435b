"""One search from start to end: load the environment, open the models, read the first prompt, search, test."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.folder import move_aside
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.venv import EnvironmentSource
from trireme.tools.environments.catalog import build_if_missing, find_source
from trireme.tools.environments.check import open_as_stage
from trireme.tools.environments.output import hold_output
from trireme.tools.environments.policy import EnginePolicy, PolicyWanted, RolloutPolicy, build_opener, find_policy
from trireme.tools.environments.policy_endpoint import ChatEndpoint
from trireme.tools.environments.progress import Progress
from trireme.tools.gepa.config import REFLECTION_ENGINE, GepaConfig
from trireme.tools.gepa.prompts import own_prompt
from trireme.tools.gepa.records import REFLECTIONS, ROLLOUTS, Drawn, PromptRollout, Records, Reflection, draw_examples
from trireme.tools.gepa.reflection import check_answers
from trireme.tools.gepa.results import FILES, METADATA, check_same, describe, read_metadata
from trireme.tools.gepa.search import Search, iteration_cost

MOST_EXAMPLES = 1 << 16  # of an environment, which may have endless ones
NUM_FIRST_QUESTIONS = 8  # examples whose first question is read for the environment's own prompt

OpenModels = Callable[[], AbstractAsyncContextManager[tuple[RolloutPolicy, RolloutPolicy]]]
"""A function that opens the policy, which makes rollouts, and the teacher, which rewrites prompts."""


def run_search(config: GepaConfig) -> str:
    """Search, or show a finished search again, and return its summary in words.

    Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone.
    """
    source = find_source(config.env_id, config.environments)
    folder = config.output or Path("outputs") / "gepa" / re.sub(r"[^\w.-]+", "_", Path(config.env_id).stem)
    if config.output is None and source.folder is not None:
        folder, here = source.folder / "outputs" / "gepa", Path.cwd()
        folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
    paths = RunPaths(folder)
    if paths.holds_run:
        raise ConfigError(f"{folder} is a run's folder - expected one for prompts alone. Give another `--output`.")
    if not config.fresh:
        check_same(folder, config)
    progress, waits = Progress(), Waits("the search", paths.logs)
    open_models = build_models(config, folder, waits, progress)
    with hold_output(folder, flag="--output"):
        if config.fresh and (folder / METADATA).exists():
            progress.show(f"an earlier search was in {folder}: moved to {move_aside(paths, FILES)}")
        earlier = read_metadata(folder) or {}
        summary: dict[str, Any] = earlier.get("summary", {})
        if summary.get("state") == "finished" and earlier["max_calls"] == config.max_calls:
            more = "it was finished before: a larger `--max-calls` resumes it, `--fresh` starts a new one"
            return f"{describe(summary, folder, config)}\n{more}"
        build_if_missing(source, progress)
        try:
            summary = asyncio.run(_search(config, source, folder, open_models, waits, progress))
        except KeyboardInterrupt:
            progress.show(f"stopped. What was found is in {folder}; the same command resumes the search")
            raise
    return describe(summary, folder, config)


async def _search(
    config: GepaConfig,
    source: EnvironmentSource,
    folder: Path,
    open_models: OpenModels,
    waits: Waits,
    progress: Progress,
) -> dict[str, Any]:
    """Return the summary of the search, as it is in `metadata.json`.

    Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone.
    """
    environment_config = EnvironmentConfig(
        id=str(source.folder) if source.folder is not None else source.id,
        name=config.env_id,
        args=config.env_args,
        num_workers=config.num_workers,
        max_concurrent=config.max_concurrent,
        rollout_timeout_s=config.rollout_timeout_s,
        max_turns=config.max_turns,
    )
    async with open_as_stage(
        environment_config,
        source.id,
        logs=folder / "logs",
        root=config.environments,
        seed=config.seed,
        waits=waits,
        progress=progress,
    ) as environment:
        drawn = _draw(config, environment)
        first = await _first_prompt(config, environment, drawn)
        facts = {"num_train": environment.num_train, "num_eval": environment.num_eval, "first_prompt": first}
        check_same(folder, config, facts)
        rollouts, reflections = Records(folder / ROLLOUTS, PromptRollout), Records(folder / REFLECTIONS, Reflection)
        if len(rollouts.lines) > config.max_calls:
            raise ConfigError(
                f"--max-calls {config.max_calls}: {len(rollouts.lines)} rollouts were made already by the search in "
                f"{folder} - expected at least as many, to resume it. Raise it, or start a new search with `--fresh`."
            )
        summary = (read_metadata(folder) or {}).get("summary", {})
        if summary.get("state") == "finished":  # these are asked again, as the budget is larger now
            unusable = set(map(tuple, summary.get("unusable", ())))  # by key: the next start may have to do it again
            reflections.forget([line for key, line in reflections.lines.items() if key in unusable])
        if rollouts.lines:
            progress.show(f"resuming: {len(rollouts.lines)} rollouts are in {folder} already")
        async with open_models() as models:
            for flag, model in zip(("--model", "--reflection-model"), models, strict=True):
                if isinstance(model, ChatEndpoint):
                    await check_answers(model, flag=flag)
            policy, teacher = models
            search = Search(
                config=config,
                folder=folder,
                environment=environment,
                policy=policy,
                teacher=teacher,
                drawn=drawn,
                facts=facts | {"versions": environment.versions},
                rollouts=rollouts,
                reflections=reflections,
                progress=progress,
                waits=waits,
            )
            return await search.run()


def _draw(config: GepaConfig, environment: Environment) -> Drawn:
    """Draw the examples. Raises: ConfigError where the settings do not fit the environment, its data or the budget."""
    if environment.group_rewards:
        raise ConfigError(
            f"The rewards of environment {environment.name!r} compare the rollouts of a group - expected rewards that "
            "score one rollout by itself, as prompts are compared by the rewards of single rollouts."
        )
    num_train = min(environment.num_train, MOST_EXAMPLES)
    drawn = draw_examples(config, num_train=num_train, num_eval=environment.num_eval)
    if config.minibatch_size > len(drawn.train):
        raise ConfigError(
            f"--minibatch-size {config.minibatch_size} is more than the {len(drawn.train)} examples to reflect on - "
            "expected at most as many. Lower it, or raise `--num-train`."
        )
    cost, reserve = iteration_cost(config, drawn), 2 * config.num_test
    if config.max_calls < (least := len(drawn.validation) + cost + reserve):
        raise ConfigError(
            f"--max-calls {config.max_calls} is too few for a single new prompt: {len(drawn.validation)} to score the "
            f"first one, {cost} for the new one and {reserve} for the test at the end - expected {least} or more. "
            "Raise it, or lower `--num-val`."
        )
    return drawn


async def _first_prompt(config: GepaConfig, environment: Environment, drawn: Drawn) -> str:
    """Raises: ConfigError where the file cannot be read, or the environment has no single prompt of its own."""
    if config.initial_prompt is None:
        return await own_prompt(environment, (*drawn.train, *drawn.validation)[:NUM_FIRST_QUESTIONS])
    try:
        return config.initial_prompt.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--initial-prompt {config.initial_prompt} cannot be read ({error}) - expected a text file with the prompt "
            "to begin with. Correct the path, or leave it out to begin with the environment's own."
        ) from error


def places_of(config: GepaConfig) -> tuple[PolicyWanted, PolicyWanted]:
    """Return the places of the model and of the reflection model.

    Raises: ConfigError where no place is known for one, or the variable of its key is not set.
    """
    policy = find_policy(config.model, config.base_url, config.api_key_var, endpoints=config.endpoints)
    if config.reflection_model is None and config.reflection_base_url is None:
        return policy, policy
    model = config.reflection_model or config.model
    variable = config.reflection_api_key_var or config.api_key_var
    url = config.reflection_base_url
    if url is None and config.base_url is not None and not Path(model).is_dir():
        url = config.base_url
    return policy, find_policy(model, url, variable, flag="--reflection-api-key-var", endpoints=config.endpoints)


def build_models(config: GepaConfig, folder: Path, waits: Waits, progress: Progress) -> OpenModels:
    """Return a function that opens both models. One engine serves both where they are the same.

    Raises: ConfigError for all that can be refused before anything is started.
    """
    values: dict[str, Any] = {
        "output_dir": folder,
        "seed": config.seed,
        "device": config.device,
        "inference": config.inference,
        "orchestrator.sampling": config.sampling,
        "orchestrator.engine_timeout_s": config.request_timeout_s,
    }
    run = updated(RunConfig(), values | ({} if config.seq_len is None else {"seq_len": config.seq_len}))
    devices, (policy, teacher) = detect_devices(), places_of(config)
    is_shared = policy == teacher and policy.base_url is None
    if not is_shared and policy.base_url is teacher.base_url is None and devices.gpus and config.device != "cpu":
        raise ConfigError(
            f"--model {policy.model} and --reflection-model {teacher.model} are both folders, and there are GPUs here "
            "- expected one engine to be started, which takes them. Start the other one with `inference`, and give "
            "its address as `--reflection-base-url`."
        )
    open_policy = build_opener(policy, run, devices, waits, progress)
    reflecting = {"output_dir": folder / REFLECTION_ENGINE, "orchestrator.sampling": config.reflection_sampling}
    open_teacher = None if is_shared else build_opener(teacher, updated(run, reflecting), devices, waits, progress)

    @asynccontextmanager
    async def opened() -> AsyncIterator[tuple[RolloutPolicy, RolloutPolicy]]:
        async with open_policy() as policy:
            if open_teacher is None:
                assert isinstance(policy, EnginePolicy), policy
                yield policy, replace(policy, sampling=config.reflection_sampling)
            else:
                async with open_teacher() as teacher:
                    yield policy, teacher

    return opened
