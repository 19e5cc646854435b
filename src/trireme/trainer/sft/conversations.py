"""Read conversations from files, folders, programs and hubs, in any of the usual forms.

The keys of an entry tell its form: `messages`, `conversations` (with `from` and `value`), or `prompt` and `completion`,
which are lists of messages or texts.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.sft import Source, data_files, is_on_a_hub
from trireme.trainer.sft.pictures import Grid, Message, PictureReader, refuse_pictures

ASSISTANT = "assistant"
MARKS = ("train", "weight")  # keys of a message that say whether it is learned; both are in use
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "bot": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_EXPECTED = (
    'expected {"messages": [{"role": "user", "content": "…"}, …]}, {"prompt": …, "completion": …}, or '
    '{"conversations": [{"from": "human", "value": "…"}, …]}. Correct it, or leave it out'
)


@dataclass(frozen=True)
class Conversation:
    """Messages, which the chat template renders."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    marks: tuple[bool | None, ...] = ()  # per message: whether it is learned; None: by its role
    where: str = ""
    pictures: tuple[tuple[Grid, ...], ...] = ()  # per message, in order

    def is_learned(self, index: int, roles: tuple[str, ...]) -> bool:
        mark = self.marks[index] if self.marks else None
        return self.messages[index]["role"] in roles if mark is None else mark


@dataclass(frozen=True)
class Completion:
    """Two texts without a chat template. The completion is learned, and that it ends there."""

    prompt: str
    completion: str
    where: str = ""


def to_conversation(entry: Any, where: str) -> Conversation | Completion:
    """Convert an entry of any form. Errors name its place.

    Raises:
        ConfigError: it has none of the forms.
    """
    try:
        # The order matters: an entry with messages may also have a prompt column.
        if "messages" in entry:
            return _from_messages(entry["messages"], entry, where)
        if "conversations" in entry:
            messages = [_sharegpt_message(message) for message in entry["conversations"]]
            if isinstance(entry.get("system"), str) and entry["system"]:
                messages = [{"role": "system", "content": entry["system"]}, *messages]
            return _from_messages(messages, entry, where)
        if "prompt" in entry and "completion" in entry:
            return _from_pair(entry, where)
        raise ValueError(f"its keys are {', '.join(map(str, entry)) or 'none'}")
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        words = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise _refused(where, f"is not a conversation ({words})") from error


