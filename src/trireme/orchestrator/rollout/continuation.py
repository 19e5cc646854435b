"""Continue a conversation in tokens: the text that a chat template puts after a sampled turn, up to the next one.

A template is additive if its rendering of a conversation begins its rendering of every longer one. Then the tokens of a
rollout can be one sample. Templates of many thinking models (Qwen3, DeepSeek-R1) are not: they drop the thinking of
earlier turns.
"""

from __future__ import annotations

from typing import Any

import jinja2

from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.turns import ModelMessage

_MARK = "\u2402mark\u2403"  # occurs in no template and no conversation


class Rewritten(Exception):
    """The chat template renders the turn, or what came before, differently in a longer conversation. Says how."""


def text_after(
    tokenizer: ChatTokenizer,
    messages: list[dict[str, Any]],
    *,
    num_past: int,
    reply: ModelMessage,
    sampled: list[int],
    tools: list[dict] | None,
) -> str:
    """Return the text between the last sampled token and the beginning of the model's next turn.

    Args:
        messages: the conversation, with the turn at `num_past`.
        reply: that turn, as the environment was shown it.
        sampled: the tokens of that turn.

    Raises: Rewritten.
    """
    raw = tokenizer.decode(sampled, keep_special=True)
    before = tokenizer.render(messages[:num_past], tools=tools, generate=True)
    now = tokenizer.render(messages, tools=tools, generate=True)
    if now.startswith(before + raw):
        return now[len(before + raw) :]
    with_turn = tokenizer.render(messages[: num_past + 1], tools=tools, generate=False)
    _check_grows(before, with_turn)
    # whitespace and the form of tool calls are up to the template
    rendered = "".join(with_turn[len(before) :].split())
    for part in (reply.reasoning or "", reply.content, *(call.name for call in reply.tool_calls)):
        if "".join(part.split()) not in rendered:
            raise Rewritten(f"{part[:60]!r} is no longer there")
    _check_grows(with_turn, now)
    end = _end_of_turn(tokenizer, messages[:num_past], with_turn[len(before) :], sampled, tools)
    return end + now[len(with_turn) :]


def text_after_any_turn(
    tokenizer: ChatTokenizer,
    messages: list[dict[str, Any]],
    *,
    num_past: int,
    sampled: list[int],
    tools: list[dict] | None,
) -> str:
    """Return the text that follows a turn, where the template writes the turn itself in another way than the model did.

    The turn is replaced by one of plain text, so nothing depends on its thinking and its calls.

    Args:
        messages: the conversation, with the turn at `num_past`.
        sampled: the tokens of that turn.

    Raises: Rewritten where the template does not render a plain turn there.
    """
    plain = [*messages[:num_past], {"role": "assistant", "content": _MARK}, *messages[num_past + 1 :]]
    try:
        text = tokenizer.render(plain, tools=tools, generate=True)
    except jinja2.TemplateError as error:
        raise Rewritten(f"it cannot render a plain turn here: {error}") from error
    if _MARK not in text:
        raise Rewritten("a plain turn is no longer there")
    after = text[text.rfind(_MARK) + len(_MARK) :]
    last = tokenizer.decode(sampled[-1:], keep_special=True)
    if last and tokenizer.is_special(sampled[-1]) and after.lstrip().startswith(last):
        return after.lstrip()[len(last) :]
    return after


def _check_grows(shorter: str, longer: str) -> None:
    """Check that the longer conversation begins with the shorter one."""
    if not longer.startswith(shorter):
        place = next((place for place, pair in enumerate(zip(shorter, longer, strict=False)) if pair[0] != pair[1]), 0)
        was, is_now = shorter[max(0, place - 20) : place + 40], longer[max(0, place - 20) : place + 40]
        raise Rewritten(f"{was!r} became {is_now!r}")


def _end_of_turn(
    tokenizer: ChatTokenizer,
    past: list[dict[str, Any]],
    rendered: str,
    sampled: list[int],
    tools: list[dict] | None,
) -> str:
    """Return what the template writes after a turn, without the token that ended it, where that was sampled.

    Args:
        rendered: the turn, as the template writes it.
    """
    last = tokenizer.decode(sampled[-1:], keep_special=True)
    if last and tokenizer.is_special(sampled[-1]) and last in rendered:
        return rendered[rendered.rfind(last) + len(last) :]
    try:
        marked = tokenizer.render([*past, {"role": "assistant", "content": _MARK}], tools=tools, generate=False)
    except jinja2.TemplateError as error:
        raise Rewritten(f"it cannot render a plain turn here: {error}") from error
    end = marked[marked.rfind(_MARK) + len(_MARK) :]
    if _MARK not in marked or not rendered.endswith(end):
        raise Rewritten(f"a turn ends in {rendered[-40:]!r}, a plain one in {end[-40:]!r}")
    return end
