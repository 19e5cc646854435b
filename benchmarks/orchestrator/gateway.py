"""Ask the gateway as many agent programs at once, against an engine that answers at once: what the way to it costs.

    uv run python -m benchmarks.orchestrator.gateway [--sessions 2000] [--rate 500] [--seconds 20] [--instant-disk]

One process is the orchestrator's half, on one core: HTTP, dialect, trajectory, chat template, tokens, and each turn on
disk. The other sends requests of conversations that grow to ten turns, at a fixed rate, and measures how long each
answer takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from multiprocessing import Pipe, Process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_TURNS = 10
TEXT = "The quick brown fox jumps over the lazy dog. " * 8
TOOLS = [{"type": "function", "function": {"name": "bash", "description": TEXT, "parameters": {"type": "object"}}}]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--instant-disk", action="store_true", help="leave out the turns on disk")
    options = parser.parse_args()
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory() as folder:
        server = Process(target=serve, args=(theirs, options, Path(folder)), daemon=True)  # an error here ends it too
        server.start()
        url, keys = ours.recv()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)
        latencies, failed, took_s = asyncio.run(drive(url, keys, options))
        ours.send("stop")
        cpu_s, num_turns = ours.recv()
        server.join()
    latencies.sort()
    p50, p90, p99 = (1000 * latencies[int(len(latencies) * share)] for share in (0.5, 0.9, 0.99))
    print(f"{len(keys)} open sessions, {len(latencies) / took_s:.0f} turns/s for {took_s:.0f} s, {failed} failed")
    print(f"latency p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")
    each_ms, load = 1000 * cpu_s / max(1, num_turns), cpu_s / took_s
    print(f"processor time of the gateway: {each_ms:.2f} ms a turn, {load:.0%} of a core")


def serve(pipe: Any, options: Namespace, folder: Path) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe, options, folder))


async def _serve(pipe: Any, options: Namespace, folder: Path) -> None:
    from support.models.tiny_tokenizer import CHATML, write_tokenizer
    from trireme.base.processes import rare_garbage_collection
    from trireme.base.waiting import Waits
    from trireme.config.orchestrator import Agent
    from trireme.config.orchestrator import Environment as EnvironmentConfig
    from trireme.config.run import RunConfig
    from trireme.config.sampling import Sampling
    from trireme.journal.model_turn import Turn
    from trireme.journal.turns import RolloutLog, turns_file
    from trireme.orchestrator.environments.programs import listen
    from trireme.orchestrator.gateway.endpoint import Endpoint
    from trireme.orchestrator.gateway.server import open_gateway
    from trireme.orchestrator.rollout.chat import ChatTokenizer
    from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
    from trireme.orchestrator.rollout.sampled_session import SampledSession

    tokenizer = ChatTokenizer(write_tokenizer(folder / "tokenizer", CHATML))
    answer = tokenizer.encode("It is done.<|im_end|>")
    num_turns = 0

    class Instant:
        vocab_size = 0

        async def generate(self, ids: list[int], sampling: dict[str, Any], *, routes_from: int | None = None) -> Any:
            nonlocal num_turns
            num_turns += 1
            return Turn(answer, [-0.5] * len(answer), [0] * len(answer), "stop")

    waits = Waits("orchestrator", folder)
    runner = RolloutRunner(RunConfig(), Instant(), tokenizer, journal=folder, waits=waits)  # type: ignore[arg-type]
    own = EnvironmentConfig(id="x", agent=Agent(command=("x",)))
    environment = SimpleNamespace(name="x", config=own, uses_gateway=True)
    async with open_gateway(listen("127.0.0.1", 0), "127.0.0.1") as gateway:
        keys = []
        for number in range(options.sessions):
            file = turns_file(folder, str(number), 0)
            on_disk = not options.instant_disk
            log = RolloutLog(file) if on_disk else None
            if log is not None:
                log.keeps_requests = True
            spec = RolloutSpec("train", 0, 0, name=str(number))
            session = SampledSession(runner, environment, spec, Sampling(), trained=True, log=log)  # type: ignore[arg-type]
            keys.append(Endpoint(gateway, session).open().key)
        pipe.send((gateway.url, keys))
        before = time.process_time()
        with rare_garbage_collection():  # as in the orchestrator
            while not pipe.poll():
                await asyncio.sleep(0.05)
        pipe.send((time.process_time() - before, num_turns))


async def drive(url: str, keys: list[str], options: Namespace) -> tuple[list[float], int, float]:
    """Send requests at a fixed rate, the sessions in turn. A session whose last answer is not in yet is passed over."""
    import aiohttp

    begin = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Do it."}]
    conversations = {key: list(begin) for key in keys}
    latencies: list[float] = []
    failed = 0

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def ask(key: str) -> None:
            nonlocal failed
            messages, began = conversations[key], time.perf_counter()
            body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
            headers = {"authorization": f"Bearer {key}"}
            async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                read = await response.json()
            latencies.append(time.perf_counter() - began)
            failed += response.status != 200
            messages += [read["choices"][0]["message"], {"role": "user", "content": TEXT}]
            if len(messages) > 2 * NUM_TURNS:
                conversations[key] = [*begin[:1], {"role": "user", "content": f"Do it again: {len(latencies)}"}]

        tasks: dict[str, asyncio.Task[None]] = {}
        began = time.perf_counter()
        number = 0
        while (now := time.perf_counter() - began) < options.seconds:
            while number < now * options.rate:
                key = keys[number % len(keys)]
                number += 1
                if key not in tasks or tasks[key].done():
                    tasks[key] = asyncio.create_task(ask(key))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks.values())
    return latencies, failed, time.perf_counter() - began


if __name__ == "__main__":
    main()
