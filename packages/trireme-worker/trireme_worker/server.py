"""The worker: the process that runs one environment, with the environment's own interpreter.

It answers the orchestrator: one asyncio task per rollout, one future per model turn that is asked for.
"""

import asyncio
import contextlib
import functools
import gc
import random
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from trireme_worker import guard
from trireme_worker.groups import Groups
from trireme_worker.loading import folder_of, load_adapter
from trireme_worker.pictures import with_pictures
from trireme_worker.protocol import Message, Wire, read_first_message, send_and_wait
from trireme_worker.rollout import Adapter, EngineError, OverlongPrompt, RewardError, TurnCancelled


def main() -> None:
    """Load the environment that the orchestrator names, and run rollouts until it says stop or hangs up."""
    guard.send_prints_to_stderr()
    orchestrator = socket.socket(fileno=int(sys.argv[1]))
    guard.end_with(orchestrator)
    request, rest = read_first_message(orchestrator)

    # Loaded outside of any event loop, as verifiers' own server does: `load_environment` may call `asyncio.run`.
    server, answer = Server.load(request)
    guard.restore_signals()
    if server is None:
        send_and_wait(orchestrator, answer)
        sys.exit(1)

    gc.collect()
    gc.freeze()  # imports and loaded data live as long as this process
    asyncio.run(server.serve(orchestrator, first=answer, unread=rest))


