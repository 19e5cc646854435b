"""An inference engine and a trainer that need no model: real servers and clients on the real wire, with scripted minds.

The engine answers on loopback what vLLM answers; its "weights" are a digest per tensor and its logprobs a formula of
the version, so whatever would show with real weights (an old version, half an update, an exchanged tensor) shows here.
"""

import asyncio
import base64
import hashlib
import random
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from trireme import messages
from trireme.algo.pictures import PictureRules, expand
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.pictures import size_of
from trireme.messages import Picture
from trireme.transport.bearer import may_enter
from trireme.transport.control import ControlClient

TENSORS = ("model.embed_tokens.weight", "model.norm.weight")
PROBE_IDS = [3, 1, 4, 1, 5]
NOTHING = {"ahead": False, "digests": {}, "incomplete": []}  # with the failure of a worker
PATIENCE_S = 20.0


def digests_of(version: int) -> dict[str, str]:
    return {name: f"{name}@{version}" for name in TENSORS}


def logprob_of(token: int, place: int, version: int) -> float:
    return -0.1 - 0.01 * (token % 7) - 0.001 * (place % 5) - 0.05 * (version % 11)


def answer_at_random(asked: "Asked") -> list[int]:
    return [asked.rng.randrange(20, 40) for _ in range(asked.rng.randrange(1, 7))] + [asked.end]


