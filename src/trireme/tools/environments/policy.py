"""Choose the policy that answers an environment's questions: a script, an engine that is started, or a server.

All that can be refused is refused here, before anything starts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
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
from trireme.journal.records import Rollout
from trireme.launch.standalone_engine import open_engine
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.chat import open_chat_tokenizer
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools.environments.policy_endpoint import look_at, open_chat_endpoint
from trireme.tools.environments.policy_engine import open_engine_policy
from trireme.tools.environments.policy_script import ScriptedPolicy
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.engine import FRESH, LOADING

MAX_CONTEXT = 2048
"""Tokens of context of an engine that is started, unless the user asks for more."""


class RolloutPolicy(Protocol):
    """A script (`policy_script`), an engine of ours (`policy_engine`), or a chat endpoint (`policy_endpoint`)."""

    @property
    def name(self) -> str:
        """The name in reports."""
        ...

    @property
    def is_policy(self) -> bool:
        """Whether its rewards say how hard the environment is."""
        ...

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        """Raises: RolloutFailed; TriremeError where no other rollout could go better."""
        ...


OpenPolicy = Callable[[], AbstractAsyncContextManager[RolloutPolicy]]


@dataclass(frozen=True)
class PolicyWanted:
    """The policy that the user asks for. Without any, the configuration's model is taken, or else the script."""

    model: str | None = None
    base_url: str | None = None
    key: str | None = field(default=None, repr=False)
    scripted: bool = False
    trained: bool = True  # whether rollouts must be such that they could be trained on


def build_opener(
    wanted: PolicyWanted, config: RunConfig, devices: Devices, waits: Waits, progress: Progress
) -> OpenPolicy:
    """Return a function that opens the policy.

    Raises: ConfigError where there is no such model or server, or the two contradict each other.
    """
    if wanted.scripted and (wanted.model or wanted.base_url):
        raise ConfigError(
            "--scripted came with --model or --base-url - expected one policy. Leave out --scripted, or the others."
        )
    if wanted.base_url:
        return _at_server(wanted, wanted.base_url, config, waits)
    named = config.inference.model.name or (config.model.name if "model" in config.model_fields_set else None)
    if wanted.scripted or not (wanted.model or named):
        return _open_script
    config = engine_config(config, wanted.model, devices)
    tokenizer = open_chat_tokenizer(config.trainer.tokenizer.name or config.model.name)
    model = config.inference.model.name or config.model.name

    @asynccontextmanager
    async def opened() -> AsyncIterator[RolloutPolicy]:
        starting, limit_s = open_engine(config, devices, waits), config.inference.start_timeout_s
        name = f"{model} by an engine of this command"
        async with progress.opening(f"starting an engine for {model}", starting, limit_s=limit_s) as url:
            async with open_engine_policy(
                config, tokenizer, url, name=name, waits=waits, trained=wanted.trained
            ) as own:
                yield own

    return opened


@asynccontextmanager
async def _open_script() -> AsyncIterator[RolloutPolicy]:
    yield ScriptedPolicy()


def engine_config(config: RunConfig, model: str | None, devices: Devices) -> RunConfig:
    """Resolve the configuration for an engine alone, on a free port. On CPU it has all cores, and seeds.

    Raises: ConfigError where the model is missing, or the configuration contradicts itself.
    """
    values: dict[str, Any] = {"inference.server.port": config.inference.server.port or free_port()}
    if model:
        values |= {"model.name": model, "inference.model.name": None}
        values |= {"trainer.model.name": None, "trainer.tokenizer.name": None}
    if config.device == "cpu" or (config.device == "auto" and not devices.gpus):
        values["max_async_level"] = 0
    config = updated(config, values)
    if "seq_len" not in config.model_fields_set:
        file, longest = Path(config.inference.model.name or config.model.name) / "config.json", MAX_CONTEXT
        # The model may be on a hub, or its file in another form: the engine will know.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            longest = min(MAX_CONTEXT, int(json.loads(file.read_text())["max_position_embeddings"]))
        config = updated(config, {"seq_len": max(config.inference.model.max_model_len or 0, longest)})
    config = resolve(config, devices, section="inference")
    check_launch(config, devices, section="inference")
    return config


def _at_server(wanted: PolicyWanted, url: str, config: RunConfig, waits: Waits) -> OpenPolicy:
    """Ask an engine of ours in tokens, if its model's files are here; any other server through its chat route."""
    own_token = token() if is_loopback(urlsplit(url).hostname or "") else None
    server = asyncio.run(look_at(url, key=wanted.key or own_token))
    if (server.weights or "").endswith(LOADING):
        raise ConfigError(
            f"{server.root} has a part of some weights from an evaluation that did not finish ({server.weights}) - "
            "expected an engine with a whole model. Type the evaluation's command again, or restart the engine."
        )
    model = wanted.model or next(iter(server.models), None)
    if not (server.is_ours and model and Path(model).is_dir()):
        return lambda: open_chat_endpoint(
            server,
            model=wanted.model,
            key=wanted.key,
            sampling=config.orchestrator.sampling,
            timeout_s=config.orchestrator.engine_timeout_s,
            waits=waits,
        )
    tokenizer = open_chat_tokenizer(model)
    # No seeds for an engine that was not started for them: see `inference.server`.
    values: dict[str, Any] = {"max_async_level": max(1, config.max_async_level)}
    values["inference.model.max_model_len"] = server.max_model_len or config.inference.model.max_model_len
    holds = f" (weights {server.weights})" if server.weights != FRESH else ""
    name = f"{model} by the engine at {server.root}{holds}"
    config = updated(config, values)
    return lambda: open_engine_policy(config, tokenizer, server.root, name=name, waits=waits, trained=wanted.trained)
