"""One search from start to end: load the environment, open the models, read the first prompt, search, test."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.folder import hold_folder, move_aside
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.venv import EnvironmentSource
from trireme.tools.environments.catalog import build_if_missing, find_source
from trireme.tools.environments.check import open_as_stage
from trireme.tools.environments.policy import EnginePolicy, PolicyWanted, RolloutPolicy, build_opener
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.endpoints import find_endpoint, find_key
from trireme.tools.gepa.config import REFLECTION_ENGINE, GepaConfig
from trireme.tools.gepa.prompts import own_prompt
from trireme.tools.gepa.records import Drawn, Records, draw_examples
from trireme.tools.gepa.reflection import check_answers, has_column
from trireme.tools.gepa.results import (
    FILES,
    LOG,
    METADATA,
    check_same,
    describe,
    read_metadata,
    write_candidates,
    write_metadata,
)
from trireme.tools.gepa.search import Search, iteration_cost, reserve

MOST_EXAMPLES = 1 << 16  # of an environment, which may have endless ones
NUM_FIRST_QUESTIONS = 8  # examples whose first question is read for the environment's own prompt
SHOW_EVERY_S = 10.0
LEAVE_S = 5.0  # for the processes of a search that was killed


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
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_folder(paths, leave_s=LEAVE_S))
        except ConfigError as error:
            raise ConfigError(
                f"another search is at work in {folder} - expected one at a time. Wait for it, stop it, or give this "
                "one a folder of its own with `--output FOLDER`."
            ) from error
        if config.fresh and (folder / METADATA).exists():
            progress.show(f"an earlier search was in {folder}: moved to {move_aside(paths, FILES)}")
        earlier = read_metadata(folder) or {}
        summary: dict[str, Any] = earlier.get("summary", {})
        if summary.get("state") == "finished" and earlier["max_calls"] == config.max_calls:
            more = "it was finished before: a larger `--max-calls` resumes it, `--fresh` starts a new one"
            return f"{describe(summary, folder, config)}\n{more}"
        build_if_missing(source, progress)
        optimization = Optimization(config, source, folder, open_models, waits, progress)
        try:
            summary = asyncio.run(optimization.run())
        except KeyboardInterrupt:
            progress.show(f"stopped. What was found is in {folder}; the same command resumes the search")
            raise
    return describe(summary, folder, config)


@dataclass
class Optimization:
    """A search in its folder."""

    config: GepaConfig
    source: EnvironmentSource
    folder: Path
    open_models: OpenModels
    waits: Waits
    progress: Progress

    async def run(self) -> dict[str, Any]:
        """Run the search and return its summary, as it is in `metadata.json`.

        Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone.
        """
        config = self.config
        environment_config = EnvironmentConfig(
            id=str(self.source.folder) if self.source.folder is not None else self.source.id,
            name=config.env_id,
            args=config.env_args,
            num_workers=config.num_workers,
            max_concurrent=config.max_concurrent,
            rollout_timeout_s=config.rollout_timeout_s,
            max_turns=config.max_turns,
        )
        async with open_as_stage(
            environment_config,
            self.source.id,
            logs=self.folder / "logs",
            root=config.environments,
            seed=config.seed,
            waits=self.waits,
            progress=self.progress,
        ) as environment:
            first, drawn, facts = await self._begin(environment)
            records = self._open_records()
            async with self.open_models() as models:
                if not models.are_new:
                    await check_answers(models.policy, flag="--model")
                    await check_answers(models.teacher, flag="--reflection-model")
                return await self._search(environment, models, records, first, drawn, facts)

    async def _begin(self, environment: Environment) -> tuple[str, Drawn, dict[str, Any]]:
        """Return the first prompt, the examples, and facts of the environment that a resumed search must find again.

        Raises: ConfigError where they do not fit the data, the budget, or the search in the folder.
        """
        config = self.config
        if environment.group_rewards:
            raise ConfigError(
                f"The rewards of environment {environment.name!r} compare the rollouts of a group - expected rewards "
                "that score one rollout by itself, as prompts are compared by the rewards of single rollouts."
            )
        num_train = min(environment.num_train, MOST_EXAMPLES)
        drawn = draw_examples(config, num_train=num_train, num_eval=environment.num_eval)
        if config.minibatch_size > len(drawn.train):
            raise ConfigError(
                f"--minibatch-size {config.minibatch_size} is more than the {len(drawn.train)} examples to reflect on "
                "- expected at most as many. Lower it, or raise `--num-train`."
            )
        cost = iteration_cost(config, drawn)
        if config.max_calls < (least := len(drawn.validation) + cost + reserve(config)):
            raise ConfigError(
                f"--max-calls {config.max_calls} is too few for a single new prompt: {len(drawn.validation)} to score "
                f"the first one, {cost} for the new one and {reserve(config)} for the test at the end - expected "
                f"{least} or more. Raise it, or lower `--num-val`."
            )
        if config.initial_prompt is None:
            first = await own_prompt(environment, (*drawn.train, *drawn.validation)[:NUM_FIRST_QUESTIONS])
        else:
            try:
                first = config.initial_prompt.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"--initial-prompt {config.initial_prompt} cannot be read ({error}) - expected a text file with "
                    "the prompt to begin with. Correct the path, or leave it out to begin with the environment's own."
                ) from error
        facts = {"num_train": environment.num_train, "num_eval": environment.num_eval, "first_prompt": first}
        check_same(self.folder, config, facts)
        return first, drawn, facts | {"versions": environment.versions}

    def _open_records(self) -> Records:
        """Raises: ConfigError where an earlier search spent more than the budget."""
        records = Records(self.folder)
        if len(records.rollouts) > self.config.max_calls:
            raise ConfigError(
                f"--max-calls {self.config.max_calls}: {len(records.rollouts)} rollouts were made already by the "
                f"search in {self.folder} - expected at least as many, to resume it. Raise it, or start a new search "
                "with `--fresh`."
            )
        summary = (read_metadata(self.folder) or {}).get("summary", {})
        if summary.get("state") == "finished" and (num := summary["num_unusable_in_a_row"]):
            records.forget(list(records.reflections.values())[-num:])  # asked again, as the budget is larger now
        if records.rollouts:
            self.progress.show(f"resuming: {len(records.rollouts)} rollouts are in {self.folder} already")
        return records

    async def _search(
        self,
        environment: Environment,
        models: Models,
        records: Records,
        first: str,
        drawn: Drawn,
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        began = shown_at = time.monotonic()

        def show(words: str) -> None:
            nonlocal shown_at
            shown_at = time.monotonic()
            self.progress.show(f"[{search.calls.total()}/{self.config.max_calls}] {words}")

        async def show_what_is_waited_for() -> None:
            while True:
                await asyncio.sleep(max(0.1, shown_at + SHOW_EVERY_S - time.monotonic()))
                if time.monotonic() - shown_at >= SHOW_EVERY_S:
                    waits = self.waits.now()
                    more = f", and {len(waits) - 1} like it" if len(waits) > 1 else ""
                    show(f"{waits[0]}{more}" if waits else "rollouts under way")

        def keep(state: str, held_out: dict[str, Any] | None = None) -> dict[str, Any]:
            """Write what was found so far."""
            write_candidates(self.folder, self.config, search.candidates, search.best, drawn)
            summary = search.summary(state, held_out) | {"seconds": round(time.monotonic() - began, 1)}
            summary |= {"policy": models.policy.name, "teacher": models.teacher.name}
            write_metadata(self.folder, self.config, facts, summary)
            return summary

        def on_candidate() -> None:
            keep("under way")
            scored = [line for line in records.rollouts.values() if line.error is None]
            for name in self.config.state_columns if scored and len(search.candidates) == 1 else ():
                if not any(has_column(line, name) for line in scored):
                    keys = ", ".join(next((line.state_keys for line in scored if line.state_keys), []))
                    self.progress.show(
                        f"--state-columns {name}: no rollout had one. The environment's state has: {keys}"
                    )

        search = Search(
            self.config,
            drawn,
            environment,
            models.policy,
            models.teacher,
            records,
            log=self.folder / LOG,
            show=show,
            on_candidate=on_candidate,
        )
        write_metadata(self.folder, self.config, facts, {"state": "under way"})
        telling = asyncio.create_task(show_what_is_waited_for())
        try:
            await search.run(first)
            held_out = await search.measure_held_out() if drawn.test else None
        except BaseException:
            if search.candidates:
                keep("stopped")
            raise
        finally:
            telling.cancel()
        return keep("finished", held_out)


@dataclass(frozen=True)
class Models:
    """The policy, which makes rollouts, and the teacher, which rewrites prompts."""

    policy: RolloutPolicy
    teacher: RolloutPolicy
    are_new: bool = False  # an engine was just started for them; a first question would show nothing


OpenModels = Callable[[], AbstractAsyncContextManager[Models]]


def places_of(config: GepaConfig) -> tuple[PolicyWanted, PolicyWanted]:
    """Return the places of the model and of the reflection model.

    Raises: ConfigError where no place is known for one, or the variable of its key is not set.
    """
    policy = _place(config.model, config.base_url, config.api_key_var, "--api-key-var", config.endpoints)
    if config.reflection_model is None and config.reflection_base_url is None:
        return policy, policy
    model = config.reflection_model or config.model
    variable = config.reflection_api_key_var or config.api_key_var
    url = config.reflection_base_url
    if url is None and config.base_url is not None and not Path(model).is_dir():
        url = config.base_url
    return policy, _place(model, url, variable, "--reflection-api-key-var", config.endpoints)


def _place(model: str, url: str | None, variable: str | None, flag: str, endpoints: Path | None) -> PolicyWanted:
    if url is None and Path(model).is_dir():
        return PolicyWanted(model)
    endpoint = find_endpoint(model, base_url=url, path=endpoints)
    key = find_key(flag, variable, url=url, otherwise=endpoint.key)
    return PolicyWanted(endpoint.model or model, endpoint.url, key)


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
    async def opened() -> AsyncIterator[Models]:
        async with open_policy() as first:
            if open_teacher is None:
                assert isinstance(first, EnginePolicy), first
                yield Models(first, replace(first, sampling=config.reflection_sampling), are_new=True)
            else:
                async with open_teacher() as second:
                    yield Models(first, second)

    return opened