class WeightWire:
    """What gloo is in a real run: a group per epoch, in which the trainer's tensors reach the engines."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, asyncio.Queue[dict[str, str]]] = {}

    def group(self, epoch: str) -> asyncio.Queue[dict[str, str]]:
        return self._groups.setdefault(epoch, asyncio.Queue())

    def send(self, epoch: str, digests: dict[str, str]) -> None:
        self._loop.call_soon_threadsafe(lambda: self.group(epoch).put_nowait(digests))


@dataclass
class Asked:
    number: int
    ids: list[int]
    sampling: dict[str, Any]
    version: int  # live in the engine when it arrived
    rng: random.Random
    end: int  # the end-of-turn token
    pictures: tuple[Picture, ...] = ()  # in `ids`
    core: int = 0  # of the engine
    salt: str = ""
    oldest: list[int] = field(default_factory=list)  # version that computed anything each token attended to
    met: int = 0  # updates that came meanwhile


@dataclass
class FakeEngine:
    wire: WeightWire
    end: int = 2
    answer: Callable[[Asked], list[int]] = answer_at_random
    token_s: float = 0.0  # per token
    block: int = 0  # tokens of a block of its prefix cache; 0: it has none, and says nothing of it
    prefill_s: float = 0.0  # per token of a prompt that its cache does not hold, one prompt after the other
    num_computed: int = 0  # tokens
    delay: Callable[[Asked], Awaitable[None]] | None = None  # before the first token
    refuse: Callable[[Asked], int | None] = lambda asked: None  # an HTTP status instead of an answer
    mangle: Callable[[dict], dict] = lambda response: response
    mangle_call: Callable[[dict], dict] = lambda answer: answer  # of its workers
    routes: Callable[[Asked, list[int]], str] | None = None  # what it says of the experts that it used
    rules: PictureRules | None = None  # where it takes pictures
    drop_next: int = 0  # so many requests for tokens end with a closed connection
    digest_error: str | None = None  # a tensor that its last worker reports another digest for
    incomplete: tuple[str, ...] = ()
    probe_error: float = 0.0  # added to its last core's logprobs of prompts
    probe_status: int = 200
    probe_s: float = 0.0
    num_workers: int = 1
    num_cores: int = 1
    has_room: bool = True  # to take new weights in while it serves
    failing_route: str | None = None  # a control route that answers 500
    dead: bool = False  # the engine core; the HTTP server stands
    token: str | None = None  # that it wants to be shown
    shown: set[str] = field(default_factory=set)  # what it was shown
    port: int = field(default_factory=free_port)
    weights: dict[str, str] = field(default_factory=dict)
    version: int = -1
    requests: list[Asked] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # of control routes, in order
    epochs: list[str] = field(default_factory=list)  # joined
    names: list[str] = field(default_factory=list)  # of adapters
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()
        self._at_once = 0
        # by core, salt and beginning: the oldest version that has computed a part of this beginning in a cache
        self._known: dict[tuple[int, str, int], int] = {}
        self.num_cleared = 0
        self._prefilling = asyncio.Lock()
        self._epoch = ""
        self._announced: asyncio.Task[dict[str, str]] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paused(self) -> bool:
        return not self.running.is_set()

    @property
    def version_name(self) -> str:
        """As vLLM: `default` is no version."""
        return str(self.version) if self.version >= 0 else "default"

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version_name})

    async def world_size(self, request: web.Request) -> web.Response:
        cores = self.num_cores if request.query.get("include_dp") == "false" else 1
        return web.json_response({"world_size": self.num_workers // cores})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("base", *self.names)]})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        self.names.append((await request.json())["lora_name"])
        return web.Response(text="Success")

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling, core = body["sampling_params"], int(request.headers.get("X-data-parallel-rank", 0))
        if "prompt_logprobs" in sampling:
            return await self._probe(body | {"core": core})
        number, (ids, pictures) = len(self.requests), self._expand(body)
        rng = random.Random(str((sampling.get("seed", number), ids, self.version)))
        of = {"pictures": tuple(pictures), "core": core, "salt": body.get("cache_salt", "")}
        asked = Asked(number, ids, sampling, self.version, rng, self.end, **of)
        self.requests.append(asked)
        if self.drop_next > 0:
            self.drop_next -= 1
            request.transport.abort()
            return web.Response()
        if status := self.refuse(asked):
            return web.json_response({"error": f"refused with {status}"}, status=status)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return web.json_response(self.mangle(await self._sample(asked)))
        finally:
            self._at_once -= 1

    def _expand(self, body: dict[str, Any]) -> tuple[list[int], list[Picture]]:
        """As vLLM: a token for each block of each picture."""
        if not (parts := body.get("content_parts")):
            return body["token_ids"], []
        assert self.rules is not None, "pictures for a model that does not see"
        files = [base64.b64decode(part["url"].removeprefix("data:image/png;base64,")) for part in parts]
        grids = [(hashlib.sha256(file).hexdigest(), *self.rules.grid(*size_of(file))) for file in files]
        return expand(body["token_ids"], self.rules.token, grids)

    async def _sample(self, asked: Asked) -> dict[str, Any]:
        if self.delay is not None:
            await self.delay(asked)
        await self.running.wait()
        begun, cleared = self.version, self.num_cleared
        num_cached, oldest = self._recall(asked, asked.ids, begun)
        if self.prefill_s:
            async with self._prefilling:
                await asyncio.sleep(self.prefill_s * (len(asked.ids) - num_cached))
        ids = self.answer(asked)[: asked.sampling["max_tokens"]]
        spans: list[dict[str, Any]] = []
        logprobs = []
        for place, token in enumerate(ids):
            if self.token_s:
                await asyncio.sleep(self.token_s)
            await self.running.wait()
            if cleared != self.num_cleared:  # whatever was computed before is forgotten
                self.num_computed += len(asked.ids) + place if spans else 0
                cleared, oldest = self.num_cleared, self.version
            if not spans or spans[-1]["version"] != self.version_name:
                self.num_computed += 0 if spans else len(asked.ids) - num_cached
                asked.met += bool(spans) or self.version != begun
                spans.append({"version": self.version_name, "start": place, "end": place})
            spans[-1]["end"] = place + 1
            self.num_computed += 1
            asked.oldest.append(oldest)
            logprobs.append({"logprob": logprob_of(token, place, self.version), "token": str(token)})
        choice = {
            "index": 0, "token_ids": ids, "finish_reason": "stop" if ids and ids[-1] == self.end else "length",
            "logprobs": {"content": logprobs}, "weight_versions": spans,
        }  # fmt: skip
        if self.routes is not None:
            choice["routed_experts"] = self.routes(asked, ids)
        answer = {"request_id": str(asked.number), "choices": [choice], "prompt_logprobs": None}
        if self.block:
            self._recall(asked, asked.ids + ids, oldest)
            answer["usage"] = {"prompt_tokens_details": {"cached_tokens": num_cached}}
            answer["prefill_s"] = self.prefill_s * (len(asked.ids) - num_cached)
        return answer | ({"prompt_token_ids": asked.ids} if asked.pictures else {})

    def _recall(self, asked: Asked, ids: list[int], oldest: int) -> tuple[int, int]:
        """How many tokens of a prompt, in whole blocks, are known; as vLLM, never all. From now on the others are.

        Also the oldest version that computed any of them, or of the others, which `oldest` computes.
        """
        ends = range(self.block, len(ids), self.block) if self.block else ()
        beginnings = [(asked.core, asked.salt, hash(tuple(ids[:end]))) for end in ends]
        known = next((i for i, each in enumerate(beginnings) if each not in self._known), len(beginnings))
        oldest = min([oldest, *(self._known[each] for each in beginnings[:known])])
        self._known.update(dict.fromkeys(beginnings[known:], oldest))
        return known * self.block, oldest

    async def _probe(self, body: dict) -> web.Response:
        ids, error = body["token_ids"], self.probe_error if body["core"] == self.num_cores - 1 else 0.0
        await self.running.wait()
        await asyncio.sleep(self.probe_s)
        if self.probe_status != 200:
            return web.json_response({"error": f"a prompt of {len(ids)} tokens"}, status=self.probe_status)
        logprobs = [logprob_of(token, place, self.version) + error for place, token in enumerate(ids[1:])]
        known = [{str(token): {"logprob": found, "rank": 1}} for token, found in zip(ids[1:], logprobs, strict=True)]
        choice = {"token_ids": [7], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.0}]}}
        choice["weight_versions"] = [{"version": str(self.version), "start": 0, "end": 1}]
        return web.json_response({"choices": [choice], "prompt_logprobs": [None, *known]})

    async def control(self, request: web.Request) -> web.Response:
        route = request.path.strip("/")
        if (handler := getattr(self, f"_{route}", None)) is None:
            return web.Response(status=404)
        body = (await request.json() if request.can_read_body else {}) | dict(request.query)
        if route != "collective_rpc":
            self.calls.append(route)
        if route == self.failing_route:
            return web.json_response({"error": f"{route} broke"}, status=500)
        return web.json_response(await handler(body) or {})

    async def _collective_rpc(self, body: dict) -> dict[str, Any]:
        """Call a method of each worker, by whose name it is counted among the calls."""
        name = body["method"].removeprefix("trireme_")
        self.calls.append(name)
        fails = name == self.failing_route
        method = getattr(self, f"_{name}")
        good = {"failure": f"{name} broke"} | NOTHING if fails else await method(*body.get("args", []))
        return self.mangle_call({"results": [*[good] * (self.num_workers - 1), self._last_of(good)]})

    def _last_of(self, answer: dict) -> dict[str, Any]:
        """What the last worker answers where those before it answer this."""
        if answer.get("digests") and self.digest_error:
            answer = answer | {"digests": answer["digests"] | {self.digest_error: "another"}}
        return answer | ({"incomplete": list(self.incomplete)} if self.incomplete else {})

    async def _pause(self, body: dict) -> None:
        self.running.clear()
        if body.get("clear_cache") != "false":
            self._known.clear()
            self.num_cleared += 1

    async def _resume(self, body: dict) -> None:
        self.running.set()

    async def _join(self, info: dict) -> dict[str, Any]:
        self._epoch = info["epoch"]
        self.epochs.append(self._epoch)
        return {}

    async def _update(self, info: dict) -> dict[str, Any]:
        sent = info["payload"].get("digests") or await (self._announced or self.wire.group(self._epoch).get())
        self._announced = None
        self.weights = {spec["name"]: sent[spec["name"]] for spec in info["specs"]}
        return await self._weight_report()

    async def _update_weight_version(self, body: dict) -> None:
        self.version = int(body["new_version"])

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _receive_ahead(self, specs: list[dict]) -> dict[str, Any]:
        if self.has_room:
            self._announced = asyncio.create_task(self.wire.group(self._epoch).get())
        return {"ahead": self.has_room}

    async def _weight_report(self) -> dict[str, Any]:
        return {"digests": self.weights, "incomplete": []}


def door_keeper(secret: str | None, shown: set[str]) -> Any:
    @web.middleware
    async def keep(request: web.Request, handler: Any) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "")
        shown.add(authorization)
        if may_enter(request.path, authorization, secret):
            return await handler(request)
        return web.json_response({"error": "no"}, status=401)

    return keep


def build_app(engine: FakeEngine, *middlewares: Any) -> web.Application:
    app = web.Application(client_max_size=1 << 26, middlewares=middlewares)
    gets = {"health": engine.health, "get_world_size": engine.world_size, "weight_info": engine.weight_info}
    for path, handler in (gets | {"is_paused": engine.is_paused, "v1/models": engine.models}).items():
        app.router.add_get(f"/{path}", handler)
    app.router.add_post("/inference/v1/generate", engine.generate)
    app.router.add_post("/v1/load_lora_adapter", engine.load_lora_adapter)
    app.router.add_post("/{route}", engine.control)
    return app


@asynccontextmanager
async def serving(app: web.Application, port: int, host: str = "127.0.0.1") -> AsyncIterator[None]:
    """Serve in the running event loop. As vLLM, requests that nobody waits for are aborted."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def open_fake_engine(wire: WeightWire | None = None, **knobs: Any) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(wire or WeightWire(), **knobs)
    async with serving(build_app(engine, door_keeper(engine.token, engine.shown)), engine.port):
        try:
            yield engine
        finally:
            engine.running.set()


