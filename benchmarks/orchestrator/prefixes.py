"""How many tokens engines compute per token of long conversations, and how long these take.

    uv run python -m benchmarks.orchestrator.prefixes [--update-s 0 2 5] [--keep always] [--against FOLDER]
    uv run python -m benchmarks.orchestrator.prefixes --real [--keep always] [--against FOLDER]

Groups of conversations begin with the same prompt and take their turns through the orchestrator's pool of engines, with
a pause for the environment between two turns. Every `update-s` seconds all engines get a new version (0: never), which
empties their caches and makes them compute what is under way again unless `keep` says otherwise
(`inference.keep_prefix_cache`). A token counts once as existing, however often
it is read; the prompt of a group counts once. `--against` runs the same with the sources of another checkout.

Scripted engines take a set time per token, of a prompt one request after the other and of answers all at once, and
count what they compute. With --real, vLLM computes; what it counts in `/metrics` is taken, and what an update made it
compute again from the versions of each turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks import ROOT
from benchmarks.measuring import command, print_table

VOCABULARY = range(20, 120)
COLUMNS = ["update every, s", "sources", "computed per token", "all conversations, s", "turn p50, s", "turn p95, s"]


@dataclass(frozen=True)
class Work:
    engines: int
    groups: int
    members: int
    turns: int
    prompt: int
    sampled: int
    given: int
    tool_s: float
    update_s: float
    real: bool
    keep: str
    block: int


def main(
    engines: int = 2,
    groups: int = 4,
    members: Annotated[int, "conversations that begin with the same prompt"] = 4,
    turns: int = 20,
    prompt: Annotated[int, "tokens of the first prompt"] = 300,
    sampled: Annotated[int, "tokens that the model answers in a turn"] = 40,
    given: Annotated[int, "tokens that the environment adds to it"] = 40,
    tool_s: Annotated[float, "mean pause of the environment"] = 0.1,
    update_s: Annotated[tuple[float, ...], "seconds between two versions; 0: none"] = (0.0, 5.0, 2.0),
    real: Annotated[bool, "vLLM with models/reverse-text-tiny"] = False,
    block: Annotated[int, "tokens of a block of a cache; vLLM on a CPU takes multiples of 32"] = 32,
    keep: Annotated[str, "`inference.keep_prefix_cache`", ("never", "running", "always")] = "never",
    against: Annotated[Path | None, "another checkout, measured by turns with this one"] = None,
    inside: Annotated[Path | None, "used by this program itself"] = None,
) -> None:
    if inside is not None:
        print(json.dumps(asyncio.run(measure(Work(**json.loads(inside.read_text()))))))
        return
    checkouts = {"this": ROOT} | ({"other": against.resolve()} if against else {})
    rows = []
    for every in update_s:
        work = Work(engines, groups, members, turns, prompt, sampled, given, tool_s, every, real, keep, block)
        for name, checkout in checkouts.items():
            found = measure_apart(checkout, work)
            rows.append([f"{every:g}", name, *(f"{value:.2f}" for value in found)])
    print_table(COLUMNS, rows)


def measure_apart(checkout: Path, work: Work) -> list[float]:
    """Measure in a process of its own, with the sources of `checkout`."""
    modules = os.pathsep.join(str(checkout / folder) for folder in ("src", "packages/trireme-worker"))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(asdict(work)))
        file.flush()
        words = [sys.executable, "-m", "benchmarks.orchestrator.prefixes", "--inside", file.name]
        variables = os.environ | {"PYTHONPATH": modules}
        ended = subprocess.run(words, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return json.loads(ended.stdout.splitlines()[-1])


# in a process whose sources may be another checkout's: imported there alone


async def measure(work: Work) -> list[float]:
    """Return the tokens computed per token, the seconds of all conversations, and the median and 95 % of a turn's."""
    from trireme.base.waiting import Waits
    from trireme.orchestrator.engines.pool import open_inference_pool

    limits: dict[str, Any] = {"max_model_len": 1 << 14, "timeout_s": 120.0, "max_concurrent": 1024}
    if work.keep != "never":  # another checkout may not know it
        limits["keep_prefix_cache"] = work.keep
    with ExitStack() as processes, tempfile.TemporaryDirectory(prefix="prefixes-") as folder:
        async with AsyncExitStack() as stack:
            servers = await open_engines(work, stack, processes, Path(folder))
            urls = [url for url, _ in servers]
            pool = await stack.enter_async_context(open_inference_pool(urls, waits=Waits("benchmark"), **limits))
            await publish(pool, 0, {})

            before, turns_s, again = [await count() for _, count in servers], list[float](), list[int]()
            began = time.perf_counter()
            updating = asyncio.create_task(publish_again(pool, work))
            numbers = range(work.groups * work.members)
            lengths = await asyncio.gather(*(converse(pool, work, number, turns_s, again) for number in numbers))
            seconds = time.perf_counter() - began
            updating.cancel()
            computed = sum([await count() for _, count in servers]) - sum(before) + work.real * sum(again)

    existing = sum(lengths) - work.groups * (work.members - 1) * work.prompt
    return [computed / existing, seconds, median(turns_s), sorted(turns_s)[int(0.95 * len(turns_s))]]