class Server:
    """One loaded environment and its rollouts under way."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._groups = Groups(adapter.score)
        self._wire = Wire(self._receive)
        self._rollouts: dict[str, asyncio.Task] = {}
        self._turns: dict[str, asyncio.Future] = {}
        self._num_calls = 0
        self._stopped = asyncio.Event()

    @classmethod
    def load(cls, request: Message) -> tuple["Server | None", Message]:
        """Return the server and the `ready` message, or no server and the `failed` message."""
        # the same seed in all workers and after a restart: example 17 must be the same one in each of them, even if the
        # environment draws its examples without a seed of its own
        seed = request.get("seed", 0)
        random.seed(seed)
        try:
            import numpy
        except ImportError:
            pass
        else:
            numpy.random.seed(seed % 2**32)
        try:
            args, agent = request.get("args") or {}, request.get("agent")
            adapter = load_adapter(request["kind"], request["module"], args=args, agent=agent)
            adapter.folder = folder_of(request["kind"], request["module"])
        except (Exception, SystemExit) as error:
            return None, _failed(error)
        return cls(adapter), {"type": "ready", **adapter.facts()}

    async def serve(self, orchestrator: socket.socket, *, first: Message, unread: bytes) -> None:
        orchestrator.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._wire, sock=orchestrator)
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._adapter.serving())
            except Exception as error:
                self._wire.send(_failed(error))
                return
            self._wire.send(first)
            # messages that came with the first one, before there was an event loop
            if unread:
                self._wire.data_received(unread)
            await self._stopped.wait()

    def _receive(self, message: Message) -> None:
        kind = message["type"]
        if kind == "reply":
            turn = self._turns.get(message["call"])
            if turn is not None and not turn.done():  # the rollout may have given up waiting
                turn.set_result(message)
        elif kind == "run":
            rollout = asyncio.get_running_loop().create_task(self._run(message))
            self._rollouts[message["task"]] = rollout  # the event loop itself keeps weak references only
        elif kind == "cancel":
            if (cancelled := self._rollouts.get(message["task"])) is not None:
                cancelled.cancel()
        elif kind == "ping":
            self._wire.send({"type": "pong"})
        elif kind == "stop":
            self._stopped.set()

    async def _run(self, request: Message) -> None:
        task = request["task"]
        try:
            played = await self._adapter.play(request, functools.partial(self._ask, task))
            try:
                if self._adapter.group_rewards:
                    self._wire.send({"type": "held", "task": task})  # until all of its group are there
                    group, size = request.get("group") or task, request.get("group_size", 1)
                    result = await self._groups.score(played, name=task, group=group, size=size)
                else:
                    result = (await self._adapter.score([played]))[0]
                shown = columns_of(self._adapter, played, request.get("columns") or [])
            finally:
                await self._adapter.dispose(played)
            said = {name: with_pictures(result[name], self._adapter.folder) for name in ("prompt", "completion")}
            self._wire.send({"type": "done", "task": task, **result, **said, **shown})
        except RewardError as error:
            self._report(request, "score", error.__cause__ or error)
        except asyncio.CancelledError as error:
            # a refused turn (`TurnCancelled`, which `asyncio.wait_for` turns into a bare CancelledError); otherwise the
            # orchestrator has cancelled the rollout, and expects no answer
            # Python 3.10 cannot tell: it reports both, and the orchestrator drops an answer that it does not expect
            is_cancelled = getattr(asyncio.current_task(), "cancelling", int)
            if not is_cancelled():
                self._report(request, "rollout", error)
        except BaseException as error:  # `exit()`, `pytest.fail()` or a panic of Rust must not end the others
            self._report(request, "rollout", error)
        finally:
            self._rollouts.pop(task, None)

    def _report(self, request: Message, stage: str, error: BaseException) -> None:
        """Report a failure to the orchestrator, and to the log with the example."""
        example = f"{request['split']} example {request['index']}"
        print(f"Rollout {request['task']} of {example} failed ({stage}):", file=sys.stderr)
        described = {"error": _describe(error), "traceback": _traceback(error)}
        self._wire.send({"type": "error", "task": request["task"], "stage": stage, **described})

    async def _ask(
        self, task: str, messages: list[dict], *, tools: list[dict] | None, sampling: dict, **more: Any
    ) -> Message:
        self._num_calls += 1
        call = str(self._num_calls)
        messages = with_pictures(messages, self._adapter.folder)

        answered = self._turns[call] = asyncio.get_running_loop().create_future()
        question = {"messages": messages, "tools": tools, "sampling": sampling, **more}
        self._wire.send({"type": "ask", "task": task, "call": call, **question})
        try:
            reply = await answered
        except asyncio.CancelledError:
            # cancelled by the environment; an orchestrator that cancelled the rollout itself ignores the message
            self._wire.send({"type": "gave_up", "task": task, "call": call})
            raise
        finally:
            del self._turns[call]
        if error := reply.get("error"):
            kinds = {"overlong_prompt": OverlongPrompt, "cancelled": TurnCancelled}
            raise kinds.get(reply.get("error_kind", ""), EngineError)(error)
        return reply


def _failed(error: BaseException) -> Message:
    return {"type": "failed", "error": _describe(error), "traceback": _traceback(error)}


def _describe(error: BaseException) -> str:
    """Return the error and its causes: verifiers wraps everything in empty errors of its own.

    Example: "ModelError: (no message) <- ValueError: an image in message 2 - ..."
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    # bounded, as causes may form a circle
    while cause is not None and len(chain) < 5:
        chain.append(cause)
        cause = cause.__cause__
    return " <- ".join(f"{type(link).__name__}: {_message_of(link) or '(no message)'}" for link in chain)


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an environment's own `__str__` may fail
        return ""


def _traceback(error: BaseException) -> str:
    print(text := "".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    return text


def columns_of(adapter: Any, played: Any, names: list[str]) -> dict:
    """Return fields of the `done` message: `columns`, and `state_keys` if one that was asked for does not exist.

    Example:
        columns_of(adapter, played, ["guesses", "gone"])  # {"columns": {"guesses": 3}, "state_keys": ["answer", ...]}
    """
    if not names:
        return {}
    # verifiers: its state; a plain environment: its example, with the notes kept in it; v1: the result
    holders = (getattr(played, "state", None), getattr(played, "example", None), played)
    state: Mapping = next((holder for holder in holders if isinstance(holder, Mapping)), {})
    found = {name: state[name] for name in names if name in state}
    parser = getattr(getattr(adapter, "_environment", None), "parser", None)
    if parser is not None and "parsed_answer" in names and "parsed_answer" not in found:
        try:
            found["parsed_answer"] = parser.parse_answer(state.get("completion"))
        except Exception as error:  # a parser is the environment's code, and this rollout is scored already
            found["parsed_answer"] = f"(the parser failed: {type(error).__name__}: {error})"
    missing = [name for name in names if name not in found]
    return {"columns": found, **({"state_keys": sorted(map(str, state))} if missing else {})}
