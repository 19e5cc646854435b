"""An engine of ours answers a check: the same way as in training, token ids in and token ids out.

Nobody publishes weights to it meanwhile, or somebody else does; either way no version is waited for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields

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
from trireme.orchestrator.rollout.driver import RolloutSpec
from trireme.orchestrator.rollout.runner import RolloutRunner


class WeightsReplaced(TriremeError):
    """An engine answered with other weights than it was asked under."""


@dataclass
class StandingPool(InferencePool):
    """One engine, taken as it is: live from the beginning, and every token counts as version 0."""

    serves: str | None = None  # what it calls its weights; an answer under another name is not taken

    async def post_generate(self, engine: Engine, body: bytes, *, max_bytes: int | None = None) -> Response:
        try:
            response = await super().post_generate(engine, body, max_bytes=max_bytes)
        except aiohttp.ClientConnectorError as error:
            raise PeerDied(
                f"{engine.url} is gone in the middle of the check ({error}) - expected it to answer until the end - "
                "look at its log: logs/inference.stdout in the folder of the check, where the check had started it."
            ) from error
        for span in (span for choice in response.choices for span in choice.weight_versions):
            self._require_own(engine, span.version)
            span.version = "0"
        return response

    def _require_own(self, engine: Engine, version: str) -> None:
        if self.serves is not None and version != self.serves:
            raise WeightsReplaced(
                f"{engine.url} answered with weights {version!r}, it was given {self.serves!r} - expected nobody else "
                "to give it weights meanwhile, and that it is not restarted. Look at who uses it, then type the same "
                "command again: what was answered so far is kept."
            )


class EnginePolicy:
    """Runs rollouts as training does."""

    is_policy = True

    def __init__(self, name: str, runner: RolloutRunner, sampling: Sampling, *, trained: bool = True) -> None:
        self.name = name
        self._runner = runner
        self._sampling = sampling
        self._trained = trained

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Rollout:
        return await self._runner.run(
            environment,
            key=spec.name,
            split=spec.split,
            example=spec.example,
            attempt=spec.attempt,
            sampling=self._sampling,
            group=spec.group,
            group_size=spec.group_size,
            trained=self._trained,
        )


@asynccontextmanager
async def open_engine_policy(
    config: RunConfig, tokenizer: ChatTokenizer, url: str, *, name: str, waits: Waits, trained: bool = True
) -> AsyncIterator[EnginePolicy]:
    """
    Args:
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
