"""The two models of a search: one makes rollouts, the other rewrites prompts. Each is an endpoint, or an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.tools.environments.policy import EnginePolicy, PolicyWanted, RolloutPolicy, build_opener
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
