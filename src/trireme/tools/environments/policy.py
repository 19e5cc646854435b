"""Choose the policy that answers an environment's questions: a script, an engine that is started, or a server.

All that can be refused is refused here, before anything starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError, PeerDied, TriremeError
from trireme.base.network import is_loopback
from trireme.base.processes import free_port
from trireme.base.token import token
from trireme.base.waiting import Waits
from trireme.config.model.chat_template import unread_problems
from trireme.config.model.folder import longest_context, read_config
from trireme.config.orchestrator import (
    Sampling,
    environment_template_kwargs,
    sampling_problems,
    template_problems,
)
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, updated
from trireme.config.rules import check_launch
from trireme.config.run import RunConfig
from trireme.config.trainer import Vlm
from trireme.journal.pictures import rules_of_model
from trireme.journal.records import Rollout
from trireme.launch.standalone_engine import open_engine
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.engines.responses import Response
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.chat import ChatTokenizer, open_chat_tokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
from trireme.tools.environments import progress
from trireme.tools.environments.policy_endpoint import ChatEndpoint, look_at, open_chat_endpoint
from trireme.tools.environments.policy_script import ScriptedPolicy
from trireme.tools.evaluate.endpoints import find_endpoint, find_key

FRESH, LOADING = "default", "-loading"
"""The name of an engine's weights before any transfer, and its end during one: see `evaluate.engine`."""

MAX_CONTEXT = 2048
"""Tokens of context of an engine that is started, unless the user asks for more."""


RolloutPolicy: TypeAlias = "ScriptedPolicy | EnginePolicy | ChatEndpoint"
"""A source of answers to an environment's questions. Its `rollout` raises RolloutFailed, or TriremeError where no other
rollout could go better."""

OpenPolicy: TypeAlias = "Callable[[], AbstractAsyncContextManager[RolloutPolicy]]"


@dataclass(frozen=True)
class PolicyWanted:
    """The policy that the user asks for. Without any, the configuration's model is taken, or else the script."""

    model: str | None = None
    base_url: str | None = None
    key: str | None = field(default=None, repr=False)
    scripted: bool = False
    trained: bool = True  # whether rollouts must be such that they could be trained on
    pictures: Path | None = None  # folder for the pictures of conversations; a temporary one if not given


def find_policy(
    model: str | None, url: str | None, key_variable: str | None, *, endpoints: Path | None = None, trained: bool = True
) -> PolicyWanted:
    """Find a model: a folder, for which an engine is started, or a model at an address or in the file of endpoints.

    Raises: ConfigError if neither a model nor a server is named, no place is known, or the named key is not set.
    """
    if model is None and url is None:
        raise ConfigError("no model is named - expected one. Add `-m MODEL`, or `-b URL` of a server with only one.")
    if model is not None and url is None and Path(model).is_dir():
        return PolicyWanted(model, trained=trained)
    typed, own_key = url, None
    if model is not None:
        endpoint = find_endpoint(model, base_url=url, path=endpoints)
        model, url, own_key = endpoint.model or model, endpoint.url, endpoint.key
    key = find_key("--api-key-var", key_variable, url=typed, otherwise=own_key)
    return PolicyWanted(model, url, key, trained=trained)


