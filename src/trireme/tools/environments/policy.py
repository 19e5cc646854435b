"""Who answers in a check: from what was asked for to something that can be opened. All that can be refused is, here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.network import is_loopback
from trireme.base.processes import free_port
from trireme.base.token import token
from trireme.base.waiting import Waits
from trireme.config.resolve import resolve, updated
from trireme.config.rules import check_launch
from trireme.config.run import RunConfig
from trireme.launch.standalone_engine import open_engine
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.chat import ChatTokenizer, open_chat_tokenizer
from trireme.orchestrator.rollout.driver import RolloutSpec
from trireme.orchestrator.rollout.runner import Finished
from trireme.tools.environments.policy_endpoint import Server, look_at, open_chat_endpoint
from trireme.tools.environments.policy_engine import open_engine_policy
from trireme.tools.environments.policy_script import ScriptedPolicy
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.engine import FRESH, LOADING

CONTEXT = 2048
"""Tokens, of a model that can take as many, where nobody said otherwise."""


class RolloutPolicy(Protocol):
    """A script (`policy_script`), an engine of ours (`policy_engine`), or a chat endpoint (`policy_endpoint`)."""

    @property
    def name(self) -> str:
        """For the report."""
        ...

    @property
    def is_policy(self) -> bool:
        """Whether its rewards say how hard the environment is."""
        ...

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Finished:
        """Raises: RolloutFailed; TriremeError where no other rollout could go better."""
        ...


OpenPolicy = Callable[[], AbstractAsyncContextManager[RolloutPolicy]]


@dataclass(frozen=True)
class PolicyWanted:
    """As typed."""

    model: str | None = None
    base_url: str | None = None
    key: str | None = None
    scripted: bool = False
    trained: bool = True  # whether rollouts must be such that they could be trained on


def build_opener(
    wanted: PolicyWanted, config: RunConfig, devices: Devices, waits: Waits, progress: Progress
) -> OpenPolicy:
    """Raises: ConfigError where there is no such model or server, or the two contradict each other."""
    if wanted.scripted and (wanted.model or wanted.base_url):
        raise ConfigError(
            "--scripted came with --model or --base-url - expected one answer to who answers. Leave out --scripted."
        )
    if wanted.base_url:
        return _at_server(wanted, config, waits)
    model = None if wanted.scripted else wanted.model or _model_of(config)
    if model is None:
        return _scripted
    return _own_engine(engine_config(config, wanted.model, devices), devices, waits, progress, trained=wanted.trained)


@asynccontextmanager
async def _scripted() -> AsyncIterator[RolloutPolicy]:
    yield ScriptedPolicy()


def _model_of(config: RunConfig) -> str | None:
    """Where a configuration file names one."""
    return config.inference.model.name or (config.model.name if "model" in config.model_fields_set else None)


def engine_config(config: RunConfig, model: str | None, devices: Devices) -> RunConfig:
    """Resolved for an engine alone, on a free port. On CPU a check is reproducible, with seeds, and has all cores.

    Raises: ConfigError where the model is not there, or the configuration contradicts itself.
    """
    values: dict[str, Any] = {"inference.server.port": config.inference.server.port or free_port()}
    if model:
        values |= {"model.name": model, "inference.model.name": None}
        values |= {"trainer.model.name": None, "trainer.tokenizer.name": None}
    if config.device == "cpu" or (config.device == "auto" and not devices.gpus):
        values["max_async_level"] = 0
    config = updated(config, values)
    if "seq_len" not in config.model_fields_set:
        config = updated(config, {"seq_len": _context(config)})
    config = resolve(config, devices, section="inference")
    check_launch(config, devices, section="inference")
    return config


def _context(config: RunConfig) -> int:
    """What the model takes, up to `CONTEXT`."""
    given = config.inference.model.max_model_len
    file = Path(config.inference.model.name or config.model.name) / "config.json"
    try:
        longest = json.loads(file.read_text())["max_position_embeddings"]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # on a hub, or of another form: the engine will know
        longest = CONTEXT
    return max(given or 0, min(CONTEXT, longest if isinstance(longest, int) else CONTEXT))


def _own_engine(config: RunConfig, devices: Devices, waits: Waits, progress: Progress, *, trained: bool) -> OpenPolicy:
    tokenizer = open_chat_tokenizer(config.trainer.tokenizer.name or config.model.name)
    model = config.inference.model.name or config.model.name

    @asynccontextmanager
    async def opened() -> AsyncIterator[RolloutPolicy]:
        async with AsyncExitStack() as stack:
            with progress.stage(f"starting an engine for {model}", limit_s=config.inference.start_timeout_s):
                url = await stack.enter_async_context(open_engine(config, devices, waits))
            name = f"{model} by an engine of this check, {_sampling_in_words(config)}"
            opening = open_engine_policy(config, tokenizer, url, name=name, waits=waits, trained=trained)
            yield await stack.enter_async_context(opening)

    return opened


def _at_server(wanted: PolicyWanted, config: RunConfig, waits: Waits) -> OpenPolicy:
    url = wanted.base_url or ""
    near = is_loopback(urlsplit(url).hostname or "")
    server = asyncio.run(look_at(url, key=wanted.key or (token() if near else None)))
    _require_whole(server)
    tokenizer = _tokenizer_of(server, wanted) if server.is_ours else None
    if tokenizer is None:
        return lambda: open_chat_endpoint(
            server,
            model=wanted.model,
            key=wanted.key,
            sampling=config.orchestrator.sampling,
            timeout_s=config.orchestrator.engine_timeout_s,
            waits=waits,
        )
    # No seeds for an engine that was not started for them: see `inference.server`.
    values: dict[str, Any] = {"max_async_level": max(1, config.max_async_level)}
    values["inference.model.max_model_len"] = server.max_model_len or config.inference.model.max_model_len
    holds = f" (weights {server.weights})" if server.weights != FRESH else ""
    name = f"{wanted.model or server.models[0]} by the engine at {server.root}{holds}, {_sampling_in_words(config)}"
    config = updated(config, values)

    def opened() -> AbstractAsyncContextManager[RolloutPolicy]:
        return open_engine_policy(config, tokenizer, server.root, name=name, waits=waits, trained=wanted.trained)

    return opened


def _require_whole(server: Server) -> None:
    """Raises: ConfigError where an evaluation left an engine in the middle of a transfer."""
    if (server.weights or "").endswith(LOADING):
        raise ConfigError(
            f"{server.root} was given a part of some weights by an evaluation that did not come to its end "
            f"({server.weights}) - expected an engine with a whole model. Type the evaluation's command again, or "
            "restart the engine."
        )


def _tokenizer_of(server: Server, wanted: PolicyWanted) -> ChatTokenizer | None:
    """Of the model that the engine serves, where its files are here; else its chat route is asked."""
    model = wanted.model or next(iter(server.models), None)
    return open_chat_tokenizer(model) if model and Path(model).is_dir() else None


def _sampling_in_words(config: RunConfig) -> str:
    sampling = config.orchestrator.sampling
    longest = f", turns of up to {sampling.max_tokens} tokens" if sampling.max_tokens else ""
    return f"temperature {sampling.temperature:g}{longest}"
