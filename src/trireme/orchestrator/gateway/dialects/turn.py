"""A model turn between an agent and the policy, in one form for all API dialects.

An agent sends the whole conversation each time, in the dialect of its SDK. A dialect module reads it into a
`ClientRequest` of plain chat messages, and writes the policy's `Reply` back as the dialect's answer, as its stream of
events, or as its error.

Requests come from code that a model wrote. Bodies are decoded into structs: what these do not name is skipped, never
built, and a value of another type is refused. JSON of any form, such as a tool's schema, stays undecoded (`Raw`) until
`Limits` has counted it. So the largest body that is allowed stops the event loop for some 0.1 s at most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from trireme.base.safe_text import encodable
from trireme.journal.model_turn import ToolCall, TurnRequest
from trireme.orchestrator.session.wire import Reply

MOST_ITEMS = 50_000  # messages, their parts and calls, tools and stop strings of one request
MOST_VALUES = 250_000  # signs between values in a request's JSON of any form

SURROGATES = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?P<pair>\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)
"""A surrogate pair in JSON, or half of one."""

MOST_SURROGATES = 20_000  # largest number in a request with half a pair: looking at each takes a microsecond

Problem = Literal["invalid", "unauthorized", "unknown", "overlong", "busy", "ended", "failed"]
"""Why a request has no turn.

`invalid`: the request cannot be answered as it is. `unauthorized`: no open session has its key. `unknown`: no such
route or earlier response. `overlong`: the conversation does not fit into the model's context. `busy`: the client should
retry after a pause. `ended`: the session's rollout is over. `failed`: the policy cannot answer; retrying does not help.
"""

T = TypeVar("T")
Event = tuple[str | None, dict[str, Any] | str]
"""The name (or none) and the data of one server-sent event."""


class Rejected(Exception):
    """A request that gets an error instead of a turn."""

    def __init__(self, problem: Problem, words: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(words)
        self.problem = problem
        self.retry_after_s = retry_after_s


class Shape(msgspec.Struct, gc=False):
    """An object of a request. Fields that it does not name are skipped."""


class ImageUrl(Shape):
    url: str | None = None


class Source(Shape):
    """The bytes of a picture, in Anthropic's API."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None


class Part(Shape):
    """A part of a message's content, in any dialect."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    source: Source | None = None


class ToolChoice(Shape):
    type: str | None = None


Content = str | list[Part] | None
Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None
TopK = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None  # -1 and 0: all tokens
NotNegative = Annotated[float, Meta(ge=0)] | None


class Body(msgspec.Struct):
    """The fields that requests of all dialects have. Each dialect adds its own."""

    temperature: NotNegative = None
    top_p: NotNegative = None
    stream: bool | None = None
    chat_template_kwargs: Raw = Raw()


@dataclass(frozen=True)
class Tool:
    """A tool as an agent declared it, if that differs from a plain function."""

    name: str  # the client's name for it
    is_custom: bool = False  # takes one free text, shown to the model as the argument `input`
    namespace: str | None = None


class ClientRequest(TurnRequest, kw_only=True):
    """A request over HTTP, and the form in which its client wants the answer."""

    streams: bool
    with_usage: bool = False  # chat: the stream ends with a chunk of token counts
    declared: dict[str, Tool] = {}  # responses: tools by the name that the model sees


@dataclass(frozen=True)
class Dialect:
    """One API: the shape of its requests, and pure functions."""

    body: type[Body]
    harmless: dict[str, tuple[bytes, ...]]  # fields without effect on the turn: with these values, with any if empty
    read: Callable[[Any], ClientRequest]  # reads a `body`; raises Rejected
    answer: Callable[[Reply, ClientRequest], dict[str, Any]]
    events: Callable[[Reply, ClientRequest], Iterator[Event]]
    error: Callable[[Rejected], dict[str, Any]]
    error_event: Callable[[Rejected], Event]  # once a stream has begun


STATUS: dict[Problem, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "unknown": 404,
    "overlong": 400,
    "busy": 429,
    "ended": 403,
    "failed": 400,
}
"""HTTP status of each problem. None is 5xx: clients answer that with a storm of retries (Codex: 30 within 25 s)."""

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Names of errors by their HTTP status, as both vendors write them."""