class Stopped(Exception):
    """A trainer that nobody waits for any more."""


class FakeTrainer:
    """Asks what the real one asks, in its order, over the real wire. Its training is to count."""

    def __init__(self, config: RunConfig, wire: WeightWire, *, until: int | None = None, **knobs: Any) -> None:
        self.version = 0
        self.incarnation = uuid.uuid4().hex
        self.batches: list[messages.BatchReply] = []
        self.published: list[int] = []
        self.asked_to_publish: list[int] = []
        self.newest = -1
        self.attempt = 0
        self.unconfirmed: messages.PolicySent | None = None
        self.before_step: Callable[[int], None] = lambda version: None
        self.patience_s = PATIENCE_S
        self.stop = threading.Event()
        self._config = config
        self._wire = wire
        self._until = config.max_steps if until is None else until
        self._waits = Waits("trainer")
        for name, value in knobs.items():
            setattr(self, name, value)

    def train(self) -> None:
        """In a thread. Raises: PeerRefused, DeadlineExceeded."""
        self.connect()
        with suppress(Stopped), closing(self.control):
            self.newest = self.ask(messages.GetNewest(self._config.run_id), what="how far the run had come").version
            self.publish_if_new()
            while self.version < self._until and not self.stop.is_set():
                self.batches.append(self.get_batch(self.version))
                self.confirm()
                self.before_step(self.version)
                self.version += 1
                self.publish_if_new()
            self.confirm()
            if self.version == self._config.max_steps:
                done = messages.Done(self._config.run_id, self.version)
                while isinstance(self.ask(done, what="bye"), messages.Publish):
                    self.publish()

    def connect(self) -> None:
        address = f"tcp://{self._config.hosts.orchestrator}:{self._config.ports.batches}"
        self.control = ControlClient(address, self._waits)

    def get_batch(self, step: int, *, rank: int = 0, world: int = 1) -> messages.BatchReply:
        request = messages.GetBatch(run_id=self._config.run_id, step=step, rank=rank, world=world)
        while isinstance(reply := self.ask(request, what=f"batch {step}"), messages.Publish):
            if self.unconfirmed is not None:
                self.confirm()
            else:
                self.asked_to_publish.append(self.version)
                self.publish()
        assert isinstance(reply, messages.BatchReply), reply
        return reply

    def publish_if_new(self) -> None:
        if self.version > self.newest:
            self.send()
            if self.unconfirmed is not None:
                self.control.tell(self.unconfirmed)

    def publish(self) -> None:
        self.send(everywhere=False)
        self.confirm(everywhere=False)

    def send(self, *, everywhere: bool = True) -> None:
        while True:
            self.attempt += 1
            told = {"incarnation": self.incarnation, "everywhere": everywhere}
            go = self.ask(ready_message(self._config, self.version, self.attempt, **told), what="the engines")
            if isinstance(go, messages.Live):
                self.published.append(self.version)
                return
            if isinstance(go, messages.Go):
                break
        sent = sent_message(self._config, self.version, self.attempt)
        if not sent.payload:
            self._wire.send(go.epoch, sent.digests)
        self.unconfirmed = sent

    def confirm(self, *, everywhere: bool = True) -> None:
        while (sent := self.unconfirmed) is not None:
            self.unconfirmed = None
            reply = self.ask(sent, what=f"version {self.version} live")
            assert isinstance(reply, (messages.Live, messages.Again)), reply
            if isinstance(reply, messages.Live):
                self.published.append(self.version)
            else:
                self.send(everywhere=everywhere)

    def beat(self, state: str, waits: list[str]) -> None:
        self.ask(messages.Heartbeat(self._config.run_id, "trainer", state, self.version, waits), what="its heartbeat")

    def ask(self, request: Any, *, what: str) -> Any:
        if self.stop.is_set():  # whoever listens there by now is the next run's
            raise Stopped
        return self.control.ask(request, what=what, deadline_s=self.patience_s)


def ready_message(
    config: RunConfig, version: int, attempt: int = 1, *, incarnation: str = "one", everywhere: bool = True
) -> messages.PolicyReady:
    specs = [messages.TensorSpec(name=name, dtype="float32", shape=[4]) for name in TENSORS]
    address = {"kind": config.weight_broadcast.type, "host": "127.0.0.1", "port": 0}
    about = {"run_id": config.run_id, "version": version, "attempt": attempt}
    return messages.PolicyReady(**about, **address, incarnation=incarnation, everywhere=everywhere, specs=specs)


def sent_message(config: RunConfig, version: int, attempt: int = 1, *, noise_age: int = 0) -> messages.PolicySent:
    digests = digests_of(version)
    logprobs = [logprob_of(token, place, version) for place, token in enumerate(PROBE_IDS[1:])]
    probe = messages.Probe(PROBE_IDS, logprobs)
    if noise_age:  # an older checkout, measured with this file, does not know it
        probe = msgspec.structs.replace(probe, noise_age=noise_age)
    payload = {"digests": digests} if config.weight_broadcast.type == "filesystem" else {}
    about = {"run_id": config.run_id, "version": version, "attempt": attempt}
    return messages.PolicySent(**about, digests=digests, probe=probe, payload=payload)
