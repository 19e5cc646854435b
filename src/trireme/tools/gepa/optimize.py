"""One search from start to end: load the environment, open the models, read the first prompt, search, test."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.launch.folder import hold_folder, move_aside
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import EnvironmentSource, installed_venv
from trireme.tools.environments.catalog import build, find_source
from trireme.tools.environments.progress import Progress
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.examples import PURPOSES, Drawn, draw_examples
from trireme.tools.gepa.feedback import has_column
from trireme.tools.gepa.models import Models, OpenModels, build_models
from trireme.tools.gepa.prompts import own_prompt
from trireme.tools.gepa.records import Records
from trireme.tools.gepa.reflection import check_answers
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

LOAD_TIMEOUT_S = 600.0
NUM_FIRST_QUESTIONS = 8  # examples whose first question is read for the environment's own prompt
SAY_EVERY_S = 10.0
LEAVE_S = 5.0  # for the processes of a search that was killed


def run_search(config: GepaConfig) -> str:
    """Search, or show a finished search again, and return its summary in words.

    Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone.
    """
    source = find_source(config.env_id, config.environments)
    folder = config.output or _default_folder(source, config.env_id)
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
            progress.say(f"an earlier search was in {folder}: moved to {move_aside(paths, FILES)}")
        earlier = read_metadata(folder) or {}
        summary: dict[str, Any] = earlier.get("summary", {})
        if summary.get("state") == "finished" and earlier["max_calls"] == config.max_calls:
            more = "it was finished before: a larger `--max-calls` resumes it, `--fresh` starts a new one"
            return f"{describe(summary, folder, config)}\n{more}"
        if source.folder is not None and installed_venv(source) is None:
            build(source, progress)
        optimization = Optimization(config, source, folder, open_models, waits, progress)
        try:
            summary = asyncio.run(optimization.run())
        except KeyboardInterrupt:
            progress.say(f"stopped. What was found is in {folder}; the same command resumes the search")
            raise
    return describe(summary, folder, config)


def _default_folder(source: EnvironmentSource, name: str) -> Path:
    if source.folder is None:
        return Path("outputs") / "gepa" / re.sub(r"[^\w.-]+", "_", Path(name).stem)
    folder, here = source.folder / "outputs" / "gepa", Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


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
        """Run the search and return its summary, as it stands in `metadata.json`.

        Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone.
        """
        opening = open_environment(
            EnvironmentConfig(
                id=str(self.source.folder) if self.source.folder is not None else self.source.id,
                name=self.config.env_id,
                args=self.config.env_args,
                num_workers=self.config.num_workers,
                max_concurrent=self.config.max_concurrent,
                rollout_timeout_s=self.config.rollout_timeout_s,
                max_turns=self.config.max_turns,
            ),
            logs=self.folder / "logs",
            root=self.config.environments,
            seed=self.config.seed,
            load_timeout_s=LOAD_TIMEOUT_S,
            waits=self.waits,
        )
        async with self.progress.opening(f"loading {self.source.id}", opening, limit_s=LOAD_TIMEOUT_S) as environment:
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
        drawn = draw_examples(config, num_train=environment.num_train, num_eval=environment.num_eval)
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
            self.progress.say(f"resuming: {len(records.rollouts)} rollouts are in {self.folder} already")
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
        began = said_at = time.monotonic()

        def say(words: str) -> None:
            nonlocal said_at
            said_at = time.monotonic()
            self.progress.say(f"[{search.calls.total()}/{self.config.max_calls}] {words}")

        async def say_what_is_waited_for() -> None:
            while True:
                await asyncio.sleep(max(0.1, said_at + SAY_EVERY_S - time.monotonic()))
                if time.monotonic() - said_at >= SAY_EVERY_S:
                    waits = self.waits.now()
                    more = f", and {len(waits) - 1} like it" if len(waits) > 1 else ""
                    say(f"{waits[0]}{more}" if waits else "rollouts under way")

        def keep(state: str, held_out: dict[str, Any] | None = None) -> dict[str, Any]:
            """Write what was found so far."""
            write_candidates(self.folder, self.config, search.candidates, search.best, drawn)
            more = {"seconds": round(time.monotonic() - began, 1), "policy": models.policy.name}
            summary = _summary(search, drawn, state, held_out) | more | {"teacher": models.teacher.name}
            write_metadata(self.folder, self.config, facts, summary)
            return summary

        def on_candidate() -> None:
            keep("under way")
            if len(search.candidates) == 1:
                self._check_columns(records)

        search = Search(
            self.config,
            drawn,
            environment,
            models.policy,
            models.teacher,
            records,
            log=self.folder / LOG,
            say=say,
            on_candidate=on_candidate,
        )
        write_metadata(self.folder, self.config, facts, {"state": "under way"})
        telling = asyncio.create_task(say_what_is_waited_for())
        try:
            await search.run(first)
            held_out = None
            if drawn.test:
                say(f"measuring on {len(drawn.test)} examples that nothing has seen")
                before = after = await _mean_score(search, 0, drawn)
                if search.best:
                    after = await _mean_score(search, search.best, drawn)
                held_out = {"before": before, "after": after, "num_examples": len(drawn.test)}
        except BaseException:
            if search.candidates:
                keep("stopped")
            raise
        finally:
            telling.cancel()
        return keep("finished", held_out)

    def _check_columns(self, records: Records) -> None:
        """Warn after the first rollouts of state columns that no rollout has."""
        scored = [line for line in records.rollouts.values() if line.error is None]
        for name in self.config.state_columns:
            if scored and not any(has_column(line, name) for line in scored):
                keys = ", ".join(next((line.state_keys for line in scored if line.state_keys), []))
                self.progress.say(f"--state-columns {name}: no rollout had one. The environment's state has: {keys}")


async def _mean_score(search: Search, number: int, drawn: Drawn) -> float:
    """Score a prompt on the test examples. Only these figures are unbiased: no choice was made by them."""
    scored = await search.try_prompt(search.candidates[number].prompt, drawn.test)
    return sum(line.score for line in scored) / len(scored)


def _summary(search: Search, drawn: Drawn, state: str, held_out: dict[str, Any] | None) -> dict[str, Any]:
    first, best = search.candidates[0], search.candidates[search.best]
    rollouts = search.records.rollouts
    return {
        "state": state,
        "why": search.why,
        "calls": {"total": len(rollouts)} | {purpose: search.calls[purpose] for purpose in PURPOSES},
        "num_failed": sum(line.error is not None for line in rollouts.values()),
        "num_reflections": len(search.records.reflections),
        "num_unusable_reflections": search.num_unusable,
        "num_unusable_in_a_row": len(search.unusable),
        "num_prompts": len(search.candidates),
        "best": search.best,
        "validation": {"before": first.mean, "after": best.mean, "num_examples": len(drawn.validation)},
        "held_out": held_out,
        "num_train": len(drawn.train),
    }
