"""Who answers in `trireme gepa`, and who rewrites prompts: engines that are started, or endpoints that are there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Sampling
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.standalone_engine import open_engine
from trireme.orchestrator.rollout.chat import open_chat_tokenizer
from trireme.tools.environments.policy import OpenPolicy, PolicyWanted, RolloutPolicy, build_opener, engine_config
from trireme.tools.environments.policy_engine import open_engine_policy
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.endpoints import KEY_VARIABLE, find_endpoint, key_for_address
from trireme.tools.gepa.config import REFLECTION_ENGINE, GepaConfig
from trireme.tools.gepa.optimize import Models, OpenModels


@dataclass(frozen=True)
class Place:
    """Where a model is asked: at an endpoint, or, without an address, by an engine of its own."""

    model: str
    url: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        """Without the key."""
        return f"Place({self.model!r}, {self.url!r})"


def places_of(config: GepaConfig) -> tuple[Place, Place]:
    """Of the model, and of the reflection model.

    Raises: ConfigError where it is not clear where one is asked, or its key's variable is not set.
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


def _place(model: str, url: str | None, variable: str | None, flag: str, endpoints: Path | None) -> Place:
    if url is None and Path(model).is_dir():
        return Place(model)
    endpoint = find_endpoint(model, base_url=url, path=endpoints)
    key = _key(variable, flag) if variable else endpoint.key
    key = key or key_for_address(url)
    return Place(endpoint.model or model, endpoint.url, key)


def _key(variable: str, flag: str) -> str:
    if key := os.environ.get(variable):
        return key
    raise ConfigError(
        f"{flag} {variable}: this variable is not set - expected the endpoint's key in it. "
        f"`export {variable}=…`, or leave the flag out for {KEY_VARIABLE}."
    )


def run_config(config: GepaConfig, folder: Path) -> RunConfig:
    """As far as models are concerned."""
    values: dict[str, Any] = {
        "output_dir": folder,
        "seed": config.seed,
        "device": config.device,
        "inference": config.inference,
        "orchestrator.sampling": config.sampling,
        "orchestrator.engine_timeout_s": config.request_timeout_s,
    }
    if config.seq_len is not None:
        values["seq_len"] = config.seq_len
    return updated(RunConfig(), values)


@dataclass(frozen=True)
class Start:
    """What it takes to open a model."""

    devices: Devices
    waits: Waits
    progress: Progress

    def opener(self, place: Place, run: RunConfig) -> OpenPolicy:
        return build_opener(
            PolicyWanted(place.model, place.url, place.key), run, self.devices, self.waits, self.progress
        )


def build_models(config: GepaConfig, folder: Path, start: Start) -> OpenModels:
    """Raises: ConfigError for all that can be refused before anything is started."""
    run = run_config(config, folder)
    policy, teacher = places_of(config)
    if policy == teacher and policy.url is None:
        return _one_engine(engine_config(run, policy.model, start.devices), config.reflection_sampling, start)
    if policy.url is None and teacher.url is None and start.devices.gpus and config.device != "cpu":
        raise ConfigError(
            f"--model {policy.model} and --reflection-model {teacher.model} are both folders, and there are GPUs here "
            "- expected one engine to be started, which takes them. Start the other one with `inference`, and give "
            "its address as `--reflection-base-url`."
        )
    values = {"output_dir": folder / REFLECTION_ENGINE, "orchestrator.sampling": config.reflection_sampling}
    answering, reflecting = start.opener(policy, run), start.opener(teacher, updated(run, values))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        async with answering() as first, reflecting() as second:
            yield Models(first, second)

    return opened


def _one_engine(run: RunConfig, reflection: Sampling, start: Start) -> OpenModels:
    """It answers both kinds of questions, each with its own sampling."""
    model = run.inference.model.name or run.model.name
    tokenizer = open_chat_tokenizer(run.trainer.tokenizer.name or run.model.name)
    reflecting = updated(run, {"orchestrator.sampling": reflection})

    def policy(config: RunConfig, url: str) -> AbstractAsyncContextManager[RolloutPolicy]:
        name = f"{model} by an engine of this search, temperature {config.orchestrator.sampling.temperature:g}"
        return open_engine_policy(config, tokenizer, url, name=name, waits=start.waits)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        async with AsyncExitStack() as stack:
            with start.progress.stage(f"starting an engine for {model}", limit_s=run.inference.start_timeout_s):
                url = await stack.enter_async_context(open_engine(run, start.devices, start.waits))
            answers = await stack.enter_async_context(policy(run, url))
            reflects = await stack.enter_async_context(policy(reflecting, url))
            yield Models(answers, reflects, greets=False)

    return opened
