"""An inference server of two processes like vLLM's: real weights over the real wire, and scripted answers.

    python tests/support/engines/scripted_engine.py --run run.json

The API server forwards what it is asked to its engine core. The core receives weights with the receiving code of a
real engine and computes with none of them: what it "samples" is a function of the digests of what it has loaded, so a
lost tensor, half an update or another version show in every token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run as a script, too

from support.engines.fake_engine import Asked, FakeEngine, WeightWire, build_app, door_keeper, serving
from trireme.algo.weight_checks import is_of_adapter
from trireme.base.background import in_background
from trireme.base.faults import reach
from trireme.base.log import get_logger, start_logging
from trireme.base.token import token
from trireme.cli.command import open_process, run_command
from trireme.config.load import load_run_config
from trireme.config.run import RunConfig
from trireme.launch import joined_engine
from trireme.launch.plan import Plan
from trireme.messages import InitInfo, TensorSpec

if TYPE_CHECKING:
    from trireme.transport.weights.transfer import Receiver

log = get_logger("scripted")

LETTERS = range(20, 40)
UNIFORM = -4.85  # logprob of a token of 128: the trainer's importance ratios stay near 1
TOKEN_S = 0.005
WATCHDOG_S = 0.3  # vLLM looks every 5 s whether its core is alive, and leaves when it is not
KNOBS = "SCRIPTED_KNOBS"  # environment variable with further knobs of this engine, as JSON
ORPHAN_S = 120.0  # a core that nobody ended leaves at last: that of vLLM never would


def main() -> None:
    if "--core" in sys.argv:
        sys.argv.remove("--core")
        run_command("inference", core)
    if "--join" in sys.argv:
        real = joined_engine.plan

        def scripted(*args: Any) -> Plan:
            spec = real(*args)["inference"]
            return {"inference": replace(spec, argv=(sys.executable, __file__, *spec.argv[3:]))}

        joined_engine.plan = scripted  # type: ignore[attr-defined]
        run_command("inference", joined_engine.join)
    run_command("inference", serve)


def serve(argv: list[str]) -> int:
    config, run_file = open_process("inference", argv)
    start_logging("inference", config.log_level)
    command = [sys.executable, __file__, "--core", "--run", str(run_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = process.stdout.readline()  # the model is loaded then
    if not port:
        return abs(process.wait()) or 1
    asyncio.run(ApiServer(process, int(port)).run(config))
    return 0


class ApiServer:
    """Forwards to the core; says 503 on /health when it is dead, and leaves a little later."""

    def __init__(self, core: subprocess.Popen[bytes], port: int) -> None:
        self._core = core
        self._url = f"http://127.0.0.1:{port}"
        self._asking: set[asyncio.Task] = set()

    async def run(self, config: RunConfig) -> None:
        app = web.Application(client_max_size=1 << 26, middlewares=[door_keeper(token(), set())])
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._forward)
        server = config.inference.server
        patiently = {"timeout": aiohttp.ClientTimeout(total=None), "connector": aiohttp.TCPConnector(limit=0)}
        async with aiohttp.ClientSession(**patiently) as self._session, serving(app, server.port, server.host):
            while self._core.poll() is None:
                await asyncio.sleep(0.1)
            log.error("the engine core died with code %s", self._core.returncode)
            await asyncio.sleep(WATCHDOG_S)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._core.poll() is None else 503)

    async def _forward(self, request: web.Request) -> web.Response:
        """A request for tokens ends when nobody waits for it any more; what was asked about weights is done."""
        body = await request.read()
        asking = asyncio.create_task(self._ask_core(request.method, request.path_qs, body))
        if request.path.endswith("/generate"):
            return await asking
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asyncio.shield(asking)

    async def _ask_core(self, method: str, path: str, body: bytes) -> web.Response:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
                content = await response.read()
                return web.Response(status=response.status, body=content, content_type="application/json")
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"EngineCore encountered an issue: {error}"}, status=500)


def core(argv: list[str]) -> None:
    """Not tied to its parent: vLLM's is not either."""
    config, _ = load_run_config(argv, section="inference", program="inference")
    start_logging("inference.core", config.log_level)
    import torch

    torch.set_num_threads(1)
    asyncio.run(_run_core(config))


async def _run_core(config: RunConfig) -> None:
    engine = Core(config)
    app = build_app(engine)
    async with serving(app, engine.port):
        print(engine.port, flush=True)
        api_server, left_at = os.getppid(), None
        while left_at is None or time.monotonic() - left_at < ORPHAN_S:
            await asyncio.sleep(1)
            if left_at is None and os.getppid() != api_server:
                left_at = time.monotonic()


