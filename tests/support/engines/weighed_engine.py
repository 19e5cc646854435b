"""An engine that takes weights with the receiving code of a real one, and answers with a letter that they decide.

Its routes are those of vLLM that `eval` uses. Weights are what `write_weights` wrote: one number, which is the letter.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from support.engines.fake_engine import Asked, FakeEngine, WeightWire, build_app, serving
from support.models.tiny_tokenizer import END, write_tokenizer
from trireme.algo.digest import tensor_digest
from trireme.messages import InitInfo, UpdateInfo
from trireme.transport.weights.backends import open_receiver
from trireme.transport.weights.transfer import Receiver

LETTER = "letter.weight"


def write_weights(folder: Path, letter: str, *, rows: int = 2) -> Path:
    write_tokenizer(folder)
    tensors = {LETTER: torch.full((rows, 3), float(ord(letter))), "norm.weight": torch.arange(4.0)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class WeighedEngine(FakeEngine):
    """Its knobs are those of `FakeEngine`, and these."""

    model: Path = Path()
    label: str = "default"  # what it calls its weights
    is_frozen: bool = False  # paused from the beginning
    label_after: tuple[int, str] | None = None  # so many answers: then another client has given it weights
    gone_after: int | None = None  # requests for tokens: then it stops listening
    garbles: str = ""  # a letter whose digest it reports wrongly
    digests: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    answered: list[tuple[str, str]] = field(default_factory=list)  # label and letter

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_frozen:
            self.running.clear()
        self.loaded = load_file(self.model / "model.safetensors")
        self.answer = self._letter
        self.mangle = self._with_label
        self.gone = asyncio.Event()
        self.end = END
        self._tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self._receiver: Receiver | None = None

    @property
    def letter(self) -> str:
        return chr(int(self.loaded[LETTER][0, 0]))

    def _letter(self, asked: Asked) -> list[int]:
        letter = self.letter
        self.answered.append((self.label, letter))
        if self.gone_after is not None and len(self.requests) >= self.gone_after:
            self.gone.set()
        return [self._tokenizer.token_to_id(letter), END]

    def _with_label(self, response: dict[str, Any]) -> dict[str, Any]:
        for span in response["choices"][0]["weight_versions"]:
            span["version"] = self.label
        if self.label_after is not None and len(self.answered) == self.label_after[0]:
            self.label = self.label_after[1]
        return response

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "weighed", "root": str(self.model), "max_model_len": 256}]})

    async def _update_weight_version(self, body: dict[str, Any]) -> None:
        self.label = body["new_version"]

    async def _join(self, given: dict[str, Any]) -> dict[str, Any]:
        info = msgspec.convert(given, InitInfo)
        self._receiver = open_receiver(info, torch.device("cpu"))
        await asyncio.to_thread(self._receiver.join, info.epoch, info.rank_offset, info.world_size)
        return {}

    async def _update(self, given: dict[str, Any]) -> dict[str, Any]:
        info = msgspec.convert(given, UpdateInfo)
        tensors = await asyncio.to_thread(lambda: list(self._receiver.tensors(info.specs, info.payload)))
        self.loaded = {name: tensor.clone() for name, tensor in tensors}
        self.digests = {name: tensor_digest(tensor) for name, tensor in self.loaded.items()}
        return await self._weight_report()

    async def _weight_report(self) -> dict[str, Any]:
        wrong = {LETTER: "0"} if self.letter == self.garbles else {}
        return {"digests": self.digests | wrong, "incomplete": []}


@asynccontextmanager
async def open_weighed_engine(model: Path, **knobs: Any) -> AsyncIterator[WeighedEngine]:
    engine = WeighedEngine(WeightWire(), model=model, **knobs)
    app = build_app(engine)
    async with AsyncExitStack() as life:
        await life.enter_async_context(serving(app, engine.port))

        async def leave() -> None:
            await engine.gone.wait()
            engine.running.set()
            await life.aclose()

        leaving = asyncio.create_task(leave())
        try:
            yield engine
        finally:
            engine.gone.set()
            await leaving
