"""One search from its beginning to its end: the environment, the models, the first prompt, the search, the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import EnvironmentSource
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.environments.progress import Progress
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.examples import PURPOSES, Drawn, draw_examples
from trireme.tools.gepa.feedback import has_column
from trireme.tools.gepa.journal import Journal, Scored
from trireme.tools.gepa.prompted import own_prompt
from trireme.tools.gepa.results import Files, check_same, read_metadata, write_found, write_metadata
from trireme.tools.gepa.rollouts import Trials
from trireme.tools.gepa.search import Found, Search, iteration_cost, reserve
from trireme.tools.gepa.teacher import Teacher, greet

LOAD_TIMEOUT_S = 600.0
LOOKED_AT = 8  # examples whose first question is read for the environment's own prompt
SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Models:
    """Who answers rollouts, and who rewrites prompts."""

    policy: RolloutPolicy
    teacher: RolloutPolicy
    greets: bool = True  # whether a first question tells something: not of an engine that was just started


OpenModels = Callable[[], AbstractAsyncContextManager[Models]]


@dataclass(frozen=True)
class Outcome:
    """What came out, as it stands in `metadata.json`."""

    summary: dict[str, Any]
    best_prompt: str


@dataclass
class Optimization:
    """A search in its folder."""

    config: GepaConfig
    source: EnvironmentSource
    files: Files
    open_models: OpenModels
    waits: Waits
    progress: Progress
    cache: Path | None = None

    async def run(self) -> Outcome:
        """Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone."""
        async with self._opened() as environment:
            first, drawn, facts = await self._begin(environment)
            journal = self._journal()
            async with self.open_models() as models:
                if models.greets:
                    await greet(models.policy, flag="--model")
                    await greet(models.teacher, flag="--reflection-model")
                return await self._search(environment, models, journal, first, drawn, facts)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Environment]:
        opening = open_environment(
            _environment(self.config, self.source),
            logs=self.files.folder / "logs",
            root=self.config.environments,
            cache=self.cache,
            seed=self.config.seed,
            load_timeout_s=LOAD_TIMEOUT_S,
            waits=self.waits,
        )
        async with AsyncExitStack() as stack:
            with self.progress.stage(f"loading {self.source.id}", limit_s=LOAD_TIMEOUT_S):
                environment = await stack.enter_async_context(opening)
            yield environment

    async def _begin(self, environment: Environment) -> tuple[str, Drawn, dict[str, Any]]:
        """The prompt to begin with, the examples, and what of the environment must be the same to go on.

        Raises: ConfigError where they do not fit the data, the budget, or the search that lies there.
        """
        if environment.group_rewards:
            raise ConfigError(
                f"The rewards of environment {environment.name!r} compare the rollouts of a group - expected rewards "
                "that score one rollout by itself, as prompts are compared by the rewards of single rollouts."
            )
        drawn = draw_examples(self.config, num_train=environment.num_train, num_eval=environment.num_eval)
        check_budget(self.config, drawn)
        first = await self._first_prompt(environment, drawn)
        facts = {"num_train": environment.num_train, "num_eval": environment.num_eval, "first_prompt": first}
        check_same(self.files, self.config, facts)
        return first, drawn, facts | {"versions": environment.versions}

    async def _first_prompt(self, environment: Environment, drawn: Drawn) -> str:
        if (file := self.config.initial_prompt) is not None:
            return read_prompt(file)
        return await own_prompt(environment, (*drawn.train, *drawn.validation)[:LOOKED_AT])

    def _journal(self) -> Journal:
        """Raises: ConfigError where more was spent before than may be now."""
        journal = Journal(self.files.folder)
        if len(journal.rollouts) > self.config.max_calls:
            raise ConfigError(
                f"--max-calls {self.config.max_calls}: {len(journal.rollouts)} rollouts were made already by the "
                f"search in {self.files.folder} - expected at least as many, to go on with it. Raise it, or begin "
                "anew with `--fresh`."
            )
        summary = (read_metadata(self.files) or {}).get("summary", {})
        if summary.get("state") == "finished" and (num := summary["num_unusable_in_a_row"]):
            journal.forget(list(journal.reflections.values())[-num:])  # asked again, now that there is more to spend
        if journal.rollouts:
            self.progress.say(f"going on: {len(journal.rollouts)} rollouts are in {self.files.folder} already")
        return journal

    async def _search(
        self,
        environment: Environment,
        models: Models,
        journal: Journal,
        first: str,
        drawn: Drawn,
        facts: dict[str, Any],
    ) -> Outcome:
        telling = _Telling(self.progress, self.config.max_calls)
        trials = Trials(environment, models.policy, journal, columns=self.config.state_columns)
        telling.trials = trials
        began = time.monotonic()
        search = Search(self.config, drawn, trials, Teacher(models.teacher, journal), journal, telling.say)

        def keep(found: Found, *, state: str, held_out: dict[str, Any] | None = None) -> Outcome:
            write_found(self.files, self.config, found, drawn)
            summary = _summary(search, found, drawn, state=state, held_out=held_out)
            summary |= {"seconds": round(time.monotonic() - began, 1), "policy": models.policy.name}
            write_metadata(self.files, self.config, facts, summary | {"teacher": models.teacher.name})
            return Outcome(summary, found.candidates[found.best].prompt)

        def on_found(found: Found) -> None:
            keep(found, state="under way")
            if len(found.candidates) == 1:
                self._check_columns(journal)

        write_metadata(self.files, self.config, facts, {"state": "under way"})
        search.on_found = on_found
        try:
            async with telling.watching(self.waits):
                found = await search.run(first, log=self.files.log)
                held_out = await self._measure(trials, found, drawn, telling)
        except BaseException:
            if search.found().candidates:
                keep(search.found(), state="stopped")
            raise
        return keep(found, state="finished", held_out=held_out)

    async def _measure(self, trials: Trials, found: Found, drawn: Drawn, telling: _Telling) -> dict[str, Any] | None:
        """On examples that nothing has seen: the only figures that were chosen by nobody."""
        if not drawn.test:
            return None
        telling.say(f"measuring on {len(drawn.test)} examples that nothing has seen")
        before = _mean(await trials.run(found.candidates[0].prompt, drawn.test))
        best = found.candidates[found.best].prompt
        after = _mean(await trials.run(best, drawn.test)) if found.best else before
        return {"before": before, "after": after, "num_examples": len(drawn.test)}

    def _check_columns(self, journal: Journal) -> None:
        """Said after the first rollouts: there is still time to correct it."""
        scored = [line for line in journal.rollouts.values() if line.error is None]
        for name in self.config.state_columns:
            if scored and not any(has_column(line, name) for line in scored):
                keys = ", ".join(next((line.state_keys for line in scored if line.state_keys), []))
                self.progress.say(f"--state-columns {name}: no rollout had one. The environment's state has: {keys}")


class _Telling:
    """Lines on what happened, each with the calls so far; and what is waited for, while nothing happens."""

    def __init__(self, progress: Progress, max_calls: int) -> None:
        self._progress = progress
        self._max_calls = max_calls
        self._said_at = time.monotonic()
        self.trials: Trials | None = None

    def say(self, words: str) -> None:
        self._said_at = time.monotonic()
        calls = self.trials.calls.total() if self.trials else 0
        self._progress.say(f"[{calls}/{self._max_calls}] {words}")

    @asynccontextmanager
    async def watching(self, waits: Waits) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch(waits))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, waits: Waits) -> None:
        while True:
            await asyncio.sleep(max(0.1, self._said_at + SAY_EVERY_S - time.monotonic()))
            if time.monotonic() - self._said_at >= SAY_EVERY_S:
                open_waits = waits.now()
                more = f", and {len(open_waits) - 1} like it" if len(open_waits) > 1 else ""
                self.say(f"{open_waits[0]}{more}" if open_waits else "rollouts under way")


def read_prompt(file: Path) -> str:
    """Raises: ConfigError where there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--initial-prompt {file} cannot be read ({error}) - expected a text file with the prompt to begin with. "
            "Correct the path, or leave it out to begin with the environment's own."
        ) from error


