"""An environment with another system prompt is the same one otherwise."""

import textwrap
from pathlib import Path
from typing import Any

from support.engines.reflecting import ENVIRONMENT
from support.runs.toy_environments import with_environment
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Reply, RunTask
from trireme.tools.policies.prompts import PromptedEnvironment, own_prompt, with_system


def test_gepa_candidate_replaces_the_system_prompt_of_an_environment(here):
    asked: list[list[dict[str, Any]]] = []

    async def ask(question: Ask) -> Reply:
        asked.append(question.messages)
        return Reply(content="SEA", finish_reason="stop")

    async def use(environment: Environment) -> None:
        task = RunTask(task="t", index=0)
        loaded = await environment.run(Session(task, ask))
        tried = await PromptedEnvironment(environment, "Be loud.", columns=["heard", "gone"]).run(Session(task, ask))
        assert await own_prompt(environment, [("train", 0), ("train", 1)]) == "Be quiet."
        assert asked[0] == with_system(asked[1], "Be quiet.")
        assert tried.prompt[0]["content"] == "Be loud."
        assert loaded.prompt == with_system(tried.prompt, "Be quiet.")
        assert (loaded.columns, loaded.state_keys) == ({}, [])
        assert (tried.columns, tried.state_keys) == ({"heard": "sea"}, ["answer", "heard", "prompt"])

    Path("harbour.py").write_text(textwrap.dedent(ENVIRONMENT))
    with_environment(here, "harbour.py", use, args={"system_prompt": "Be quiet."})
