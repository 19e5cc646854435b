"""Messages between the orchestrator and an environment worker, in travel order: JSON lines over a socket pair.

    orchestrator                         worker (its own interpreter, package `trireme_worker`)
        Load   ------------------------>   imports the environment
               <------------------------ Ready | Failed
        Run    ------------------------>   starts a rollout
               <------------------------ Ask      (one model turn)
        Reply  ------------------------>
               <------------------------ GaveUp   (in place of waiting for a Reply)
               <------------------------ Held     (until its whole group is there; only if rewards compare)
               <------------------------ Done | Error
        Cancel ------------------------>   (no answer)
        Ping   ------------------------>   every few seconds
               <------------------------ Pong
        Stop   ------------------------>   tears down and exits

JSON because the worker has nothing but its standard library: here msgspec checks every field as it decodes, there
`trireme_worker/protocol.py` reads dicts. An environment is other people's code in the worker's process, so anything may
arrive. A malformed answer costs its rollout; bytes that are no message at all (`Garbage`) cost the worker.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import msgspec

from trireme.base.errors import PeerDied, TriremeError
from trireme.journal.model_turn import Message, ToolCall, TurnRequest, assistant_message
from trireme.journal.records import EnvironmentResult

SourceKind = Literal["file", "package", "installed", "tasks"]
Split = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "tool_calls"]
ErrorKind = Literal["overlong_prompt", "cancelled", "engine"]


class _Message(msgspec.Struct, tag_field="type"):
    pass


class Load(_Message, tag="load", kw_only=True):
    """The first message: which environment this worker is for.

    Example:
        Load(kind="package", module="reverse_text", args={"max_length": 8}, seed=7)
    """

    kind: SourceKind
    module: str  # a module's name; the absolute path of a file or of tasks
    args: dict[str, Any] = {}
    agent: dict[str, Any] | None = None  # `config.orchestrator.Agent`: a program plays the rollouts
    seed: int = 0


class RunTask(_Message, tag="run", kw_only=True):
    """One rollout to run.

    Example:
        RunTask(task="17-3", split="train", index=17, sampling={"temperature": 1.0}, group="17", group_size=16)
    """

    task: str  # the caller's name for it; on the wire, a number is appended that differs between attempts
    split: Split = "train"
    index: int  # the example's place in that split
    sampling: dict[str, Any] = {}  # wins over the environment's own sampling arguments
    max_turns: int | None = None  # limit of model turns; the environment's own may be lower
    group: str = ""  # rollouts of the same name are scored together if the environment's rewards compare them
    group_size: int = 1  # rollouts of that name; a failed one comes again under the same name
    columns: list[str] = []  # fields of the environment's state that Done has to report
    gateway: str = ""  # URL, without a path, at which agent programs find the policy
    api_key: str = ""  # this rollout's key at the gateway
    solve: Literal["", "oracle", "nothing"] = ""  # in place of an agent program: a task's own solution, or nothing


class Played(msgspec.Struct, kw_only=True):
    """The outcome of a rollout that a client has played."""

    messages: list[dict[str, Any]]  # the longest conversation
    reward: float | None  # None: the environment's own decides
    metrics: dict[str, float]


class Reply(_Message, tag="reply", kw_only=True, omit_defaults=True):
    """The answer to an Ask: a model turn as its player is shown it, or why there is none.

    Token ids and logprobs are for environments that read them; what is trained on never passes through the worker.

    Example:
        Reply(content="cba", finish_reason="stop", prompt_ids=[5, 9], completion_ids=[7], logprobs=[-0.1])
        Reply(error="The prompt has 530 tokens, the model takes 512.", error_kind="overlong_prompt")
    """

    call: str = ""  # filled in by the pool
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    finish_reason: FinishReason | None = None
    prompt_ids: list[int] = []  # [P]
    completion_ids: list[int] = []  # [C]
    logprobs: list[float] = []  # [C]; -inf travels as null
    num_prompt: int = 0  # the lengths of `prompt_ids` and `completion_ids`, in a reply without these
    num_sampled: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None
    played: Played | None = None

    @property
    def text(self) -> str:
        return self.content or ""

    @property
    def calls(self) -> list[ToolCall]:
        return self.tool_calls or []

    @property
    def finish(self) -> FinishReason:
        return self.finish_reason or "stop"

    def to_message(self) -> Message:
        """Return the turn as a message of a conversation."""
        return assistant_message(self.text, self.reasoning, self.calls)

    def without_tokens(self) -> Reply:
        """Return what a program is shown over HTTP. It is kept for retries, so it must not hold a prompt's tokens."""
        counts = {"num_prompt": len(self.prompt_ids), "num_sampled": len(self.completion_ids)}
        return msgspec.structs.replace(self, prompt_ids=[], completion_ids=[], logprobs=[], **counts)


class Cancel(_Message, tag="cancel", kw_only=True):
    """The rollout is no longer wanted. There is no answer."""

    task: str