def build_opener(wanted: PolicyWanted, config: RunConfig, waits: Waits) -> OpenPolicy:
    """Return a function that opens the policy.

    Raises: ConfigError if there is no such model or server, or the two contradict each other.
    """
    # what the user typed decides first, then the configuration, then the script
    if wanted.scripted and (wanted.model or wanted.base_url):
        raise ConfigError(
            "--scripted came with --model or --base-url - expected one policy. Leave out --scripted, or the others."
        )
    if wanted.base_url:
        return _at_server(wanted, wanted.base_url, config, waits)
    named = config.inference.model.name or (config.model.name if "model" in config.model_fields_set else None)
    if wanted.scripted or not (wanted.model or named):
        return lambda: nullcontext(ScriptedPolicy())
    if not (wanted.trained and named):  # rollouts for training follow the run's own `[model.vlm]`
        config = updated(config, vision_of(wanted.model or str(named)))
    # refused here, before an engine starts: a wrong length, a missing tokenizer, unknown sampling
    devices = detect_devices()
    config = engine_config(config, wanted.model, devices)
    tokenizer = open_chat_tokenizer(
        config.trainer.tokenizer.name or config.model.name, trust_remote_code=config.trainer.model.trust_remote_code
    )
    model = config.inference.model.name or config.model.name
    check_sampling(config, tokenizer, model)

    @asynccontextmanager
    async def opened() -> AsyncIterator[RolloutPolicy]:
        async with AsyncExitStack() as stack:
            with progress.stage(f"starting an engine for {model}", limit_s=config.inference.start_timeout_s):
                url = await stack.enter_async_context(open_engine(config, devices, waits))
            name = f"{model} by an engine of this command"
            opening = open_engine_policy(config, tokenizer, url, name=name, waits=waits, wanted=wanted)
            yield await stack.enter_async_context(opening)

    return opened


def engine_config(config: RunConfig, model: str | None, devices: Devices) -> RunConfig:
    """Resolve the configuration for an engine alone, on a free port. On CPU it has all cores, and seeds.

    Raises: ConfigError if the model is missing, or the configuration contradicts itself.
    """
    # the engine's and the tokenizer's names follow from the model that was typed
    values: dict[str, Any] = {"inference.server.port": config.inference.server.port or free_port()}
    if model:
        values |= {"model.name": model, "inference.model.name": None}
        values |= {"trainer.model.name": None, "trainer.tokenizer.name": None}
    # on a CPU a synchronous run gives each turn its seed, so that a check repeats
    if config.device == "cpu" or (config.device == "auto" and not devices.gpus):
        values["max_async_level"] = 0
    if devices.gpus:
        values |= {"trainer_gpu_ids": (), "trainer_gpus": None}  # there is no trainer to leave GPUs to
    config = updated(config, values)
    # more context than the user asks for would only take memory
    if "seq_len" not in config.model_fields_set:
        longest = longest_context(read_config(config.inference.model.name or config.model.name)) or MAX_CONTEXT
        config = updated(config, {"seq_len": max(config.inference.model.max_model_len or 0, min(MAX_CONTEXT, longest))})
    config = resolve(config, devices, section="inference")
    check_launch(config, devices, section="inference")
    return config


def check_sampling(config: RunConfig, tokenizer: ChatTokenizer, model: str) -> None:
    """Check that an engine of ours, and the model's chat template, have what is asked of them.

    Raises: ConfigError for names that neither knows.
    """
    sampling, variables = config.orchestrator.sampling, tokenizer.template_variables
    found = [*sampling_problems("sampling", sampling)]
    found += unread_problems("sampling", sampling.template_request, variables, model)
    for key, kwargs in environment_template_kwargs(config.orchestrator):
        found += template_problems(key, {"chat_template_kwargs": kwargs})
        found += unread_problems(key, {"chat_template_kwargs": kwargs}, variables, model)
    raise_together(found)


def _at_server(wanted: PolicyWanted, url: str, config: RunConfig, waits: Waits) -> OpenPolicy:
    """Ask an engine of ours in tokens, if its model's files are here; any other server through its chat route.

    TRIREME_TOKEN is sent to servers on this machine for which no other key was named.
    """
    # a key that was typed wins; our own token is only for servers on this machine
    key = wanted.key or (token() if is_loopback(urlsplit(url).hostname or "") else None)
    server = asyncio.run(look_at(url, key=key))
    if (server.weights or "").endswith(LOADING):
        raise ConfigError(
            f"{server.root} has a part of some weights from an evaluation that did not finish ({server.weights}) - "
            "expected an engine with a whole model. Type the evaluation's command again, or restart the engine."
        )

    model = wanted.model or next(iter(server.models), None)
    if not (server.weights is not None and model and Path(model).is_dir()):
        return lambda: open_chat_endpoint(server, wanted.model, key, config.orchestrator, waits)
    tokenizer = open_chat_tokenizer(model)
    check_sampling(config, tokenizer, model)
    # No seeds for an engine that was not started for them: see `inference.server`.
    values: dict[str, Any] = {"max_async_level": max(1, config.max_async_level)}
    values["inference.model.max_model_len"] = server.max_model_len or config.inference.model.max_model_len
    holds = f" (weights {server.weights})" if server.weights != FRESH else ""
    name = f"{model} by the engine at {server.root}{holds}"
    values["model.name"] = model
    if config.model.vlm is not None or not wanted.trained:
        values |= vision_of(model)
    config = updated(config, values)
    return lambda: open_engine_policy(config, tokenizer, server.root, name=name, waits=waits, wanted=wanted)


