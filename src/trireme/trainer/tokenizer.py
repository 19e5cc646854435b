"""Open a tokenizer with transformers: for supervised training, for exports, and, as a program, to describe it for the
processes that import no torch (`config/model/tokenizer.py`)."""

from __future__ import annotations

import heapq
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import msgspec

if __name__ == "__main__" and "--trust" not in sys.argv:
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then does without: 2 s instead of 10

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from trireme.base.errors import ConfigError
from trireme.config.model.tokenizer import NUM_HIGHEST, OpenedTokenizer

PROCESSORS_TEMPLATE = "chat_template.json"  # older models that see have it, their tokenizers none
WITH_TOKENS = ["tokenizer.json", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"]
WITH_TOKENS += ["vocab.json", "vocab.txt", "tokenizer.model"]
ANSWER = "zq7kx"  # a turn of the assistant whose end is looked for
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
UNDEFINED = re.compile(r"'(\w+_token)' is undefined")


def open_tokenizer(name: str, trust_remote_code: bool, *, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        chat_template: a file whose template replaces the tokenizer's own.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:  # mistral_common's tokenizers, which a tekken.json would mean, have no templates
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, mistral_format=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Could not load the tokenizer {name!r}: {error}. Set `tokenizer.name`.") from error

    # The template may be the user's, the tokenizer's, or in a file of its own.
    if chat_template:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    elif not tokenizer.chat_template:
        options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
        if file := cached_file(name, PROCESSORS_TEMPLATE, **options, _raise_exceptions_for_connection_errors=False):
            tokenizer.chat_template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def describe(tokenizer: PreTrainedTokenizerBase) -> OpenedTokenizer:
    """Raises: ValueError if it is written in Python."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is written in Python")

    backend, templates = tokenizer.backend_tokenizer, tokenizer.chat_template or {}
    ids = backend.get_vocab(with_added_tokens=True)
    is_bpe = type(backend.model).__name__ == "BPE"
    corrupts = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output

    # A rendered answer shows which token ends a turn.
    text, refusal = _render(tokenizer)
    _, _, after = text.rpartition(ANSWER)
    ends = tokenizer.encode(after, add_special_tokens=False) if after != text else []

    added = tokenizer.added_tokens_decoder

    # Models may list tokens that they have no embedding for. Those that files or the template mention are real.
    rendered = {*tokenizer.encode(text, add_special_tokens=False)} if text else set()
    highest = heapq.nlargest(NUM_HIGHEST, ids.items(), key=lambda each: each[1])
    files = [file.read_bytes() for file in _files_of(tokenizer.name_or_path)]

    # A name that the tokenizer lacks is undefined in templates. Rendering with a mark in its place shows its use.
    missing = {name: f"{ANSWER} {name}" for name in NAMED if name not in tokenizer.special_tokens_map}
    with_them, _ = _render(tokenizer, **missing)

    return OpenedTokenizer(
        tokenizer=backend.to_str(),
        special_tokens=tokenizer.special_tokens_map,
        templates=templates if isinstance(templates, dict) else {"default": templates},
        highest=[each for each in highest if each[1] in rendered or any(map(_names(each[0]), files))],
        splits_special=bool(tokenizer.split_special_tokens),
        cleans_up=bool(tokenizer.clean_up_tokenization_spaces and (corrupts or not is_bpe)),
        eos_token_id=tokenizer.eos_token_id,
        turn_end=next(((added[id].content, id) for id in ends if id in added), None),
        undefined=[name for name, mark in missing.items() if mark in with_them],
        refusal=refusal,
    )


def _files_of(name: str) -> list[Path]:
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    found = [cached_file(name, file, **options, _raise_exceptions_for_connection_errors=False) for file in WITH_TOKENS]
    return [Path(file) for file in found if file]


def _names(token: str) -> Callable[[bytes], bool]:
    """Return whether a file has a token, in either form of JSON. A default of a class is in none."""
    forms = {token.encode(errors="replace"), json.dumps(token)[1:-1].encode()}
    return lambda content: any(form in content for form in forms)


def _render(tokenizer: PreTrainedTokenizerBase, **names: str) -> tuple[str, str | None]:
    """Render a conversation, or say which undefined name keeps the template from it."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **names), None
    except jinja2.UndefinedError as error:
        return "", str(error) if UNDEFINED.search(str(error)) else None
    except Exception:  # a template may raise anything, for a conversation that it does not like
        return "", None


if __name__ == "__main__":
    try:
        opened = describe(open_tokenizer(sys.argv[1], "--trust" in sys.argv))
    except Exception as error:  # the last line on stderr says why, as transformers does
        why = error.__cause__ or error
        sys.exit(" ".join(f"{type(why).__name__}: {why}".split()))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(opened))
