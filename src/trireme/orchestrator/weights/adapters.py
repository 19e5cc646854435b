"""Adapters in engines that hold them on top of the base model (`lora.sync = "adapter"`): loaded, and named.

The weight transfer has brought the tensors. Two more steps make them answer requests, and an engine could skip either
silently: its workers load them where requests read them, and report whether they did; its server registers a name for
them, which the probe and all requests then use.
"""

from __future__ import annotations

import msgspec

from trireme.base.errors import PeerDied
from trireme.orchestrator.engines.engine import Engine


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def load_adapter(engine: Engine) -> None:
    await engine.post("collective_rpc", {"method": "trireme_load_adapter"})


async def name_adapter(engine: Engine, name: str) -> None:
    """Register the adapter's name, once in an engine's life. Its workers hold it already: no file is read.

    Raises: PeerDied where the engine refuses, with its words.
    """
    try:
        models = msgspec.convert(await engine.get("v1/models"), _Models).data
    except msgspec.ValidationError as error:
        raise PeerDied(f"{engine.url}/v1/models cannot be read: {error}") from error
    if name not in {model.id for model in models}:
        await engine.post("v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