def decode(data: bytes | Raw, kind: type[T]) -> T:
    """Decode JSON, with U+FFFD for halves of surrogate pairs: JavaScript cuts texts inside of an emoji.

    Raises: ValueError, RecursionError.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        # this is JSON already, only of another shape, which no replacement changes
        raise
    except ValueError:
        return msgspec.json.decode(_without_half_pairs(bytes(data)), type=kind)


def _without_half_pairs(data: bytes) -> bytes:
    """Return JSON with U+FFFD for each half of a surrogate pair, up to the most that are looked at."""
    parts, copied, at = [], 0, 0
    for _ in range(MOST_SURROGATES):
        if (found := SURROGATES.search(data, at)) is None:
            break
        begin, at = found.span()
        # 64 bytes are enough to count backslashes; looking at all of them would be quadratic in a text of backslashes
        before = data[max(0, begin - 64) : begin]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:  # its backslash is escaped, so this is plain text
            at = begin + 2
        elif found["pair"] is None:
            parts += [data[copied:begin], b"\\ufffd"]
            copied = at
    return b"".join([*parts, data[copied:]])


def decode_body(data: bytes, kind: type[T]) -> T:
    """Decode a request's body. Raises: Rejected if it is no JSON object of this shape."""
    try:
        return decode(data, kind)
    except msgspec.ValidationError as error:
        raise Rejected("invalid", f"The request cannot be used: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise Rejected("invalid", f"The request cannot be read ({error}), expected a JSON object.") from error


class Limits:
    """Counts what one request holds, before any of it takes long.

    Example:
        limits = Limits()
        limits.count(body.messages)
        schema = limits.decode(tool.parameters, "tools[0]")
    """

    def __init__(self) -> None:
        self._num_items = self._num_values = 0

    def count(self, items: Content | Sequence[Any]) -> None:
        """Count the items of a list. Raises: Rejected if the request has too many."""
        self._num_items += len(items) if isinstance(items, list) else 1
        if self._num_items > MOST_ITEMS:
            words = f"The request has more than {MOST_ITEMS} messages, parts of messages, tools and calls."
            raise Rejected("invalid", f"{words} Send fewer.")

    def decode(self, raw: Raw, where: str) -> Any:
        """Return JSON of any form; None if it is missing. Raises: Rejected if the request has too much of it."""
        data = bytes(raw)
        if not data:
            return None
        # counting signs takes far less time than decoding, and their number grows with that of the values
        if not data.startswith(b'"'):
            self._num_values += sum(map(data.count, (b",", b"[", b"{")))
        if self._num_values > MOST_VALUES:
            words = (
                f"{where}: the request has more than {MOST_VALUES} values in schemas of tools and arguments of calls"
            )
            raise Rejected("invalid", f"{words}. Send fewer.")
        return decode_body(data, object)


LARGEST_TEMPLATE_KWARGS = 4096  # bytes of JSON

OWN_VARIABLES = frozenset({
    "messages", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
    "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "return_assistant_tokens_mask", "raise_exception", "strftime_now", "bos_token", "eos_token",
})  # fmt: skip
"""Variables of a chat template, and arguments of its renderer, that follow from the request and the model."""


def read_template_kwargs(raw: Raw) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template (`chat_template_kwargs`). Raises: Rejected."""
    where, expected = "chat_template_kwargs", "expected an object such as {'enable_thinking': false}"
    data = bytes(raw)
    if len(data) > LARGEST_TEMPLATE_KWARGS:
        raise Rejected("invalid", f"{where}: {len(data)} bytes, {expected} of at most {LARGEST_TEMPLATE_KWARGS}")

    given = decode_body(data or b"null", object)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise Rejected("invalid", f"{where}: {given!r:.80}, {expected}")
    # these carry the conversation and its special tokens, which must be those that the trainer sees
    if taken := sorted(OWN_VARIABLES & given.keys()):
        raise Rejected("invalid", f"{where}: {', '.join(taken)} follows from the request itself. Remove it.")
    return given


LARGEST_LOOKED_AT = 2 << 20  # bytes of a body; a larger one may have so many fields that naming them takes long


def unread_fields(data: bytes, dialect: Dialect) -> list[str]:
    """Return the names of a body's fields that ask for something and are not obeyed. Raises: Rejected."""
    if len(data) > LARGEST_LOOKED_AT:
        return []
    read = dialect.body.__struct_encode_fields__
    found = []
    for name, raw in decode_body(data, dict[str, Raw]).items():
        value = bytes(raw).replace(b" ", b"")
        # empty values ask for nothing, and a field that the dialect reads is obeyed unless it is listed as harmless
        if value in (b"null", b"[]", b"{}", b'""', b"0") or (name in read and name not in dialect.harmless):
            continue
        # fields without an entry are harmless if they switch something off
        harmless = dialect.harmless.get(name, (b"false",))
        if harmless and value not in harmless:
            found.append(name)
    return found


def read_text(content: Content, *, kinds: Collection[Any], where: str) -> str:
    """Return the text of a message's content: text, nothing, or a list of parts of these kinds.

    Raises: Rejected if a part is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        text = part.text if part.text is not None else part.refusal
        if part.type not in kinds or text is None:
            words = f"{where}: a part of the kind {part.type!r:.80} - this policy does not read it. Remove it."
            raise Rejected("invalid", words)
        texts.append(text)
    return "".join(texts)


def read_content(content: Content, *, kinds: Collection[Any], where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message that may show pictures: text, or a list of text and `image_url` parts.

    Raises: Rejected if a part is neither text nor a picture with its data.
    """
    pictures = [read_picture(part, where) for part in content] if isinstance(content, list) else []
    if not isinstance(content, list) or not any(pictures):
        return read_text(content, kinds=kinds, where=where)
    return [
        picture or {"type": "text", "text": read_text([part], kinds=kinds, where=where)}
        for part, picture in zip(content, pictures, strict=True)
    ]


def read_picture(part: Part, where: str) -> dict[str, Any] | None:
    """Return a picture of any dialect (`image_url`, `input_image`, `image`) as chat has it; None for other parts.

    Raises: Rejected if it is at an address, which is not looked up.
    """
    if part.type not in ("image_url", "input_image", "image"):
        return None

    # each dialect has a form of its own: a text, an object with a URL, or base64 and its type
    given, source = part.image_url, part.source
    url = given if part.type == "input_image" else given.url if isinstance(given, ImageUrl) else None
    if part.type == "image":
        url = f"data:{source.media_type};base64,{source.data}" if source and source.type == "base64" else None

    # nothing is fetched: a program must not make this process send requests
    if not isinstance(url, str) or not url.startswith("data:"):
        raise Rejected(
            "invalid", f"{where}: a picture at {url!r:.80} - this policy looks up no address. Send its bytes as base64."
        )
    return {"type": "image_url", "image_url": {"url": url}}


def function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a function tool as chat templates expect it."""
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def custom_function(name: str, description: str | None, grammar: str | None) -> dict[str, Any]:
    """Return a tool of one free text as a function with the argument `input`."""
    shown = f"{description or ''}\n\nGrammar of the input:\n{grammar}" if grammar else description
    # chat templates know functions alone, so the free text becomes their one argument
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function(name, shown, text)


def whole_json(text: str) -> str:
    """Return JSON with U+FFFD for each half of a surrogate pair. A text without one, or that is no JSON, is unchanged.

    Models write halves. Few parsers take them.
    """
    try:
        written = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text
    whole = encodable(written)
    return text if whole == written else whole


def custom_input(arguments: str) -> str:
    """Return the free text of a call that the model made of a custom tool, or all it wrote if it is malformed."""
    try:
        text = json.loads(whole_json(arguments))["input"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def nested_call(call_id: str | None, name: str | None, arguments: Any, *, where: str) -> dict[str, Any]:
    """Return a tool call of a conversation as chat templates expect it: arguments as JSON text.

    Raises: Rejected if it has no name or no id.
    """
    if name is None or call_id is None:
        raise Rejected("invalid", f"{where}: a tool call without a name or an id, expected both as text")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return ToolCall(call_id, name, text).to_chat()


def as_messages(found: list[T] | None, *, where: str) -> list[T]:
    """Check a conversation: at least one message. Raises: Rejected."""
    if not found:
        raise Rejected(
            "invalid", f"{where}: {'missing' if found is None else 'an empty list'}, expected a conversation"
        )
    return found


def choose_sampling(
    body: Body, renamed: dict[str, str], *, effort: str | None = None, thinks: bool | None = None
) -> dict[str, Any]:
    """Return the sampling arguments that a request sets, under the names of the chat API.

    Args:
        effort: how much the model is to think, if the request says so.
        thinks: whether it is to think; variables that the request sets for the chat template win.

    Raises: Rejected.
    """
    template = ({} if thinks is None else {"enable_thinking": thinks}) | read_template_kwargs(body.chat_template_kwargs)
    given = {ours: getattr(body, theirs) for theirs, ours in renamed.items()}
    given |= {"reasoning_effort": effort} if effort is not None else {}
    given |= {"chat_template_kwargs": template or None}
    return {name: value for name, value in given.items() if value is not None}
