"""The fast path to vLLM's generation: when a request reaches the engine."""

import asyncio
from types import SimpleNamespace

from trireme.inference.fast_generate import PATH, FastGenerate

BODY = b'{"token_ids": [1], "sampling_params": {"max_tokens": 1, "logprobs": 0}}'


class Asked:
    """Requests by the fast path to an engine that ends none before `end` is set; `events` has what happened."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.end = asyncio.Event()
        self._server = FastGenerate(self._own_route)
        self._state = SimpleNamespace(engine_client=SimpleNamespace(generate=self._generate))

    async def ask(self, *headers: tuple[bytes, bytes]) -> None:
        body = iter([{"type": "http.request", "body": BODY}])

        async def receive() -> dict:
            return next(body, None) or await asyncio.Event().wait()  # a client that waits for its answer

        self.events.append("asked")
        scope = {"type": "http", "path": PATH, "method": "POST", "headers": headers}
        await self._server(scope | {"app": SimpleNamespace(state=self._state)}, receive, receive)

    async def _generate(self, *args: object, data_parallel_rank: int | None, **more: object):
        self.events.append("started" if data_parallel_rank is None else f"started by core {data_parallel_rank}")
        await self.end.wait()
        raise RuntimeError("the engine died")  # so that vLLM's own route has to answer
        yield

    async def _own_route(self, *args: object) -> None:
        self.events.append("passed on")


def test_requests_for_an_idle_engine_start_together():
    async def ask_three() -> list[str]:
        asked = Asked()
        asked.end.set()
        await asyncio.gather(*(asked.ask() for _ in range(3)))
        return [event for event in asked.events if event != "passed on"]

    assert asyncio.run(ask_three()) == ["asked"] * 3 + ["started"] * 3


def test_request_for_a_busy_engine_is_not_held():
    async def ask_two() -> list[str]:
        asked = Asked()
        first = asyncio.create_task(asked.ask())
        while "started" not in asked.events:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(asked.ask())
        await asyncio.sleep(0)  # one pass of the event loop, in which no timer is due
        events = list(asked.events)
        asked.end.set()
        await asyncio.gather(first, second)
        return events

    assert asyncio.run(ask_two()) == ["asked", "started"] * 2


def test_a_request_is_started_by_the_core_that_it_names():
    async def ask_one() -> list[str]:
        asked = Asked()
        asked.end.set()
        await asked.ask((b"host", b"a"), (b"x-data-parallel-rank", b"1"))
        return asked.events

    assert asyncio.run(ask_one()) == ["asked", "started by core 1", "passed on"]
