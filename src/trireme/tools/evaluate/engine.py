"""An engine of ours that is given one checkpoint after the other, and says of each that it holds it.

What it calls its weights tells who was there last:

    default              nobody: its base model
    eval-ID-base         an evaluation, and it is the base model
    eval-ID-loading      an evaluation that did not come to the end of a transfer
    eval-ID-step_10      an evaluation that has left these weights behind, or is at work
    10                   a training run: other weights would come under its rollouts
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from trireme.algo.weight_checks import first_difference
from trireme.base.errors import ConfigError, PeerDied, WeightsMismatch
from trireme.messages import PULLED_KINDS, TensorSpec
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import world_size_of
from trireme.tools.environments.policy_engine import StandingPool, WeightsReplaced

OWN, BASE, LOADING, FRESH = "eval-", "-base", "-loading", "default"
BASE_IN_WORDS = "its base model"


class Weights(Protocol):
    """What is to be loaded, and how it travels."""

    @property
    def name(self) -> str:
        """For messages, and in what the engine calls it."""
        ...

    @property
    def specs(self) -> list[TensorSpec]: ...

    @property
    def digests(self) -> dict[str, str]:
        """Of what has been sent."""
        ...

    @property
    def kind(self) -> str:
        """Of transfer."""
        ...

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def bucket_bytes(self) -> int: ...

    def send(self, epoch: str, world_size: int, is_wanted: Callable[[], bool]) -> dict[str, Any]:
        """In a thread. Returns the payload of kinds that are fetched."""
        ...


@dataclass(frozen=True)
class EngineState:
    """Before anything is done to it."""

    version: str
    digests: dict[str, str]  # of what it was sent last
    num_requests: int  # of anybody, under way
    is_paused: bool

    @property
    def holds_base(self) -> bool:
        is_fresh = self.version == FRESH and not self.digests
        return is_fresh or (self.version.startswith(OWN) and self.version.endswith(BASE))


class EvaluatedEngine:
    """One engine, for one evaluation at a time."""

    def __init__(self, pool: StandingPool, *, timeout_s: float) -> None:
        self.pool = pool
        self.engine: Engine = pool.engines[0]
        self.label = f"{OWN}{uuid.uuid4().hex[:6]}"
        self.holds = "weights of before"  # in words
        self._known = FRESH  # what it called its weights when it was last looked at
        self._timeout_s = timeout_s

    async def look(self) -> EngineState:
        """Raises: PeerDied."""
        report = await self.engine.weight_report()
        self.engine.num_workers = world_size_of(await self._get("get_world_size", {"world_size": 1}))
        paused = await self._get("is_paused", {"is_paused": False})
        return EngineState(report.version, report.digests, await self._num_requests(), bool(paused.get("is_paused")))

    async def take(self, state: EngineState, *, over: bool) -> None:
        """Makes it this evaluation's.

        Raises: ConfigError where somebody else uses it.
        """
        url = self.engine.url
        if state.num_requests:
            raise ConfigError(
                f"{url} is answering {state.num_requests} requests of somebody else - expected an engine that nobody "
                "uses: each checkpoint would be loaded under their answers. Wait until it is free, or start another "
                "(`uv run inference …` with a `--server.port` of its own)."
            )
        if state.is_paused and state.version == FRESH and not over:
            raise ConfigError(
                f"{url} is paused: somebody is about to give it weights, a training run that begins perhaps - expected "
                "an engine that nobody uses. Wait, or start another; if nobody does, restart it or add `--take-over`."
            )
        if not over and state.version != FRESH and not state.version.startswith(OWN):
            raise ConfigError(
                f"{url} serves version {state.version} of a training run - expected an engine that no run gives "
                "weights to: a checkpoint would be loaded under that run's rollouts. Start another (`uv run inference "
                "…` with a `--server.port` of its own) and name it with `--client.base-url`; or, if that run is over, "
                "add `--take-over`."
            )
        self._known = state.version
        if state.is_paused:
            await self.engine.post("resume")

    async def require_ours(self) -> None:
        """Raises: WeightsReplaced where somebody else has given it weights since."""
        version = (await self.engine.weight_report()).version
        if version != self._known:
            raise WeightsReplaced(
                f"{self.engine.url} serves {version!r} now, it served {self._known!r} when this evaluation last looked "
                "- expected nobody else to give it weights meanwhile. It is left as it is. Look at who uses it, then "
                "type the same command again: what was answered so far is kept."
            )

    @property
    def holds_base(self) -> bool:
        return self.holds == BASE_IN_WORDS

    async def keep_base(self) -> None:
        """It holds it already."""
        await self.require_ours()
        await self._call(f"{self.label}{BASE}")
        self.holds = BASE_IN_WORDS

    async def load(self, weights: Weights, *, is_base: bool = False) -> None:
        """Returns when it answers with these weights, and has reported the digests that were sent.

        Raises:
            WeightsMismatch: it holds something else.
            PeerDied: it is gone, or could not take them.
            WeightsReplaced: it is somebody else's now.
        """
        await self.require_ours()
        await self.engine.post("pause?mode=wait")  # which also forgets what was computed with other weights
        await self._call(f"{self.label}{LOADING}")
        self.holds = f"a part of {weights.name}"
        await self._transfer(weights)
        await self._compare(weights)
        await self._call(f"{self.label}{BASE if is_base else '-' + weights.name}")
        await self.engine.post("resume")
        self.holds = BASE_IN_WORDS if is_base else weights.name

    async def leave(self) -> None:
        """It holds its base model, as if nobody had been here."""
        await self._call(FRESH)

    async def _call(self, version: str) -> None:
        await self.engine.post("update_weight_version", {"new_version": version})
        self.pool.serves = self._known = version

    async def _transfer(self, weights: Weights) -> None:
        epoch, world_size = f"{self.label}/{weights.name}/{uuid.uuid4().hex[:8]}", 1 + self.engine.num_workers
        receiving = asyncio.create_task(self._receive(weights, epoch, world_size))
        try:
            payload = await asyncio.to_thread(weights.send, epoch, world_size, lambda: not receiving.done())
            await receiving
        except (RuntimeError, OSError) as error:
            await self._explain(receiving, weights, error)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        if weights.kind in PULLED_KINDS:
            await self._fetch(weights, payload)
        await self.engine.post("finish_weight_update", {"weight_version": f"{self.label}{LOADING}"})

    async def _explain(self, receiving: asyncio.Task[None], weights: Weights, error: Exception) -> None:
        """The engine's own words come first, where it has any."""
        if receiving.done() and not receiving.cancelled() and (told := receiving.exception()) is not None:
            raise told
        raise PeerDied(
            f"sending {weights.name} to {self.engine.url} broke: {error} - expected it to take all of it. Look at its "
            "log."
        ) from error

    async def _receive(self, weights: Weights, epoch: str, world_size: int) -> None:
        info = {"kind": weights.kind, "host": weights.host, "port": weights.port, "epoch": epoch}
        info |= {"rank_offset": 1, "world_size": world_size, "bucket_bytes": weights.bucket_bytes}
        info["timeout_s"] = self._timeout_s
        await self.engine.post("init_weight_transfer_engine", {"init_info": info})
        await self.engine.post("start_weight_update")
        if weights.kind not in PULLED_KINDS:
            await self._fetch(weights, {})

    async def _fetch(self, weights: Weights, payload: dict[str, Any]) -> None:
        info = {"specs": msgspec.to_builtins(weights.specs), "payload": payload}
        await self.engine.post("update_weights", {"update_info": info})

    async def _compare(self, weights: Weights) -> None:
        for worker, (digests, incomplete) in enumerate(await self.engine.worker_reports()):
            who = f"{self.engine.url}, worker {worker}"
            if difference := first_difference(weights.digests, digests):
                raise WeightsMismatch(
                    f"{weights.name} did not arrive at {who} as it was sent: {difference}. Expected the same digests. "
                    "Type the same command again; if it stays so, look at the engine's log."
                )
            if incomplete:
                raise WeightsMismatch(
                    f"{weights.name} was not loaded whole by {who}: {', '.join(incomplete[:5])} kept old weights. "
                    "Expected every tensor of the model: is this a checkpoint of the model that it serves?"
                )

    async def _num_requests(self) -> int:
        """Running and waiting, as vLLM's metrics have it; 0 where it has none."""
        try:
            async with self.engine.session.get(f"{self.engine.url}/metrics") as response:
                text = await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return 0
        return sum(map(_count, text.splitlines()))

    async def _get(self, path: str, otherwise: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self.engine.session.get(f"{self.engine.url}/{path}") as response:
                answer = await response.json(content_type=None) if response.status == 200 else otherwise
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise PeerDied(f"{self.engine.url}/{path} got no answer: {error or type(error).__name__}") from error
        return answer if isinstance(answer, dict) else otherwise

    async def dtype(self) -> str:
        """That it computes in, where it says so; float32 loses nothing on the way to any."""
        info = await self._get("server_info?config_format=json", {})
        told = ((info.get("vllm_config") or {}).get("model_config") or {}).get("dtype")
        known = str(told).removeprefix("torch.")
        return known if known in ("bfloat16", "float16", "float32") else "float32"

    async def base_model(self) -> str | None:
        """Where its base model is, in its own words."""
        cards = (await self._get("v1/models", {})).get("data") or [{}]
        card = cards[0] if isinstance(cards[0], dict) else {}
        root = card.get("root") or card.get("id")
        return root if isinstance(root, str) else None


def _count(line: str) -> int:
    """Of a line in Prometheus's format."""
    if not line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{", "vllm:num_requests_waiting ")):
        return 0
    try:
        return int(float(line.rsplit(" ", 1)[1]))
    except (ValueError, IndexError, OverflowError):
        return 0
