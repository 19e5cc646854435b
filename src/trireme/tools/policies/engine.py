"""A policy on an engine of ours: token ids in and token ids out, as in training."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError, PeerDied, TriremeError
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.model.chat_template import unread_problems
from trireme.config.model.folder import longest_context, read_config
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, updated
from trireme.config.rules.check import check_launch
from trireme.config.rules.sampling import environment_template_kwargs, sampling_problems, template_problems
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling
from trireme.config.section import merged
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
from trireme.tools import progress
from trireme.tools.policies.chat_endpoint import Server

FRESH, LOADING = "default", "-loading"
"""The name of an engine's weights before any transfer, and its end during one: see `evaluate.engine`."""

MAX_CONTEXT = 2048
"""Tokens of context of an engine that is started, unless the user asks for more."""


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
        sampling = merged(self.sampling, getattr(environment.config, "sampling", None))
        return await self.runner.run(environment, spec, sampling=sampling, trained=self.trained)


OpenEngine: TypeAlias = Callable[[], AbstractAsyncContextManager[EnginePolicy]]


@asynccontextmanager
async def open_engine_policy(
    config: RunConfig,
    tokenizer: ChatTokenizer,
    url: str,
    *,
    name: str,
    waits: Waits,
    trained: bool = True,
    pictures: Path | None = None,
) -> AsyncIterator[EnginePolicy]:
    """Open a policy on the engine at `url`. Its pool is a `StandingPool`.

    Args:
        name: for the report; the sampling is appended to it.
        pictures: folder for the pictures of conversations; a temporary one if None.
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
        runner = RolloutRunner(config, pool, tokenizer, waits, pictures_folder=pictures)
        yield EnginePolicy(name, runner, config.orchestrator.sampling, trained=trained)


def build_new_engine_opener(
    model: str | None, config: RunConfig, waits: Waits, *, trained: bool = True, pictures: Path | None = None
) -> OpenEngine:
    """Return a function that starts an engine, and opens a policy on it.

    Args:
        model: folder or hub name; the configuration's if None.

    Raises: ConfigError if a length is wrong, the tokenizer is missing, or the sampling has names that are not known.
    """
    # refused here, before the engine starts, which may take minutes
    devices = detect_devices()
    config = engine_config(config, model, devices)
    tokenizer = open_chat_tokenizer(
        config.trainer.tokenizer.name or config.model.name, trust_remote_code=config.trainer.model.trust_remote_code
    )
    served = config.inference.model.name or config.model.name
    check_sampling(config, tokenizer, served)

    @asynccontextmanager
    async def opened() -> AsyncIterator[EnginePolicy]:
        async with AsyncExitStack() as stack:
            with progress.stage(f"starting an engine for {served}", limit_s=config.inference.start_timeout_s):
                url = await stack.enter_async_context(open_engine(config, devices, waits))
            name = f"{served} by an engine of this command"
            opening = open_engine_policy(
                config, tokenizer, url, name=name, waits=waits, trained=trained, pictures=pictures
            )
            yield await stack.enter_async_context(opening)

    return opened


def build_running_engine_opener(
    server: Server, model: str, config: RunConfig, waits: Waits, *, trained: bool = True, pictures: Path | None = None
) -> OpenEngine:
    """Return a function that opens a policy on an engine that is running already.

    Args:
        model: folder or hub name of a model with the engine's tokenizer and chat template.

    Raises: ConfigError if the tokenizer is missing, or the sampling has names that neither it nor the engine knows.
    """
    tokenizer = open_chat_tokenizer(model)
    check_sampling(config, tokenizer, model)

    # the user's limit holds too, if it is below the engine's
    limits = (config.inference.model.max_model_len, server.max_model_len)
    values: dict[str, Any] = {
        "model.name": model,
        "inference.model.max_model_len": min(filter(None, limits), default=None),
        # no seeds for an engine that was not started for them: see `inference.server`
        "max_async_level": max(1, config.max_async_level),
    }
    if config.model.vlm is not None or not trained:  # rollouts for training follow the run's own `[model.vlm]`
        values |= vision_of(model)
    config = updated(config, values)

    holds = f" (weights {server.weights})" if server.weights != FRESH else ""
    name = f"{model} by the engine at {server.root}{holds}"
    return lambda: open_engine_policy(
        config, tokenizer, server.root, name=name, waits=waits, trained=trained, pictures=pictures
    )


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


def vision_of(model: str) -> dict[str, Any]:
    """Return the settings with which a model that sees is shown pictures; none for other models."""
    try:
        rules_of_model(model)
    except ConfigError:
        return {}
    return {"model.vlm": Vlm(), "trainer.model.vlm": Vlm()}
