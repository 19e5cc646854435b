"""Give one engine weights: join a transfer, take tensors in, pause, load, finish, and confirm what it holds.

A run's updates (`update.py`) and evaluations of checkpoints outside a run ask engines with these functions. In order:

    join               the engine's workers connect to the sender
    receives_ahead     they take tensors in while the engine serves, if there is room for both versions
    pausing            requests are frozen and cached prompts forgotten, or kept by choice; inside:
      load               the model gets the tensors, as they arrive or as they were taken in, and reports
      name_weights       vLLM's answers name these weights from here on
    require_confirmed  every worker has the digests of the sender, and no layer kept old weights

The cores of a mixture of experts compute in step, even without requests. A worker that blocks in `join` or `load` while
its peer on another core waits for it in a collective would never wake. So an engine of several cores is paused first:
vLLM answers `/pause` once all cores have agreed to stop.

An engine that holds adapters on top of the base model (`lora.sync = "adapter"`) needs one more step: `name_adapter` has
its server register a name for them, which the probe and all requests then use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from trireme.algo.weight_checks import first_difference
from trireme.base.errors import PeerDied, WeightsMismatch
from trireme.messages import InitInfo, TensorSpec, UpdateInfo
from trireme.orchestrator.engines.engine import Engine
from trireme.orchestrator.engines.responses import Ahead, Models, PauseInfo, WeightReport, WorkerAnswer

POLL_S = 0.001
"""Seconds between two checks whether an engine on a CPU has paused.

It answers between two of its iterations, which take longer.
"""


async def join(engine: Engine, info: InitInfo) -> None:
    """Connect the engine's workers to the sender. Raises PeerDied."""
    await engine.ask_workers("trireme_join", info, returns=WorkerAnswer)


async def receives_ahead(engine: Engine, specs: list[TensorSpec]) -> bool:
    """Have the engine take in what will be sent while it serves. Returns whether it can. Raises PeerDied."""
    return all(each.ahead for each in await engine.ask_workers("trireme_receive_ahead", specs, returns=Ahead))


@asynccontextmanager
async def pausing(
    engine: Engine, *, timeout_s: float, is_on_cpu: bool, keeps_caches: bool = False
) -> AsyncIterator[None]:
    """Freeze the engine's requests, and forget cached prompts unless it keeps them.

    vLLM answers `/pause` when its device is idle and no core computes any more. On a CPU an engine of one core computes
    nothing between two iterations, so there it is enough that `/is_paused` says so, which is 20 ms earlier.

    Raises: PeerDied if the engine does not pause.
    """
    # vLLM answers late. Polling may show earlier that requests are frozen.
    pause = asyncio.create_task(engine.post("pause?mode=keep" + "&clear_cache=false" * keeps_caches))
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await _until_paused(engine, pause, polls=is_on_cpu and engine.num_cores == 1)
        except TimeoutError:
            raise PeerDied(
                f"{engine.url} did not pause within {timeout_s:.0f} s and is still generating - expected it to stop "
                "after its current iteration. Look at logs/inference.stdout"
            ) from None
        yield
        # Polling may have been faster than the answer, whose failure still counts.
        await pause
    finally:
        pause.cancel()
        await asyncio.gather(pause, return_exceptions=True)


async def _until_paused(engine: Engine, pause: asyncio.Task[Any], *, polls: bool) -> None:
    """Return once requests are frozen. Raises PeerDied if the engine refuses: nothing may be loaded then."""
    while polls and not pause.done() and not (await engine.get("is_paused", returns=PauseInfo)).is_paused:
        await asyncio.sleep(POLL_S)
    if not polls or pause.done():
        await pause


async def load(engine: Engine, info: UpdateInfo) -> list[WeightReport]:
    """Have a paused engine load the tensors of a transfer. Returns what each worker holds then. Raises PeerDied."""
    return await engine.ask_workers("trireme_update", info, returns=WeightReport)


async def name_weights(engine: Engine, version: str) -> None:
    """Have the engine call its weights `version`. Raises PeerDied."""
    await engine.post("update_weight_version", {"new_version": version})


def require_confirmed(engine: Engine, reports: list[WeightReport], digests: dict[str, str], *, name: str) -> None:
    """Compare what each of the engine's workers reports with what was sent.

    Args:
        reports: by worker, as `load` returned them.
        digests: of the tensors that were sent, by name.
        name: of the weights, for messages.

    Raises: WeightsMismatch if a worker has other tensors, or a layer that kept old weights.
    """
    for number, report in enumerate(reports, 1):
        worker = f"worker {number} of {engine.num_workers}"
        if difference := first_difference(digests, report.digests):
            raise WeightsMismatch(
                f"{name} did not arrive at {engine.url}, {worker}, as it was sent: {difference}. Expected the "
                "digests of the sender. Look at the engine's log (logs/inference.stdout of a run)."
            )
        if report.incomplete:
            raise WeightsMismatch(
                f"{name} was not loaded whole by {engine.url}, {worker}: {', '.join(report.incomplete)} kept "
                "old weights. Expected every tensor of the model that it serves. See its log: logs/inference.stdout"
            )


async def name_adapter(engine: Engine, name: str) -> None:
    """Register the adapter's name, once in an engine's life. Its workers hold it already: no file is read.

    Raises: PeerDied if the engine refuses, with its words.
    """
    models = await engine.get("v1/models", returns=Models)
    if name not in {model.id for model in models.data}:
        await engine.post("v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
