"""The two models of a search: one makes rollouts, the other rewrites prompts. Each is an endpoint, or an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.standalone_engine import open_engine
from trireme.orchestrator.rollout.chat import open_chat_tokenizer
from trireme.tools.environments.policy import PolicyWanted, RolloutPolicy, build_opener, engine_config
from trireme.tools.environments.policy_engine import open_engine_policy
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.endpoints import find_endpoint, find_key
from trireme.tools.gepa.config import REFLECTION_ENGINE, GepaConfig


@dataclass(frozen=True)
class Models:
    """The policy, which makes rollouts, and the teacher, which rewrites prompts."""

    policy: RolloutPolicy
    teacher: RolloutPolicy
    are_new: bool = False  # an engine was just started for them; a first question would show nothing


OpenModels = Callable[[], AbstractAsyncContextManager[Models]]


@dataclass(frozen=True)
class ModelPlace:
    """Where a model answers: at an endpoint, or, without an address, by an engine that is started for it."""

    model: str
    url: str | None = None
    key: str | None = field(default=None, repr=False)


def places_of(config: GepaConfig) -> tuple[ModelPlace, ModelPlace]:
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


def _place(model: str, url: str | None, variable: str | None, flag: str, endpoints: Path | None) -> ModelPlace:
    if url is None and Path(model).is_dir():
        return ModelPlace(model)
    endpoint = find_endpoint(model, base_url=url, path=endpoints)
    key = find_key(flag, variable, url=url, otherwise=endpoint.key)
    return ModelPlace(endpoint.model or model, endpoint.url, key)


def build_models(config: GepaConfig, folder: Path, waits: Waits, progress: Progress) -> OpenModels:
    """Return a function that opens both models.

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
    if policy == teacher and policy.url is None:
        return _one_engine(engine_config(run, policy.model, devices), config, waits, progress)
    if policy.url is None and teacher.url is None and devices.gpus and config.device != "cpu":
        raise ConfigError(
            f"--model {policy.model} and --reflection-model {teacher.model} are both folders, and there are GPUs here "
            "- expected one engine to be started, which takes them. Start the other one with `inference`, and give "
            "its address as `--reflection-base-url`."
        )
    reflecting = {"output_dir": folder / REFLECTION_ENGINE, "orchestrator.sampling": config.reflection_sampling}
    open_policy, open_teacher = (
        build_opener(PolicyWanted(place.model, place.url, place.key), settings, devices, waits, progress)
        for place, settings in ((policy, run), (teacher, updated(run, reflecting)))
    )

    @asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        async with open_policy() as first, open_teacher() as second:
            yield Models(first, second)

    return opened


def _one_engine(run: RunConfig, config: GepaConfig, waits: Waits, progress: Progress) -> OpenModels:
    """Start one engine that answers both kinds of questions, each with its own sampling."""
    model = run.inference.model.name or run.model.name
    tokenizer = open_chat_tokenizer(run.trainer.tokenizer.name or run.model.name)
    reflecting = updated(run, {"orchestrator.sampling": config.reflection_sampling})

    @asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        starting, limit_s = open_engine(run, detect_devices(), waits), run.inference.start_timeout_s
        name = f"{model} by an engine of this search, temperature"
        async with progress.opening(f"starting an engine for {model}", starting, limit_s=limit_s) as url:
            policy, teacher = (
                open_engine_policy(
                    each, tokenizer, url, name=f"{name} {each.orchestrator.sampling.temperature:g}", waits=waits
                )
                for each in (run, reflecting)
            )
            async with policy as first, teacher as second:
                yield Models(first, second, are_new=True)

    return opened
