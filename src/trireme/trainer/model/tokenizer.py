"""The tokenizer, as every part of the trainer opens it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trireme.base.errors import ConfigError


def open_tokenizer(name: str, trust_remote_code: bool, *, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """
    Args:
        chat_template: a file with another one than its own.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The tokenizer {name!r} cannot be loaded: {error}. Set `tokenizer.name`.") from error
    if chat_template:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer
