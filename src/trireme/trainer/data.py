"""Supervised data: conversations on disk become samples whose assistant tokens count."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trireme.algo.packing import Sample
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.messages import build_tokens

log = get_logger("data")

Conversation = list[dict[str, Any]]


def read_conversations(path: Path) -> list[Conversation]:
    """From a .jsonl file, all of a folder's in order of their names, or what a .py file's `conversations()` returns.

    Raises:
        ConfigError: names the file and line that is no conversation.
    """
    found = _made_by(path) if path.suffix == ".py" and path.exists() else _written_in(path)
    if not found:
        raise ConfigError(f"{path} holds no conversation - at least one was expected. Set `data` to another.")
    return found


def _made_by(path: Path) -> list[Conversation]:
    return [
        _conversation(entry, f"{path}, conversation {number}") for number, entry in enumerate(_call_conversations(path))
    ]


def _written_in(path: Path) -> list[Conversation]:
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.exists() for file in files):
        raise ConfigError(f"{path} does not exist, or holds no .jsonl file - conversations were expected. Set `data`.")
    return [
        _conversation(_parse(line, f"{file}, line {number}"), f"{file}, line {number}")
        for file in files
        for number, line in enumerate(_lines(file), start=1)
        if line.strip()
    ]


def _lines(file: Path) -> list[str]:
    """Not `splitlines`, which also splits at characters that JSON allows inside a text, such as U+2028."""
    return file.read_text(encoding="utf-8").split("\n")


def _call_conversations(path: Path) -> list[Any]:
    functions = runpy.run_path(str(path))
    if "conversations" not in functions:
        raise ConfigError(f"{path} has no function `conversations` - one that returns a list was expected. Add it.")
    return functions["conversations"]()


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _no_conversation(where, f"is not JSON ({error})") from error


def _conversation(entry: Any, where: str) -> Conversation:
    try:
        messages = entry["messages"]
        roles = [message["role"] for message in messages]
        silent = [message for message in messages if "content" not in message and "tool_calls" not in message]
    except (KeyError, TypeError) as error:
        raise _no_conversation(where, f"is not a conversation ({type(error).__name__}: {error})") from error
    if silent:
        raise _no_conversation(where, f"has a message without content ({silent[0]})")
    if "assistant" not in roles:
        raise _no_conversation(where, "has no assistant message, so nothing to learn")
    return messages


def _no_conversation(where: str, problem: str) -> ConfigError:
    return ConfigError(f'{where} {problem} - expected {{"messages": [{{"role": "user", "content": "…"}}, …]}}.')


def open_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The tokenizer {name!r} cannot be loaded: {error}. Set `tokenizer.name`.") from error


def to_sample(tokenizer: PreTrainedTokenizerBase, messages: Conversation, seq_len: int) -> Sample:
    """Token by token as the chat template renders it; what the assistant says counts, up to its end-of-turn token.

    Raises:
        ConfigError: the template rewrites earlier turns, so a conversation cannot be one sample.
    """
    ids: list[int] = []
    mask: list[int] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:turn], generate=True)
        whole = _render(tokenizer, messages[: turn + 1], generate=False)
        if whole[: len(prompt)] != prompt or prompt[: len(ids)] != ids:
            raise ConfigError(
                "The chat template does not only append: with one more message it renders the earlier ones "
                "differently. Conversations of one assistant turn were expected; split longer ones."
            )
        answer = whole[len(prompt) :]
        mask += [0] * (len(prompt) - len(ids)) + _until_end_of_turn(answer, tokenizer.eos_token_id)
        ids = whole
    ids, mask = ids[:seq_len], mask[:seq_len]
    zeros = np.zeros(len(ids))
    return Sample(build_tokens(ids=ids, loss_mask=mask, logprobs=zeros, advantages=zeros, versions=zeros - 1), 1.0)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Conversation, *, generate: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _until_end_of_turn(answer: list[int], end: int | None) -> list[int]:
    stop = answer.index(end) + 1 if end in answer else len(answer)
    return [1] * stop + [0] * (len(answer) - stop)


class Epochs:
    """Batches out of a fixed list of samples, each epoch in a seeded order of its own. A function of the step alone."""

    def __init__(self, samples: list[Sample], batch_size: int, seed: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, step: int) -> list[Sample]:
        first = step * self._batch_size
        return [self._at(place) for place in range(first, first + self._batch_size)]

    def _at(self, place: int) -> Sample:
        epoch, index = divmod(place, len(self._samples))
        return self._samples[int(self._order(epoch)[index])]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._samples))
