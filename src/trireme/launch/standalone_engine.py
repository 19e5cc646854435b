"""An engine without a run, for commands such as `trireme env check NAME --model FOLDER`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError, PeerDied
from trireme.base.processes import last_lines, loopback_problem
from trireme.base.waiting import Waits
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.launch.children import open_children
from trireme.launch.plan import ProcessSpec, plan

POLL_S = 0.25
ANSWER_WITHIN_S = 2.0
LEAVE_S = 5.0  # between SIGTERM and SIGKILL: there is nothing to save, and vLLM may ignore SIGTERM while it starts


@asynccontextmanager
async def open_engine(config: RunConfig, devices: Devices, waits: Waits) -> AsyncIterator[str]:
    """Start the engine of a resolved run and yield its URL. Raises as `open_server`."""
    run_file = config.paths.run_config
    write_run(config, run_file)
    spec = plan(config, run_file, devices)["inference"]
    async with open_server(spec, waits, deadline_s=config.inference.start_timeout_s) as url:
        yield url


@asynccontextmanager
async def open_server(
    spec: ProcessSpec, waits: Waits, *, deadline_s: float, grace_s: float = LEAVE_S
) -> AsyncIterator[str]:
    """Start a server and yield its URL once it is healthy. Afterwards it is ended, on any way out.

    Raises:
        ConfigError: this machine has no loopback interface.
        PeerDied: it ended while starting; the message has the end of its log.
        DeadlineExceeded: it was not healthy in time.
    """
    assert spec.health is not None, spec

    # Without a loopback interface the health check would fail until the deadline, and not show why.
    if problem := loopback_problem():
        raise ConfigError(problem)

    with open_children([spec], lambda: False, grace_s) as processes:
        child = processes.children[0]
        with waits.waiting("it to become healthy", peer=child.name, deadline_s=deadline_s) as wait:
            async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, trust_env=False) as client:
                while True:
                    with suppress(httpx.HTTPError):
                        if (await client.get(spec.health)).status_code == 200:
                            break

                    # `look` records an exit of the child, and notices its descendants.
                    processes.look()
                    wait.check()

                    # No restart here: an engine that dies while it starts would do so again.
                    if child.exit is not None:
                        end = "\n".join(f"  {line}" for line in last_lines(spec.log, 12))
                        raise PeerDied(
                            f"{child.name} ended while starting ({child.exit}). The end of its log:\n{end}\nExpected "
                            f"it to serve the model. See the whole log for the cause: {spec.log}"
                        )

                    await asyncio.sleep(POLL_S)
        yield spec.health.removesuffix("/health")