class Core(FakeEngine):
    """Holds digests instead of weights. What it is told about weights it does at once, and nothing else meanwhile."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(WeightWire(), answer=self._answer, mangle=self._uniform, token_s=TOKEN_S)
        model = Path(config.inference.model.name or config.model.name)
        with safe_open(model / "model.safetensors", framework="numpy") as file:
            self.tensors = sorted(file.keys())
        self.loaded = dict.fromkeys(self.tensors, "base")  # tensor -> digest of what would be computed with
        self.digests: dict[str, str] = {}  # of the last update
        self.unloaded: list[str] = []
        self._receiver: Receiver | None = None
        self._background: Future[list[tuple[str, str]]] | None = None
        self._info: InitInfo | None = None
        # its knobs, where vLLM's own arguments stand; an engine that joins may not differ in those
        for name, value in (config.inference.args | json.loads(os.environ.get(KNOBS, "{}"))).items():
            setattr(self, name, value)

    def _answer(self, asked: Asked) -> list[int]:
        """A function of the seed, the prompt and every tensor; without a seed random, unless greedy."""
        seed = asked.sampling.get("seed")
        if seed is None and asked.sampling.get("temperature", 1.0) > 0:
            seed = random.random()
        rng = random.Random(str((seed, asked.ids, self.fingerprint)))
        return [rng.choice(LETTERS) for _ in range(rng.randrange(1, 7))] + [asked.end]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.loaded, sort_keys=True).encode()).hexdigest()

    def _uniform(self, response: dict[str, Any]) -> dict[str, Any]:
        for entry in response["choices"][0]["logprobs"]["content"]:
            entry["logprob"] = UNIFORM + entry["logprob"] / 10
        return response

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        """As vLLM: it is looked for on disk unless the workers have it already."""
        assert any(is_of_adapter(name) for name in self.loaded), "no adapter is loaded"
        return await super().load_lora_adapter(request)

    async def generate(self, request: web.Request) -> web.Response:
        """As vLLM: whoever names nobody is answered by the base model, which is not what anybody wants to be here."""
        if (named := (await request.json()).get("model")) != (self.names[0] if self.names else None):
            return web.Response(status=404, text=f"asked for {named}, known is {self.names}")
        return await super().generate(request)

    async def _join(self, given: dict[str, Any]) -> dict[str, Any]:
        import torch

        from trireme.transport.weights.backends import open_receiver

        info = msgspec.convert(given, InitInfo)
        self._bucket_bytes, self._background = info.bucket_bytes, None
        if self._receiver is None or info != self._info:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver, self._info = open_receiver(info, torch.device("cpu")), info
        self._receiver.join(info.epoch, info.rank_offset, info.world_size)
        reach("engine.joined")
        return {}

    async def _update(self, info: dict[str, Any]) -> dict[str, Any]:
        assert self._receiver is not None, "update before join"
        specs = msgspec.convert(info["specs"], list[TensorSpec])
        keeps_base = all(is_of_adapter(spec.name) for spec in specs)
        self.digests = {name: d for name, d in self.digests.items() if keeps_base and not is_of_adapter(name)}
        background, self._background = self._background, None
        here = self._digested(self._receiver.tensors(specs, info["payload"]))
        for name, digest in here if background is None else background.result(60.0):
            self.digests[name] = digest
            if not is_of_adapter(name):
                self.loaded[name] = digest
        reach("engine.received")
        self.unloaded = [name for name in self.tensors if name not in self.digests]
        self.loaded = {name: digest for name, digest in self.loaded.items() if not is_of_adapter(name)}
        reach("engine.finished")
        self.loaded |= {name: digest for name, digest in self.digests.items() if is_of_adapter(name)}
        return await self._weight_report()

    async def _receive_ahead(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        """As vLLM's workers with our engine: a thread takes in what fits into one bucket."""
        from trireme.transport.weights.buckets import split_into_buckets

        assert self._receiver is not None, "receive_ahead before join"
        expected = msgspec.convert(specs, list[TensorSpec])
        if len(split_into_buckets(expected, self._bucket_bytes)) > 1:
            return {"ahead": False}
        coming = self._digested(self._receiver.tensors(expected, {}))
        self._background = in_background(lambda: list(coming), name="weights")
        return {"ahead": True}

    def _digested(self, coming: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
        from trireme.algo.digest import tensor_digest

        for number, (name, tensor) in enumerate(coming):
            yield name, tensor_digest(tensor)
            if number == 0:
                reach("engine.receiving")

    async def _weight_report(self) -> dict[str, Any]:
        forgotten = sorted(name for name in self.digests if is_of_adapter(name) and name not in self.loaded)
        return {"digests": self.digests, "incomplete": self.unloaded + forgotten}


if __name__ == "__main__":
    main()
