"""One search from start to end: load the environment, open the models, read the first prompt, search."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.folder import hold_folder
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.venv import find_environment
from trireme.tools import progress
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.files import Example, check_same, describe
from trireme.tools.gepa.search import Search, iteration_cost
from trireme.tools.policies.engine import EnginePolicy
from trireme.tools.policies.environments import install_missing, open_environments
from trireme.tools.policies.prompts import own_prompt, read_prompt
from trireme.tools.policies.selection import OpenPolicy, PolicyWanted, RolloutPolicy, build_opener, find_policy

MOST_EXAMPLES = 1 << 16  # limit on the examples to draw from, as an environment may have endless ones
NUM_FIRST_QUESTIONS = 8  # examples whose first question is read for the environment's own prompt


def run_search(config: GepaConfig) -> str:
    """Search, or resume a search, and return its summary in words.

    Raises: ConfigError for what was typed; TriremeError if a model or the environment is gone.
    """
    source = find_environment(config.env_id, root=config.environments)

    # Results lie in the environment's folder if it has one. A relative path keeps printed commands short.
    folder = config.output or Path("outputs") / "gepa" / re.sub(r"[^\w.-]+", "_", Path(config.env_id).stem)
    if config.output is None and source.folder is not None:
        folder, here = source.folder / "outputs" / "gepa", Path.cwd()
        folder = folder.relative_to(here) if folder.is_relative_to(here) else folder

    # Everything that can be refused is refused before a process starts.
    paths = RunPaths(folder)
    if paths.holds_run:
        raise ConfigError(f"{folder} is a run's folder - expected one for prompts alone. Give another `--output`.")
    check_same(folder, config)
    waits = Waits("the search", paths.logs)
    open_policy, open_teacher = build_models(config, folder, waits)

    environment_config = EnvironmentConfig(
        id=str(source.folder or source.id),
        name=config.env_id,
        args=config.env_args,
        num_workers=config.num_workers,
        max_concurrent=config.max_concurrent,
        rollout_timeout_s=config.rollout_timeout_s,
        max_turns=config.max_turns,
    )

    # One search at a time may write to the folder.
    with hold_folder(paths):
        install_missing([environment_config])
        try:
            with open_loop() as (runner, stack):
                loading = open_environments([environment_config], paths.logs, waits, seed=config.seed)
                [environment] = runner.run(stack.enter_async_context(loading))
                num_train = min(environment.num_train, MOST_EXAMPLES)
                train, validation = draw_examples(config, num_train=num_train, num_eval=environment.num_eval)
                _check_fits(config, environment, train, validation)

                # Results of a search that began with another prompt must not be mixed with these.
                if config.initial_prompt is not None:
                    first = read_prompt(config.initial_prompt, flag="--initial-prompt").strip()
                else:
                    first = runner.run(own_prompt(environment, [*train, *validation][:NUM_FIRST_QUESTIONS]))
                check_same(folder, config, first)

                # The models open last, as that may start an engine.
                policy = runner.run(stack.enter_async_context(open_policy()))
                if open_teacher is not None:
                    teacher: RolloutPolicy = runner.run(stack.enter_async_context(open_teacher()))
                else:
                    assert isinstance(policy, EnginePolicy), policy
                    teacher = replace(policy, sampling=config.reflection_sampling)
                summary = Search(
                    config=config,
                    folder=folder,
                    runner=runner,
                    environment=environment,
                    policy=policy,
                    teacher=teacher,
                    train=train,
                    validation=validation,
                    first_prompt=first,
                    waits=waits,
                ).run()
        except KeyboardInterrupt:
            progress.show(f"stopped. What was found is in {folder}; the same command resumes the search")
            raise
    return describe(summary, folder, config)


@contextmanager
def open_loop() -> Iterator[tuple[asyncio.Runner, AsyncExitStack]]:
    """Yield an event loop that runs on demand, and a stack for what is open in it until the end.

    The library is synchronous: the loop runs while the library waits for rollouts or a reflection.
    """
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner, stack
        finally:
            runner.run(stack.aclose())


def draw_examples(config: GepaConfig, *, num_train: int, num_eval: int) -> tuple[list[Example], list[Example]]:
    """Draw the examples to reflect on and those to choose by from all over the data, by the seed. None is in both.

    An environment with only one split gives a third of it, at most, to choose by.

    Args:
        num_train: size of the environment's training split.
        num_eval: size of its evaluation split, 0 if it has none.
    """
    rng = random.Random(config.seed)
    training: list[Example] = [("train", index) for index in range(num_train)]
    held_out: list[Example] = [("eval", index) for index in range(num_eval)]
    rng.shuffle(training)
    rng.shuffle(held_out)

    # A single split is divided, so that no prompt is chosen by examples that it was improved on.
    if not (training and held_out):
        both = training + held_out
        num_val = min(config.num_val, len(both) // 3)
        training, held_out = both[num_val:], both[:num_val]
    return training[: config.num_train], held_out[: config.num_val]


def _check_fits(config: GepaConfig, environment: Environment, train: list[Example], validation: list[Example]) -> None:
    """Raises: ConfigError if the settings do not fit the environment, its data or the budget."""
    if environment.group_rewards:
        raise ConfigError(
            f"The rewards of environment {environment.name!r} compare the rollouts of a group - expected rewards that "
            "score one rollout by itself, as prompts are compared by the rewards of single rollouts."
        )
    if config.minibatch_size > len(train) or not validation:
        raise ConfigError(
            f"environment {environment.name!r} has {environment.num_train} examples to train on and "
            f"{environment.num_eval} held out: {len(train)} to reflect on and {len(validation)} to choose by - "
            f"expected at least {config.minibatch_size} (`minibatch_size`) and 1. Lower `--minibatch-size`, raise "
            "`--num-train`, or add examples."
        )
    cost = iteration_cost(config, validation)
    if config.max_calls < (least := len(validation) + cost):
        raise ConfigError(
            f"--max-calls {config.max_calls} is too few for a single new prompt: {len(validation)} to score the first "
            f"one and {cost} for the new one - expected {least} or more. Raise it, or lower `--num-val`."
        )


def places_of(config: GepaConfig) -> tuple[PolicyWanted, PolicyWanted]:
    """Return the places of the model and of the reflection model.

    Raises: ConfigError if no place is known for one, or the variable of its key is not set.
    """
    policy = find_policy(config.model, config.base_url, config.api_key_var, endpoints=config.endpoints)
    model = config.reflection_model
    if model is None:
        return policy, policy

    # `--base-url` is the address of both models, unless an engine is started for the second one.
    if config.base_url is not None and not Path(model).is_dir():
        return policy, find_policy(model, config.base_url, config.api_key_var)
    return policy, find_policy(model, None, None, endpoints=config.endpoints)


def build_models(config: GepaConfig, folder: Path, waits: Waits) -> tuple[OpenPolicy, OpenPolicy | None]:
    """Return functions that open the policy, which makes rollouts, and the teacher, which rewrites prompts.

    The second one is None if they are the same model and an engine is started for it: that serves both.

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

    # An engine takes the whole machine, so at most one model can be started here.
    policy, teacher = places_of(config)
    is_shared = policy == teacher and policy.base_url is None
    if policy.base_url is teacher.base_url is None and not is_shared:
        raise ConfigError(
            f"--model {policy.model} and --reflection-model {teacher.model} are both folders - expected one engine to "
            "be started, which takes the whole machine. Start the other one with `inference`, and give it an entry in "
            "configs/endpoints.py."
        )

    open_policy = build_opener(policy, run, waits)
    reflecting = updated(run, {"orchestrator.sampling": config.reflection_sampling})
    open_teacher = build_opener(teacher, reflecting, waits)  # checks its sampling, also if it is not opened
    return open_policy, None if is_shared else open_teacher