def _from_pair(entry: Mapping[str, Any], where: str) -> Conversation | Completion:
    prompt, completion = entry["prompt"], entry["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise _refused(where, "has an empty completion, so nothing to learn")
        return Completion(prompt, completion, where)

    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else completion
    return _from_messages([*prompt, *completion], entry, where, num_given=len(prompt))


def _sharegpt_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if "role" in message:
        return dict(message)

    rest = {key: value for key, value in message.items() if key not in ("from", "value")}

    # In this form a call is a message of its own; templates expect it as a field of the assistant's.
    if message["from"] == "function_call":
        called = json.loads(message["value"])
        calls = [
            {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
            for call in (called if isinstance(called, list) else [called])
        ]
        return rest | {"role": ASSISTANT, "content": "", "tool_calls": calls}
    if message["from"] not in _SHAREGPT_ROLES:
        raise ValueError(f'"from": "{message["from"]}", one of {", ".join(_SHAREGPT_ROLES)} was expected')
    return rest | {"role": _SHAREGPT_ROLES[message["from"]], "content": message["value"]}


def _from_messages(messages: Any, entry: Mapping[str, Any], where: str, *, num_given: int = 0) -> Conversation:
    """Build a conversation.

    Args:
        num_given: how many of the first messages are not learned, unless they are marked.
    """
    # Marks of the data come first, then roles.
    marks = [_mark(message) for message in messages]
    roles = [message["role"] for message in messages]
    for message in messages:
        if message.get("content") is None and not message.get("tool_calls") and message["role"] != "tool":
            raise _refused(where, f"has a message without content ({dict(message)})")

    # An entry that teaches nothing is more likely a mistake in the data than meant.
    if ASSISTANT not in roles[num_given:] and True not in marks:
        raise _refused(where, "has no assistant message, so nothing to learn")
    given = [False if mark is None and index < num_given else mark for index, mark in enumerate(marks)]

    tools = entry.get("tools")
    if isinstance(tools, str):  # some data sets hold tools as text, as their columns allow one type only
        tools = json.loads(tools) if tools.strip() else None
    if not isinstance(tools or (), list | tuple):
        raise ValueError(f"its tools are {tools!r:.80}, a list was expected")

    # Templates might render keys that they do not know.
    unmarked = tuple({key: value for key, value in each.items() if key not in MARKS} for each in messages)
    return Conversation(unmarked, tuple(tools) if tools else None, tuple(given), where)


def _mark(message: Message) -> bool | None:
    """Return the mark of a message: `train` (true or false) or `weight` (1 or 0)."""
    for key in MARKS:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise ValueError(f'"{key}": {value!r}, one of true, false, 0 and 1 was expected')
        if value is not None:
            return bool(value)
    return None


def _refused(where: str, problem: str) -> ConfigError:
    return ConfigError(f"{where} {problem} - {_EXPECTED}.")


Entry = tuple[str, Any]  # its place, for error messages, and its content


def read_conversations(
    source: Source, pictures: PictureReader | None = None, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[Conversation | Completion]:
    """Yield the conversations of a source, in order.

    Args:
        pictures: None in a run without `[model.vlm]`.
        meanwhile: called before each conversation.

    Raises:
        ConfigError: an entry is no conversation (names its file and line), or shows a picture that cannot be read, or
            there is no entry.
    """
    # Pictures are read from the data's own folder only, or from inside the entry.
    folder = None
    if is_on_a_hub(source.data):
        entries = _from_hub(source)
    else:
        path = Path(source.data)
        files = data_files(path) if path.is_dir() else [path]
        if not files or not path.exists():
            raise ConfigError(f"{path} does not exist, or holds no data - conversations were expected. Set `data`.")
        folder = path if path.is_dir() else path.parent
        entries = (entry for file in files for entry in _READERS.get(file.suffix, _from_lines)(file))

    is_empty = True
    for where, entry in entries:
        # Reading may take hours, in which other ranks wait.
        meanwhile()
        is_empty = False

        conversation, images = to_conversation(entry, where), entry.get("images") or ()
        if isinstance(conversation, Conversation) and pictures:
            read = pictures.read(conversation.messages, images, folder, where)
            conversation = replace(conversation, messages=tuple(read[0]), pictures=tuple(read[1]))
        else:
            refuse_pictures(conversation.messages if isinstance(conversation, Conversation) else (), images, where)
        yield conversation

    if is_empty:
        raise ConfigError(f"{source.data} holds no conversation - at least one was expected. Set `data` to another.")


def _from_lines(file: Path) -> Iterator[Entry]:
    """Read lines, which end at a line feed only: JSON allows other separators, such as U+2028, inside a text."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, _parse(line, where)


def _from_json(file: Path) -> Iterator[Entry]:
    content = _parse(file.read_bytes(), str(file))
    if isinstance(content, dict) and len(content) == 1:  # {"data": […]}
        (content,) = content.values()
    if not isinstance(content, list):
        raise ConfigError(f"{file} holds no list - a list of conversations was expected. Correct it, or use .jsonl.")
    yield from ((f"{file}, entry {number}", entry) for number, entry in enumerate(content))


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
        raise ConfigError(
            f'{where} is not JSON ({error}) - expected {{"messages": [{{"role": "user", "content": "…"}}, …]}}. '
            "Correct it, or leave it out."
        ) from error


def _from_parquet(file: Path) -> Iterator[Entry]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            entries = (entry for batch in table.iter_batches(batch_size=1024) for entry in batch.to_pylist())
            for number, entry in enumerate(entries):
                yield f"{file}, row {number}", _without_nulls(entry)
    except ArrowException as error:
        raise ConfigError(f"{file} is no parquet file ({error}) - one was expected. Write it again.") from error


def _from_program(file: Path) -> Iterator[Entry]:
    functions = runpy.run_path(str(file))
    if "conversations" not in functions:
        raise ConfigError(f"{file} has no function `conversations` - one that returns a list was expected. Add it.")
    for number, entry in enumerate(functions["conversations"]()):
        yield f"{file}, conversation {number}", entry


def _from_hub(source: Source) -> Iterator[Entry]:
    from datasets import load_dataset

    try:
        found = load_dataset(source.data, source.subset, split=source.split)
    except Exception as error:  # the library, the network or the hub may raise anything
        raise ConfigError(
            f"The data set {source.data!r} (subset {source.subset or 'none'}, split {source.split}) cannot be loaded: "
            f"{error}\nExpected one that this machine can reach, or a file or folder here (looked in {Path.cwd()}). "
            "Check name, `subset` and `split`; or download its parquet files elsewhere, copy the folder, and set "
            "`data` to it."
        ) from error
    for number, entry in enumerate(found):
        yield f"{source.data}, {source.split}, row {number}", _without_nulls(entry)


def _without_nulls(value: Any) -> Any:
    """Remove keys that an entry never had: columns hold them as None."""
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    if isinstance(value, list):
        return [_without_nulls(inside) for inside in value]
    return value


_READERS = {".jsonl": _from_lines, ".json": _from_json, ".parquet": _from_parquet, ".py": _from_program}
