"""Answers the orchestrator: one asyncio task per rollout, one future per model turn that is asked for."""

import asyncio
import contextlib
import random
import socket
import sys
import traceback
from typing import Any

from trireme_columns import columns_of
from trireme_groups import Groups
from trireme_loading import Adapter, load_adapter
from trireme_rollout import Ask, EngineError, OverlongPrompt, RewardError, TurnCancelled
from trireme_wire import Message, Wire


class Server:
    """One loaded environment and its rollouts under way."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._groups = Groups(adapter.score)
        self._wire = Wire(self._receive)
        self._rollouts: dict[str, asyncio.Task] = {}
        self._turns: dict[str, asyncio.Future] = {}
        self._num_calls = 0
        self._stopped: asyncio.Future | None = None

    @classmethod
    def load(cls, request: Message) -> tuple["Server | None", Message]:
        """The server and the `ready` message, or no server and the `failed` message.

        Every worker of an environment seeds alike before it loads: example 17 must be the same one in each of them,
        and after a restart, also where the environment draws its examples without a seed of its own.
        """
        _seed(request.get("seed", 0))
        try:
            adapter = load_adapter(request["module"], kind=request["kind"], args=request.get("args") or {})
        except (Exception, SystemExit) as error:
            return None, _failed(error)
        return cls(adapter), {"type": "ready", **adapter.facts()}

    async def serve(self, orchestrator: socket.socket, *, first: Message, unread: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        orchestrator.setblocking(False)
        await loop.create_unix_connection(lambda: self._wire, sock=orchestrator)
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._adapter.serving())
            except Exception as error:
                self._wire.send(_failed(error))
                self._wire.flush()
                return
            self._wire.send(first)
            if unread:
                self._wire.data_received(unread)
            await self._stopped

    def _receive(self, message: Message) -> None:
        kind = message["type"]
        if kind == "reply":
            self._pass_on(message)
        elif kind == "run":
            self._start(message)
        elif kind == "cancel":
            self._cancel(message["task"])
        elif kind == "ping":
            self._wire.send({"type": "pong"})
        elif kind == "stop" and self._stopped and not self._stopped.done():
            self._stopped.set_result(None)

    def _start(self, message: Message) -> None:
        rollout = asyncio.get_running_loop().create_task(self._run(message))
        self._rollouts[message["task"]] = rollout  # held here: the event loop itself only keeps weak references

    def _cancel(self, task: str) -> None:
        if rollout := self._rollouts.get(task):
            rollout.cancel()

    def _pass_on(self, reply: Message) -> None:
        turn = self._turns.get(reply["call"])
        if turn is not None and not turn.done():  # the rollout may have given up waiting
            turn.set_result(reply)

    async def _run(self, request: Message) -> None:
        task = request["task"]
        try:
            played = await self._adapter.play(request, self._asker(task))
            try:
                result = await self._score(request, played)
                shown = columns_of(self._adapter, played, request.get("columns") or [])
            finally:
                await self._adapter.dispose(played)
            self._wire.send({"type": "done", "task": task, **result, **shown})
        except RewardError as error:
            self._report(request, "score", error.__cause__ or error)
        except (Exception, SystemExit) as error:  # an environment that calls `exit()` must not end the others
            self._report(request, "rollout", error)
        except asyncio.CancelledError as error:
            if not _cancelled_from_outside():  # or the orchestrator waits for no answer
                self._report(request, "rollout", error)
        finally:
            self._rollouts.pop(task, None)

    async def _score(self, request: Message, played: Any) -> Message:
        """Alone, or with its group once that is complete; the orchestrator hears that it waits for it."""
        if not self._adapter.group_rewards:
            return (await self._adapter.score([played]))[0]
        name, group, size = request["task"], request.get("group") or request["task"], request.get("group_size", 1)
        self._wire.send({"type": "held", "task": name})
        return await self._groups.score(played, name=name, group=group, size=size)

    def _report(self, request: Message, stage: str, error: BaseException) -> None:
        """To the orchestrator, and to our own log with the example that it was."""
        example = f"{request['split']} example {request['index']}"
        print(f"Rollout {request['task']} of {example} failed ({stage}):", file=sys.stderr)
        told = {"error": _describe(error), "traceback": _traceback(error)}
        self._wire.send({"type": "error", "task": request["task"], "stage": stage, **told})

    def _asker(self, task: str) -> Ask:
        async def ask(messages: list[dict], *, tools: list[dict] | None, sampling: dict) -> Message:
            return await self._turn(task, messages, tools=tools, sampling=sampling)

        return ask

    async def _turn(self, task: str, messages: list[dict], *, tools: list[dict] | None, sampling: dict) -> Message:
        self._num_calls += 1
        call = str(self._num_calls)
        answered = self._turns[call] = asyncio.get_running_loop().create_future()
        self._wire.send(
            {"type": "ask", "task": task, "call": call, "messages": messages, "tools": tools, "sampling": sampling}
        )
        try:
            return _checked(await answered)
        finally:
            del self._turns[call]


def _failed(error: BaseException) -> Message:
    return {"type": "failed", "error": _describe(error), "traceback": _traceback(error)}


def _cancelled_from_outside() -> bool:
    """Not so where a turn was refused (`TurnCancelled`, which `asyncio.wait_for` turns into a bare CancelledError)."""
    running = asyncio.current_task()
    return running is not None and running.cancelling() > 0


def _checked(reply: Message) -> Message:
    if error := reply.get("error"):
        kinds = {"overlong_prompt": OverlongPrompt, "cancelled": TurnCancelled}
        raise kinds.get(reply.get("error_kind", ""), EngineError)(error)
    return reply


def _seed(seed: int) -> None:
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def _describe(error: BaseException) -> str:
    """The error and what caused it: verifiers wraps everything in empty errors of its own.

    Example: "ModelError: (no message) <- ValueError: an image in message 2 - ..."
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 5:
        chain.append(cause)
        cause = cause.__cause__
    return " <- ".join(f"{type(link).__name__}: {str(link) or '(no message)'}" for link in chain)


def _traceback(error: BaseException) -> str:
    print(text := "".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    return text
