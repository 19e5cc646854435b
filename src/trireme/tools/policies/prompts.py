"""An environment with another system prompt, and one that only asks a question.

The system message is replaced on its way to the policy. The environment is loaded once, and this works for every
environment, whether or not its `load_environment` takes a `system_prompt`. The policy gets the requests that it would
get if the environment had been loaded with that prompt. Only reward functions that read the prompt still see the
environment's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import msgspec

from trireme.base.errors import ConfigError
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.journal.message_text import content_text
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Done, Reply, RunTask, Split

SYSTEM = ("system", "developer")
SHOWN = 200  # characters of a prompt, in an error
TOO_LONG = "too long"  # stage at which a question fails that does not fit into the model's context

Messages = list[dict[str, Any]]


def with_system(messages: Messages, prompt: str) -> Messages:
    """Return the conversation with this system message, or without any if the prompt is empty.

    Example:
        with_system([{"role": "user", "content": "2 + 2?"}], "Be brief.")
        # [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    """
    has_one = bool(messages) and messages[0].get("role") in SYSTEM
    rest = messages[1:] if has_one else messages
    role = messages[0]["role"] if has_one else "system"
    return [{"role": role, "content": prompt}, *rest] if prompt else list(rest)


def system_of(messages: Messages) -> str:
    """Return the system message: the inverse of `with_system`."""
    if not messages or messages[0].get("role") not in SYSTEM:
        return ""
    return content_text(messages[0].get("content"))


class PromptedEnvironment:
    """Stands in for an environment, and shares its workers, limits and counts."""

    def __init__(self, environment: Environment, prompt: str, *, columns: Sequence[str] = ()) -> None:
        self._environment = environment
        self._prompt = prompt
        self._columns = list(columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def run(self, session: Session) -> Done:
        """Run a rollout as `Environment.run` does."""

        async def ask_prompted(question: Ask) -> Reply:
            messages = with_system(question.messages, self._prompt)
            return await session.answer(msgspec.structs.replace(question, messages=messages))

        # The worker returns these fields of the environment's state, which the reflection model is shown.
        task = msgspec.structs.replace(session.task, columns=self._columns)
        done = await self._environment.run(Session(task, ask_prompted, session.restart, session.log))

        # The record must hold the prompt that the policy was asked with.
        return msgspec.structs.replace(done, prompt=with_system(done.prompt, self._prompt))


def read_prompt(file: Path, *, flag: str) -> str:
    """Read a file that was named with `flag`. Raises: ConfigError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{flag} {file} cannot be read ({error}) - expected a text file with a system prompt. Correct the path, or "
            "leave it out for the environment's own."
        ) from error


async def own_prompt(environment: Environment, examples: Sequence[tuple[Split, int]]) -> str:
    """Return the environment's system prompt, read where it asks its first question. No model is asked.

    Raises: ConfigError if examples have different ones, or none of them asks a question.
    """
    prompts: dict[str, None] = {}

    # The first question holds the system message. Failing the rollout there saves asking a model.
    async def ask(question: Ask) -> Reply:
        prompts[system_of(question.messages)] = None
        raise RolloutFailed("rollout", "its first question was read")

    async def read(split: Split, index: int) -> str:
        task = RunTask(task=f"prompt-{split}-{index}", split=split, index=index)
        try:
            await environment.run(Session(task, ask))
        except RolloutFailed as failure:
            return str(failure)
        return "it ended without asking for a turn"

    ends = await asyncio.gather(*starmap(read, examples))
    if not prompts:
        raise ConfigError(
            f"Environment {environment.name!r}: none of {len(ends)} examples came to its first question; one failed "
            f"with: {ends[0]} - expected to read its system prompt there. `trireme env check {environment.name}` "
            "shows more."
        )

    # A search improves one prompt, so all examples must begin with the same one.
    first, *others = prompts
    if others:
        raise ConfigError(
            f"Environment {environment.name!r} gives its examples different system prompts, such as "
            f"{first[:SHOWN]!r} and {others[0][:SHOWN]!r} - expected one for all, to begin with. Write one that "
            "replaces all of them to a file, and give it as `--initial-prompt FILE`."
        )
    return first


class OneQuestion:
    """An environment whose rollouts ask one question; the answer is the completion."""

    name = "reflection"
    group_rewards = uses_gateway = False

    def __init__(self, question: str) -> None:
        self.config = EnvironmentConfig(id=self.name)
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": question}]

    async def run(self, session: Session) -> Done:
        """Raises: RolloutFailed if there is no answer, with stage `TOO_LONG` if the question does not fit."""
        reply = await session.answer(Ask(task=session.task.task, call="1", messages=self._messages, sampling={}))
        if reply.error is not None:
            raise RolloutFailed(TOO_LONG if reply.error_kind == "overlong_prompt" else "rollout", reply.error)
        answer = {"role": "assistant", "content": reply.content or ""}
        return Done(
            task=session.task.task,
            reward=0.0,
            metrics={},
            prompt=self._messages,
            completion=[answer],
            example_id=0,
            truncated=reply.finish_reason == "length",
        )
