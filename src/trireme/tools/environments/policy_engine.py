"""A policy on one of our engines: rollouts as in training, token ids in and token ids out.

The command publishes no weights to the engine meanwhile, so that no version is waited for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace

import aiohttp

from trireme.base.errors import PeerDied, TriremeError
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig
from trireme.journal.records import Rollout
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.engines.responses import Response
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec


class WeightsReplaced(TriremeError):
    """An engine answered with other weights than it was given."""


@dataclass
class StandingPool(InferencePool):
    """One engine, taken as it is: live from the beginning, and every token counts as version 0."""

    serves: str | None = None  # the version of its weights; an answer under another version is an error

    async def post_generate(self, engine: Engine, body: bytes, *, max_bytes: int | None = None) -> Response:
        try:
            response = await super().post_generate(engine, body, max_bytes=max_bytes)
        except aiohttp.ClientConnectorError as error:
            raise PeerDied(
                f"{engine.url} is gone in the middle of the rollouts ({error}) - expected it to answer until the end. "
                "Look at its log: logs/inference.stdout in the folder of the command, if that started it."
            ) from error
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
    """Runs rollouts as training does."""

    engine: str  # for the report: which model, and where
    runner: RolloutRunner
    sampling: Sampling
    trained: bool = True  # rollouts must be such that they could be trained on
    is_policy: bool = True

    @property
    def name(self) -> str:
        longest = f", turns of up to {self.sampling.max_tokens} tokens" if self.sampling.max_tokens else ""
        return f"{self.engine}, temperature {self.sampling.temperature:g}{longest}"

    def with_sampling(self, sampling: Sampling) -> EnginePolicy:
        """Return a policy on the same engine with other sampling."""
        return replace(self, sampling=sampling)

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        return await self.runner.run(environment, spec, sampling=self.sampling, trained=self.trained)


@asynccontextmanager
async def open_engine_policy(
    config: RunConfig, tokenizer: ChatTokenizer, url: str, *, name: str, waits: Waits, trained: bool = True
) -> AsyncIterator[EnginePolicy]:
    """Open a policy on the engine at `url`.

    Args:
        name: for the report; the sampling is appended to it.
        trained: whether rollouts must be such that they could be trained on.
    """
    async with open_standing_pool(config, tokenizer, url, waits=waits) as pool:
        runner = RolloutRunner(config, pool, tokenizer)
        yield EnginePolicy(name, runner, config.orchestrator.sampling, trained=trained)


@asynccontextmanager
async def open_standing_pool(
    config: RunConfig, tokenizer: ChatTokenizer, url: str, *, waits: Waits
) -> AsyncIterator[StandingPool]:
    async with open_inference_pool(
        [url],
        waits=waits,
        max_model_len=config.inference.model.max_model_len or config.seq_len,
        timeout_s=config.orchestrator.engine_timeout_s,
        max_concurrent=config.orchestrator.max_concurrent,
        vocab_size=tokenizer.vocab_size,
    ) as opened:
        pool = StandingPool(**{each.name: getattr(opened, each.name) for each in fields(opened) if each.init})
        pool.engines[0].state = "live"
        yield pool
