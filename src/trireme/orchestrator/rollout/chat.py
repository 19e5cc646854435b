"""Chat messages to token ids and back, without torch: `tokenizers` for the ids, `jinja2` for the template.

`transformers` would do both, but imports torch with its tokenizers; a test holds this file to its results.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from trireme.base.errors import ConfigError

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"]


KEPT_TOKENS = 1 << 20
"""Of prompts that were seen lately, all together."""


class Prompts:
    """Ids of prompts, the newest that fit into `KEPT_TOKENS`."""

    def __init__(self, limit: int = KEPT_TOKENS) -> None:
        self._limit = limit
        self._ids: dict[bytes, list[int]] = {}  # in the order in which they came
        self._num_tokens = 0

    def get(self, key: bytes) -> list[int] | None:
        return self._ids.get(key)

    def keep(self, key: bytes, ids: list[int]) -> None:
        if key and len(ids) <= self._limit:
            self._ids[key] = ids
            self._num_tokens += len(ids)
        while self._num_tokens > self._limit:
            self._num_tokens -= len(self._ids.pop(next(iter(self._ids))))


class ChatTokenizer:
    """The tokenizer and chat template of one model."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(_existing(folder / "tokenizer.json")))
        self._tokenizer.no_truncation()  # some files ask for it, and a prompt must never be cut in silence
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        text = _template_text(folder, config)
        self._template = _compile_template(text)
        self._prompts = Prompts(0 if "strftime_now" in text else KEPT_TOKENS)  # what tells the time is told anew
        self._names = {key: _token_text(config.get(key)) for key in SPECIAL_TOKENS}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self.num_tokens: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.model_config = _read_json(folder / "config.json")
        self.vocab_size = _model_vocab_size(self.model_config)
        """Of the model, which is often larger: it may sample tokens that stand for no text. None where not known."""

    def render(self, messages: list[dict[str, Any]], *, tools: list[dict] | None, generate: bool) -> str:
        """The conversation as the model reads it; with `generate`, up to where the assistant begins."""
        names = {key: text for key, text in self._names.items() if text is not None}
        return self._template.render(
            messages=[_for_template(message) for message in messages],
            tools=tools or None,
            documents=None,
            add_generation_prompt=generate,
            **names,
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(_encodable(text), add_special_tokens=False).ids

    def prompt_ids(self, messages: list[dict[str, Any]], *, tools: list[dict] | None) -> list[int]:
        """A conversation that begins, as ids. The rollouts of a group begin alike: it is made of the text once."""
        try:
            key = msgspec.json.encode((messages, tools))
        except (
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ):  # what JSON cannot say, a template may still know
            key = b""
        if (ids := self._prompts.get(key)) is None:
            ids = self.encode(self.render(messages, tools=tools, generate=True))
            self._prompts.keep(key, ids)
        return list(ids)

    def decode(self, ids: list[int], *, keep_special: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not keep_special)

    def is_special(self, token: int) -> bool:
        """Whether it is one of those that are no text: they mark where turns begin and end."""
        return token in self._special


def open_chat_tokenizer(name: str) -> ChatTokenizer:
    """From a folder, or from the hub (its small files only).

    Raises:
        ConfigError: it cannot be had.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _download(name)
    return ChatTokenizer(folder)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:
        raise ConfigError(
            f"The tokenizer {name!r} cannot be had: {type(error).__name__}: {error}\n"
            "Expected a folder with tokenizer.json, or a hub name that this machine can reach. Set `model.name` to one."
        ) from error


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist - the tokenizer's fast form was expected there. "
            "Save it with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`."
        )
    return path


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _encodable(text: str) -> str:
    """Half a surrogate pair, which JSON can hold (a tool's argument), becomes U+FFFD: it cannot be encoded."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _model_vocab_size(config: dict[str, Any]) -> int | None:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _template_text(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    text = file.read_text() if file.exists() else config.get("chat_template")
    if isinstance(text, list):  # several named templates
        text = next((entry["template"] for entry in text if entry["name"] == "default"), None)
    if not text:
        raise ConfigError(
            f"The tokenizer in {folder} has no chat template - one was expected in chat_template.jinja or "
            "tokenizer_config.json. Take an instruction-tuned model, or add a template to the folder."
        )
    return text


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words in some templates; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _compile_template(text: str) -> jinja2.Template:
    """The environment that chat templates are written for: what transformers documents, no more."""

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    template = environment.from_string(text)
    template.globals = dict(template.globals)  # a ChainMap is walked through again for every conversation
    return template


def _token_text(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect text content and tool arguments as objects."""
    out = dict(message)
    if out.get("content") is None:
        out["content"] = ""
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_parsed_call(call) for call in calls]
    return out


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # a model wrote it
            function["arguments"] = json.loads(arguments)
    return {"type": "function", "id": call.get("id"), "function": function}
