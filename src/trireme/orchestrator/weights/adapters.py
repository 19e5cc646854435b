"""Adapters in engines that hold them beside the base model (`lora.sync = "adapter"`): put in place, and named.

The tensors have come with the weight transfer. What makes them answer requests are two more steps, each of which an
engine could leave out without a word: its workers put them where requests take them from, and report whether they did;
its server learns a name for them, under which the probe and all requests then ask.
"""

from __future__ import annotations

import aiohttp
import msgspec

from trireme.base.errors import PeerDied
from trireme.orchestrator.engines.pool import Engine, InferencePool


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def load_adapter(pool: InferencePool, engine: Engine) -> None:
    """Where engines hold adapters; otherwise there is nothing to do."""
    if pool.adapter is not None:
        await pool.post(engine, "collective_rpc", {"method": "trireme_load_adapter"})


async def name_adapter(pool: InferencePool, engine: Engine) -> None:
    """Once in an engine's life. Its workers have the adapter by then, so that nothing is read from the path.

    Raises: PeerDied where the engine refuses, with its words.
    """
    if pool.adapter is None or pool.adapter in await _models(pool, engine):
        return
    body = {"lora_name": pool.adapter, "lora_path": pool.adapter}
    try:
        async with pool.session.post(f"{engine.url}/v1/load_lora_adapter", json=body) as response:
            words = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerDied(f"{engine.url}/v1/load_lora_adapter got no answer: {error or type(error).__name__}") from error
    if response.status >= 400:
        raise PeerDied(f"{engine.url} does not know the adapter ({response.status}): {words[:500]}")


async def _models(pool: InferencePool, engine: Engine) -> set[str]:
    try:
        async with pool.session.get(f"{engine.url}/v1/models") as response:
            answer = msgspec.json.decode(await response.read(), type=_Models)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerDied(f"{engine.url}/v1/models got no answer: {error or type(error).__name__}") from error
    return {model.id for model in answer.data}
