"""Convert chat messages to token ids and back, without torch: `tokenizers` for the ids, `jinja2` for the template.

`transformers` does both, but imports torch with its tokenizers. It opens the model's files in a process of its own, and
a test compares the results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trireme.base.errors import ConfigError
from trireme.base.safe_text import encodable
from trireme.config.model.chat_template import template_environment, template_variables
from trireme.config.model.tokenizer import FILES as TOKENIZER_FILES
from trireme.config.model.tokenizer import read_tokenizer, room_problem, rowless_token, template_problem
from trireme.config.model.weights import rows_of
from trireme.journal.message_text import form_for
from trireme.orchestrator.engines.pool import PromptTooLong

FILES = [*TOKENIZER_FILES, "preprocessor_config.json", "processor_config.json"]  # the last two: models that see

LONG_TOKEN = 16  # number of characters, four times that of a token in usual text
KEPT_PROMPTS = 64  # first prompts that are kept tokenised: the rollouts of a group begin alike, one after the other


class NoRoomForToken(ValueError):
    """A text has a token for which the model has no row in its embedding."""


class ChatTokenizer:
    """The tokenizer and chat template of one model."""

    def __init__(self, folder: Path, name: str | None = None, *, trust_remote_code: bool = False) -> None:
        self.opened = opened = read_tokenizer(name or str(folder), folder, trust_remote_code=trust_remote_code)
        self._tokenizer = Tokenizer.from_str(opened.tokenizer)
        self._tokenizer.no_truncation()  # some files ask for it, and a prompt must never be cut silently
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = opened.splits_special

        if problem := template_problem(opened, folder):
            raise ConfigError(problem)

        texts = opened.templates
        self._templates = {name: template_environment().from_string(text) for name, text in texts.items()}
        for template in self._templates.values():
            # a plain dict: the ChainMap is slow, and is read for every conversation
            template.globals = dict(template.globals)

        self.template_variables = template_variables(*texts.values())
        # a template that prints the time is rendered each time
        prints_time = any("strftime_now" in text for text in texts.values())
        self._first_ids = lru_cache(0 if prints_time else KEPT_PROMPTS)(self._tokenize_first)

        self._names = opened.special_tokens
        self._form = form_for(self._render)

        # tokens that end turns are among these, and are not part of a turn's text
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)

        self.num_tokens: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.model_config = _read_json(folder / "config.json")
        self.vocab_size = rows_of(folder, self.model_config)
        """Vocabulary of the model, which is often larger: it may sample tokens without a text. None if unknown."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict] | None,
        generate: bool,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Render the conversation as the model reads it.

        Args:
            generate: up to where the assistant's turn begins.
            template_kwargs: more variables of the template, which take precedence over the names of special tokens.
        """
        messages = [_with_image_parts(self._form(message)) for message in messages]
        return self._render(messages, tools, generate, template_kwargs)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict] | None = None,
        generate: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        # what follows from the request itself replaces all other variables of the same name
        given = {"messages": messages, "tools": tools or None, "add_generation_prompt": generate}
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        return template.render({"documents": None} | self._names | (template_kwargs or {}) | given)

    def encode(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Return the ids of a text.

        Args:
            most_tokens: the model's limit. Texts that are far longer are not tokenised: 8 MB take 10 s and 2 GB.

        Raises:
            PromptTooLong: the beginning of the text alone has twice as many.
            NoRoomForToken: the model has no row for one of them.
        """
        if most_tokens is not None and len(text) > (most_chars := LONG_TOKEN * most_tokens):
            num_tokens = len(self.encode(text[:most_chars]))
            if num_tokens > 2 * most_tokens:  # twice, as the last word was cut
                raise PromptTooLong(
                    f"The prompt has {len(text)} characters, the first {most_chars} of them {num_tokens} tokens; the "
                    f"model takes {most_tokens}."
                )
        ids = self._tokenizer.encode(encodable(text), add_special_tokens=False).ids
        if problem := rowless_token(ids, self.vocab_size, self._tokenizer.id_to_token):
            raise NoRoomForToken(problem)
        return ids

    def weigh(self, text: str, around: Sequence[str], contents: Sequence[tuple[str, float]]) -> list[float]:
        """Return a weight for each token of a text: that of the content that it lies in, else 0.

        Args:
            around: what the template writes before, between and behind the contents.
            contents: of messages, in their order, each with its weight. A text that is not made of these has none.
        """
        offsets = self._tokenizer.encode(encodable(text), add_special_tokens=False).offsets
        nothing, place = [0.0] * len(offsets), len(around[0])
        if len(around) != len(contents) + 1 or not text.startswith(around[0]):
            return nothing

        found = list(nothing)
        for (content, weight), after in zip(contents, around[1:], strict=True):
            # templates often strip what they write
            forms = (form for form in (content, content.strip()) if text.startswith(form + after, place))
            if (form := next(forms, None)) is None:
                return nothing
            end = place + len(form)
            for token, (first, last) in enumerate(offsets):
                if place <= first < last <= end:
                    found[token] = weight
            place = end + len(after)
        return found

    def prompt_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict] | None,
        most_tokens: int | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a first prompt. It is tokenised once for all rollouts of a group, which begin alike.

        Raises: PromptTooLong, see `encode`.
        """
        try:
            # a copy, as the cached list is shared by all rollouts of the group
            return list(self._first_ids(json.dumps((messages, tools, template_kwargs)), most_tokens))
        except (TypeError, ValueError, RecursionError):  # a template may still render it
            text = self.render(messages, tools=tools, generate=True, template_kwargs=template_kwargs)
            return self.encode(text, most_tokens)

    def _tokenize_first(self, conversation: str, most_tokens: int | None) -> list[int]:
        messages, tools, template_kwargs = json.loads(conversation)
        text = self.render(messages, tools=tools, generate=True, template_kwargs=template_kwargs)
        return self.encode(text, most_tokens)

    def decode(self, ids: list[int], *, keep_special: bool = False) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=not keep_special)
        return _clean_up(text) if self.opened.cleans_up else text

    def is_special(self, token: int) -> bool:
        """Return whether the token is no text, but a mark such as the end of a turn."""
        return token in self._special


def open_chat_tokenizer(name: str, *, trust_remote_code: bool = False) -> ChatTokenizer:
    """Load a tokenizer from a folder, or download its small files from the hub.

    Raises: ConfigError if it could not be loaded.
    """
    if Path(name).is_dir():
        return ChatTokenizer(Path(name), trust_remote_code=trust_remote_code)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=FILES)
    except Exception as error:
        raise ConfigError(
            f"Could not load tokenizer {name!r}: {type(error).__name__}: {error}\n"
            "Expected a folder with tokenizer.json, or a hub name that this machine can reach. Set `model.name` to one."
        ) from error

    tokenizer = ChatTokenizer(Path(folder), name, trust_remote_code=trust_remote_code)
    if tokenizer.vocab_size and (problem := room_problem(tokenizer.opened, tokenizer.vocab_size, name)):
        raise ConfigError(problem)  # the launcher has looked at folders alone
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _with_image_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with `{"type": "image"}`, which templates expect, for each picture."""
    if not isinstance(content := message["content"], list):
        return message
    return message | {"content": [{"type": "image"} if part["type"] == "image_url" else part for part in content]}


def _clean_up(text: str) -> str:
    """Remove spaces as transformers does if a tokenizer asks for it (`clean_up_tokenization_spaces`)."""
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for end in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {end}", end)
    return text