def check_budget(config: GepaConfig, drawn: Drawn) -> None:
    """Raises: ConfigError where not a single new prompt could be tried."""
    if config.minibatch_size > len(drawn.train):
        raise ConfigError(
            f"--minibatch-size {config.minibatch_size} is more than the {len(drawn.train)} examples to reflect on - "
            "expected at most as many. Lower it, or raise `--num-train`."
        )
    least = len(drawn.validation) + iteration_cost(config, drawn) + reserve(config)
    if config.max_calls < least:
        raise ConfigError(
            f"--max-calls {config.max_calls} is too few for a single new prompt: {len(drawn.validation)} to score the "
            f"first one, {iteration_cost(config, drawn)} for the new one and {reserve(config)} for the test at the "
            f"end - expected {least} or more. Raise it, or lower `--num-val`."
        )


def _environment(config: GepaConfig, source: EnvironmentSource) -> EnvironmentConfig:
    return EnvironmentConfig(
        id=str(source.folder) if source.folder is not None else source.id,
        name=config.env_id,
        args=config.env_args,
        num_workers=config.num_workers,
        max_concurrent=config.max_concurrent,
        rollout_timeout_s=config.rollout_timeout_s,
        max_turns=config.max_turns,
    )


def _summary(
    search: Search, found: Found, drawn: Drawn, *, state: str, held_out: dict[str, Any] | None
) -> dict[str, Any]:
    first, best = found.candidates[0], found.candidates[found.best]
    calls = search.trials.calls
    return {
        "state": state,
        "why": found.why,
        "calls": {"total": len(search.journal.rollouts)} | {purpose: calls[purpose] for purpose in PURPOSES},
        "num_failed": search.journal.num_failed,
        "num_reflections": len(search.journal.reflections),
        "num_unusable_reflections": search.num_unusable,
        "num_unusable_in_a_row": search.num_unusable_in_a_row,
        "num_prompts": len(found.candidates),
        "best": found.best,
        "validation": {"before": first.mean, "after": best.mean, "num_examples": len(drawn.validation)},
        "held_out": held_out,
        "num_train": len(drawn.train),
    }


def _mean(scored: list[Scored]) -> float:
    return sum(line.score for line in scored) / len(scored)