def vision_of(model: str) -> dict[str, Any]:
    """Return the settings with which a model that sees is shown pictures; none for other models."""
    try:
        rules_of_model(model)
    except ConfigError:
        return {}
    return {"model.vlm": Vlm(), "trainer.model.vlm": Vlm()}


class WeightsReplaced(TriremeError):
    """An engine answered with other weights than it was given."""


@dataclass
class StandingPool(InferencePool):
    """One engine, taken as it is: live from the beginning, and every token counts as version 0.

    The command publishes no weights to it meanwhile, so that no version is waited for.
    """

    serves: str | None = None  # the version of its weights; an answer under another version is an error

    async def post_generate(self, engine: Engine, body: bytes, **how: Any) -> Response:
        try:
            response = await super().post_generate(engine, body, **how)
        except aiohttp.ClientConnectorError as error:
            raise PeerDied(
                f"{engine.url} is gone in the middle of the rollouts ({error}) - expected it to answer until the end. "
                "Look at its log: logs/inference.stdout in the folder of the command, if that started it."
            ) from error
        # answers are checked one by one, as another client may replace the weights at any time
        for span in (span for choice in response.choices for span in choice.weight_versions):
            if self.serves is not None and span.version != self.serves:
                raise WeightsReplaced(
                    f"{engine.url} answered with weights {span.version!r}, it was given {self.serves!r} - expected "
                    "that no other process gives it weights meanwhile or restarts it. Find out which one uses it, then "
                    "type the same command again: all results so far are kept."
                )
            span.version = "0"
        return response


@dataclass(frozen=True)
class EnginePolicy:
    """A policy on an engine of ours: rollouts as in training, token ids in and token ids out."""

    engine: str  # for the report: which model, and where
    runner: RolloutRunner
    sampling: Sampling
    trained: bool = True  # rollouts must be such that they could be trained on

    @property
    def name(self) -> str:
        longest = f", turns of up to {self.sampling.max_tokens} tokens" if self.sampling.max_tokens else ""
        return f"{self.engine}, temperature {self.sampling.temperature:g}{longest}"

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        return await self.runner.run(environment, spec, sampling=self.sampling, trained=self.trained)


@asynccontextmanager
async def open_engine_policy(
    config: RunConfig, tokenizer: ChatTokenizer, url: str, *, name: str, waits: Waits, wanted: PolicyWanted
) -> AsyncIterator[EnginePolicy]:
    """Open a policy on the engine at `url`. Its pool is a `StandingPool`.

    Args:
        name: for the report; the sampling is appended to it.
    """
    async with open_inference_pool(
        [url],
        waits=waits,
        max_model_len=config.inference.model.max_model_len or config.seq_len,
        timeout_s=config.orchestrator.engine_timeout_s,
        max_concurrent=config.orchestrator.max_concurrent,
        vocab_size=tokenizer.vocab_size,
    ) as opened:
        # the same pool, with the rules of an engine that is used as it is
        pool = StandingPool(**{each.name: getattr(opened, each.name) for each in fields(opened) if each.init})
        pool.engines[0].state = "live"
        runner = RolloutRunner(config, pool, tokenizer, waits, pictures_folder=wanted.pictures)
        yield EnginePolicy(name, runner, config.orchestrator.sampling, trained=wanted.trained)