class Ping(_Message, tag="ping", kw_only=True):
    """Health check of the worker's event loop."""


class Stop(_Message, tag="stop", kw_only=True):
    """Tear the environment down and exit."""


class Ready(_Message, tag="ready", kw_only=True):
    """The environment is loaded.

    Example:
        Ready(num_train=2000, num_eval=100, versions={"python": "3.11.7", "verifiers": "0.2.0"})
        Ready(num_train=50, num_eval=0, versions={"python": "3.11.7"}, group_rewards=True)
    """

    num_train: int  # 0 if it has only an evaluation set
    num_eval: int  # 0 if it has none of its own: an eval run then reads the training set
    versions: dict[str, str]
    group_rewards: bool = False  # a group's rollouts are scored together, once all of them are in
    has_solutions: bool = False  # its tasks bring solutions, which `RunTask.solve` can ask for
    warning: str = ""  # for the user
    uses_gateway: bool = False  # its agents ask the policy through the gateway, not with Ask


class Failed(_Message, tag="failed", kw_only=True):
    """The environment could not be loaded; the worker exits."""

    error: str
    traceback: str


class Ask(TurnRequest, tag_field="type", tag="ask", kw_only=True):
    """A rollout wants a model turn.

    Example:
        Ask(task="0-17-3", call="9", messages=[{"role": "user", "content": "Reverse: abc"}], sampling={})
    """

    task: str
    call: str
    only_counts: bool = False  # the reply has the prompt's ids, and no turn is sampled
    example: dict[str, Any] | None = None  # a client plays it, and the reply comes when it has ended
    has_reward: bool = False  # the environment scores that rollout if the client does not


class GaveUp(_Message, tag="gave_up", kw_only=True):
    """A rollout no longer waits for the Reply to an Ask: its turn is not trained on."""

    task: str
    call: str


class Held(_Message, tag="held", kw_only=True):
    """A rollout is over and is scored as soon as all the others of its group are."""

    task: str


class Done(EnvironmentResult, tag_field="type", tag="done", kw_only=True):
    """A rollout ended and was scored.

    Example:
        Done(task="0-17-3", reward=0.75, metrics={"num_turns": 1.0}, prompt=[...], completion=[...], example_id=17,
             stop="max_turns_reached", turn_rewards=[[0.25], []])
    """

    task: str
    turn_rewards: list[list[float]] = []
    """One list per Ask, in their order; the last ones may be missing. Empty: no reward for that turn (or it was
    refused, or given up). One number: for the whole turn, credited to its last token. Else one per completion token.
    All finite."""
    left_out: dict[str, str] = {}  # metrics that are no finite number, with what they are
    given_up: list[str] = []  # calls that were answered in vain; filled in by the pool


class Error(_Message, tag="error", kw_only=True):
    """A rollout failed: while it ran, or while it was scored. It has no reward.

    Example:
        Error(task="0-17-3", stage="score", error="ZeroDivisionError: division by zero", traceback="Traceback ...")
    """

    task: str
    stage: Literal["rollout", "score"]
    error: str
    traceback: str


class Pong(_Message, tag="pong", kw_only=True):
    """The answer to `Ping`."""


ToWorker = Load | RunTask | Reply | Cancel | Ping | Stop
AboutRollout = Ask | GaveUp | Held | Done | Error
FromWorker = Ready | Failed | AboutRollout | Pong

AT_ONCE = 16  # messages of one worker in one iteration of the event loop

LONGEST_LINE = 64 << 20  # bytes of one message from a worker

LARGEST_REWARD = 1e12
"""Largest reward, of either sign. The norm of a gradient sums squares in float32, which overflow above 1.8e19: one
rollout would throw away the update of its whole batch. There is room for what the gradient multiplies a reward by."""

DEEPEST = 32
"""Most lists and objects within each other. Encoders and readers recurse, up to Python's limit."""

AGENT_NAME = re.compile(r"[\w./@:+ -]{1,200}")
LONGEST_ROLE = 64  # characters
TASK = re.compile(rb'\{"type": ?"(?:ask|gave_up|held|done|error)", ?"task": ?"([^"\\]{1,200})"')
"""Beginning of a worker's message about a rollout: names the rollout even if the rest cannot be read."""


class Garbage(TriremeError):
    """A worker sent bytes that are no message."""


_DECODER: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)


def encode(message: ToWorker) -> bytes:
    """Encode a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> FromWorker:
    """Decode one line. A malformed message about a rollout becomes that rollout's Error. Raises: Garbage."""
    try:
        return _checked(_DECODER.decode(line), is_flat=line.count(b"{") + line.count(b"[") <= DEEPEST)
    except Exception as error:  # all that a decoder may raise for bad bytes: RecursionError, UnicodeDecodeError, ...
        words = f"{type(error).__name__}: {error}"
        # the beginning names the rollout, so only that one fails and the worker lives on
        if found := TASK.match(line):
            task, words = found[1].decode(errors="replace"), f"The worker's answer cannot be used: {words}"
            return Error(task=task, stage="rollout", error=words, traceback="")
        shown = line[:80].decode(errors="backslashreplace")
        raise Garbage(f"sent {len(line)} bytes that are no message ({words}): {shown!r}") from error