async def open_engines(work: Work, stack: AsyncExitStack, processes: ExitStack, folder: Path) -> list[tuple[str, Any]]:
    """Return the address of each engine, and what counts the tokens that it has computed."""
    from support.engines.fake_engine import WeightWire, open_fake_engine
    from support.runs.real_run import open_engine

    if not work.real:
        knobs: dict[str, Any] = {"block": work.block, "token_s": 0.01, "prefill_s": 1e-4}
        knobs["answer"] = lambda asked: asked.rng.choices(VOCABULARY, k=work.sampled)
        opened = [await stack.enter_async_context(open_fake_engine(WeightWire(), **knobs)) for _ in range(work.engines)]
        return [(each.url, partial(counted, each)) for each in opened]

    longest = work.prompt + work.turns * (work.sampled + work.given)
    config = folder / "engine.toml"
    config.write_text(f'device = "cpu"\nseq_len = {longest + 64}\nmodel.name = "{ROOT}/models/reverse-text-tiny"\n')
    flags = ["--inference.cpu.threads", "1", "--inference.args.block-size", str(work.block)]
    urls = []
    for number in range(work.engines):
        engine = processes.enter_context(open_engine(folder / str(number), *flags, config=config, forked=False))
        urls.append(f"http://127.0.0.1:{engine.port}")
    return [(url, partial(counted_by_vllm, url)) for url in urls]


async def counted(engine: Any) -> int:
    return engine.num_computed


async def counted_by_vllm(url: str) -> float:
    """Return prompt tokens that were in no cache, and sampled tokens."""
    import httpx

    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        text = (await client.get(f"{url}/metrics")).text
    pattern = r"^vllm:(?:generation_tokens_total|prompt_tokens_by_source_total)\{([^}]*)\} (\S+)$"
    found = re.findall(pattern, text, re.MULTILINE)
    return sum(float(value) for labels, value in found if "source" not in labels or "local_compute" in labels)


async def publish(pool: Any, version: int, keeping: dict[str, bool]) -> None:
    """Do to the engines what an update does, to all at once and without tensors."""

    async def take(engine: Any) -> None:
        await engine.post("pause?mode=keep" + "&clear_cache=false" * len(keeping))
        await engine.post("update_weight_version", {"new_version": str(version)})
        await engine.post("resume")

    for engine in pool.engines:
        pool.quarantine(engine)
    await asyncio.gather(*map(take, pool.engines))
    for engine in pool.engines:
        pool.go_live(engine, version, **keeping)


async def publish_again(pool: Any, work: Work) -> None:
    version = 0
    keeping = {} if work.keep == "never" else {"keeps_caches": True}
    while work.update_s:
        await asyncio.sleep(work.update_s)
        version += 1
        await publish(pool, version, keeping)


async def converse(pool: Any, work: Work, number: int, turns_s: list[float], again: list[int]) -> int:
    """Return the tokens of one whole conversation.

    Args:
        turns_s: how long each turn took is added.
        again: tokens that were computed again because an update came during a turn are added.
    """
    rng = random.Random(number)
    ids = random.Random(f"group {number // work.members}").choices(VOCABULARY, k=work.prompt)
    since: dict[str, int] = {}  # the oldest version that the conversation attended to
    for _ in range(work.turns):
        began = time.perf_counter()
        sampling = {"max_tokens": work.sampled, "temperature": 1.0, "ignore_eos": True}
        turn = await pool.generate(ids, sampling, **since)
        if work.keep == "always":
            since["since"] = min([turn.oldest, *since.values()])
        turns_s.append(time.perf_counter() - began)
        cuts = [place for place in range(1, len(turn.ids)) if turn.versions[place] != turn.versions[place - 1]]
        cuts = cuts if work.keep == "never" else []
        again.append(sum(len(ids) + cut for cut in cuts))
        await asyncio.sleep(rng.expovariate(1 / work.tool_s))
        ids = [*ids, *turn.ids, *rng.choices(VOCABULARY, k=work.given)]
    return len(ids) - work.given


if __name__ == "__main__":
    command(main)
