"""An engine that answers at once, and a trainer that only counts: what a benchmark of the orchestrator runs beside.

Both live in one process of their own, so that the orchestrator's CPU time is its own. The engine speaks vLLM's routes
over HTTP; its answers are chosen from a few that were written down beforehand. The trainer is that of the tests
(`tests/support/engines/fake_engine.py`): it asks for every batch over the real wire, and announces, sends and confirms
every version.

    python -m benchmarks.orchestrator.instant RUN.json    stays until its input ends
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.measuring import command
from support.engines.fake_engine import FakeEngine, FakeTrainer, WeightWire, logprob_of
from trireme.config.run import RunConfig
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.spans import TRAINER, open_spans

ANSWERS = 64
"""Different ones, of each version."""

DEADLINE_S = 600.0
REPORTED = dict.fromkeys(("loss", "grad_norm", "policy/entropy", "time/step", *(f"perf/{n}" for n in range(16))), 0.5)


class InstantEngine(FakeEngine):
    """Knows what it will say before it is asked."""

    def __init__(self, wire: WeightWire, *, end: int, letters: list[int], most_tokens: int) -> None:
        super().__init__(wire, end=end)
        rng = random.Random(0)
        lengths = [rng.randrange(1, most_tokens) for _ in range(ANSWERS)]
        self._said = [[rng.choice(letters) for _ in range(length)] + [end] for length in lengths]
        self._written: list[bytes] = []
        self._written_for = -2
        self._num_asked = 0
        self._waiting: list[Callable[[], None]] = []

    def respond(self, method: str, path: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        """Call `answer` with a whole HTTP response, at once unless generation is paused."""
        route = path.partition("?")[0].strip("/")
        if route == "inference/v1/generate" and b'"prompt_logprobs"' not in body:
            self._when_running(lambda: answer(self._generated(body)))
        elif route == "inference/v1/generate":
            ids = json.loads(body)["token_ids"]
            self._when_running(lambda: answer(_http(self._probed(ids))))
        elif route in ("health", "get_world_size", "weight_info", "is_paused"):
            version = str(self.version) if self.version >= 0 else "default"
            answer(_http({"world_size": 1, "weight_version": version, "is_paused": self.paused}))
        else:
            asyncio.get_running_loop().create_task(self._controlled(route, json.loads(body or b"{}"), answer))

    def _when_running(self, act: Callable[[], None]) -> None:
        if self.paused:
            self._waiting.append(act)
        else:
            act()

    async def _resume(self, body: dict) -> None:
        await super()._resume(body)
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()

    async def _controlled(self, route: str, body: dict, answer: Callable[[bytes], None]) -> None:
        answer(_http(await getattr(self, f"_{route}")(body) or {}))

    def _generated(self, body: bytes) -> bytes:
        """Return the answer that belongs to a request with a seed, to any other the next one."""
        if self._written_for != self.version:
            self._written = [_http(self._completion(ids)) for ids in self._said]
            self._written_for = self.version
        self._num_asked += 1
        number = zlib.crc32(body) if b'"seed"' in body else self._num_asked
        return self._written[number % ANSWERS]

    def _completion(self, ids: list[int]) -> dict[str, Any]:
        """Return an answer with every field that vLLM writes."""
        logprobs = [
            {"token_id": token, "logprob": logprob_of(token, place, self.version), "top_logprobs": []}
            for place, token in enumerate(ids)
        ]
        choice = {
            "index": 0,
            "logprobs": {"content": logprobs},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(ids)}],
        }
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return {"request_id": "0123456789abcdef" * 2, "choices": [choice], "usage": usage, "prefill_s": 0.001}

    def _probed(self, ids: list[int]) -> dict[str, Any]:
        entries: list[dict | None] = [None]
        for place, token in enumerate(ids[1:]):
            entries.append({str(token): {"logprob": logprob_of(token, place, self.version), "rank": 1}})
        span = {"version": str(self.version), "start": 0, "end": 1}
        choice = {"token_ids": [7], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.0}]}}
        return {"choices": [choice | {"weight_versions": [span]}], "prompt_logprobs": entries}


def _http(content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    head = (
        "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """The part of HTTP/1.1 that the orchestrator needs: requests with a length, one after the other."""

    def __init__(self, engine: InstantEngine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = transport.write  # type: ignore[attr-defined]  # uvloop's are no asyncio.WriteTransport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, found, rest = head.partition(b"\r\ncontent-length:")
            length = int(rest.partition(b"\r\n")[0]) if found else 0
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            method, path, _ = self._received.split(b" ", 2)
            self._received = self._received[end + 4 + length :]
            self._engine.respond(method.decode(), path.decode(), body, self._write)


class CountingTrainer(FakeTrainer):
    """Keeps no batch, and writes metrics and spans, as long as those of a real one."""

    def __init__(self, config: RunConfig, wire: WeightWire) -> None:
        super().__init__(config, wire)
        self.batches = deque(maxlen=1)  # type: ignore[assignment]
        self.before_step = self._report
        self._metrics = MetricsFile(config.paths.metrics, TRAINER)

    def train(self) -> None:
        with open_spans(self._config.paths.spans) as spans:
            self._lane = spans.lane(TRAINER, what="start")
            super().train()

    def _report(self, step: int) -> None:
        self._lane.enter("train", step=step)
        self._metrics.append(step, REPORTED)

    def ask(self, request: Any, *, what: str) -> Any:
        with self._lane.doing("wait", why=what):
            return self.control.ask(request, what=what, deadline_s=DEADLINE_S)


async def accompany(config: RunConfig, *, end: int, letters: list[int], most_tokens: int) -> None:
    loop, wire = asyncio.get_running_loop(), WeightWire()
    for url in config.engine_urls:
        engine = InstantEngine(wire, end=end, letters=letters, most_tokens=most_tokens)
        await loop.create_server(partial(_Connection, engine), "127.0.0.1", int(url.rpartition(":")[2]))
    print("ready", flush=True)
    threading.Thread(target=CountingTrainer(config, wire).train, daemon=True).start()
    await asyncio.to_thread(sys.stdin.read)


def main(told: Path) -> None:
    given = json.loads(told.read_text())
    config = RunConfig.model_validate(given.pop("config"))
    uvloop.run(accompany(config, **given))


if __name__ == "__main__":
    command(main)