def _checked(message: FromWorker, *, is_flat: bool) -> FromWorker:
    """Return a decoded message, if what it holds can be used.

    Args:
        is_flat: the whole message has too few lists and objects to be nested too deep.
    """
    # fields that take any JSON are checked here, as encoders and templates would fail on them later
    if isinstance(message, Ask):
        for each in message.messages:
            _check_chat_message(each)
        if not is_flat:
            _check_depth(message.messages, message.tools, message.sampling, message.example)
    if isinstance(message, Done):
        if not is_flat:
            _check_depth(message.prompt, message.completion, message.info, message.columns)
        # one reward that is far too large would spoil the whole batch, see `LARGEST_REWARD`
        of_runs = [run.reward for run in message.runs]
        check_rewards((message.reward, *of_runs, *chain.from_iterable(message.turn_rewards)))
        if wrong := [run.agent for run in message.runs if AGENT_NAME.fullmatch(run.agent) is None]:
            raise ValueError(f"an agent called {wrong[0]!r:.80}, expected letters, digits and ./@:+-_ or blanks")
    if isinstance(message, Ready) and not all(0 <= size < 2**31 for size in (message.num_train, message.num_eval)):
        raise ValueError(f"data sets of {message.num_train} and {message.num_eval} examples")
    return message


def check_rewards(rewards: Iterable[float]) -> None:
    """Raises: ValueError if one is too large."""
    for reward in rewards:
        if not abs(reward) <= LARGEST_REWARD:
            raise ValueError(f"a reward of {reward:g}, expected at most {LARGEST_REWARD:g} of either sign")


def _check_chat_message(message: dict[str, Any]) -> None:
    """Check the types of a chat message. A template would fail on others, each in its own way."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not 0 < len(role) <= LONGEST_ROLE:
        raise ValueError(f"a message with the role {role!r:.80}, expected a word")
    if not isinstance(content, str | None) and not (isinstance(content, list) and all(map(_is_part, content))):
        raise ValueError(f"a message whose content is {content!r:.80}, expected text, null, or a list of parts")
    if not isinstance(calls, list | None) or not all(_is_call(call) for call in calls or ()):
        raise ValueError(f"a message with the tool calls {calls!r:.80}, expected a list of functions with arguments")


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "image_url":
        return isinstance(part.get("image_url"), dict) and isinstance(part["image_url"].get("url"), str)
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_depth(*values: Any) -> None:
    # level by level, as a recursive check would reach the limit that it is to protect
    level = [value for value in values if isinstance(value, list | dict)]
    for _ in range(DEEPEST):
        if not level:
            return
        inner = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in level)
        level = [value for value in inner if isinstance(value, list | dict)]
    if level:
        raise ValueError(f"lists and objects nested more than {DEEPEST} deep")


@dataclass(eq=False)
class Connection(asyncio.Protocol):
    """The orchestrator's end of the socket pair to one worker process.

    It takes a few messages in each iteration of the event loop: each one wakes a rollout, and all that come at once
    would keep everything else waiting. It is closed if the worker sends bytes that are no message, which it reports
    first.
    """

    on_message: Callable[[AboutRollout | Pong], None]
    on_garbage: Callable[[str], None]
    answer: asyncio.Future[Ready | Failed]  # to Load; its own, so that an old one's end cannot fail a new one's start
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    _lines: deque[bytes] = field(default_factory=deque)  # not yet taken
    _partial: bytearray = field(default_factory=bytearray)  # a line without its end
    _transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are no asyncio.WriteTransport

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._partial) + lines[0]
            self._partial.clear()
        self._partial += rest
        # lines that are left from before mean that `_take` is scheduled already
        is_taking = bool(self._lines)
        self._lines += lines
        if not is_taking:
            self._take()

    def _take(self) -> None:
        try:
            for _ in range(min(AT_ONCE, len(self._lines))):
                message = decode(self._lines.popleft())
                if not isinstance(message, Ready | Failed):
                    self.on_message(message)
                elif not self.answer.done():
                    self.answer.set_result(message)
            if (length := len(self._partial)) > LONGEST_LINE:
                raise Garbage(f"sent {length} bytes without an end of line, at most {LONGEST_LINE} expected")
        except Garbage as error:
            self._lines.clear()
            self.on_garbage(str(error))
            self.close()
        finally:
            if self._lines:
                asyncio.get_running_loop().call_soon(self._take)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        # what the worker sent before it ended still counts
        while self._lines:
            self._take()
        self.closed.set()
        if not self.answer.done():
            self.answer.set_exception(PeerDied("The worker hung up before it had loaded the environment."))

    def send(self, message: ToWorker) -> None:
        if self._transport is not None:  # None once the worker is dead: `wait_for_death` fails its rollouts
            self._transport.write(encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
