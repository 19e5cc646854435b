"""Continue a conversation in tokens: the text that a chat template puts after a sampled turn, up to the next one.

A template is additive if its rendering of a conversation begins its rendering of every longer one. Then the tokens of a
rollout can be one sample. Templates of many thinking models (Qwen3, DeepSeek-R1) are not: they drop the thinking of
earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2

from trireme.journal.model_turn import Message
from trireme.orchestrator.rollout.chat import ChatTokenizer

MARK = "\u2402mark\u2403"  # occurs in no template and no conversation


class Rewritten(Exception):
    """The chat template renders the turn, or what came before, differently in a longer conversation.

    Its message shows the difference.
    """


@dataclass(frozen=True)
class Continuation:
    """A conversation that continues after a sampled turn."""

    tokenizer: ChatTokenizer
    messages: list[dict[str, Any]]  # with the turn at `num_past`
    num_past: int
    sampled: list[int]  # the tokens of the turn
    tools: list[dict] | None
    template_kwargs: dict[str, Any]

    def text_after(self, said: Message) -> str:
        """Return the text between the last sampled token and the beginning of the model's next turn.

        Args:
            said: the turn, as the environment was shown it.

        Raises: Rewritten.
        """
        # the usual case: the template repeats what was sampled, character by character
        raw = self.tokenizer.decode(self.sampled, keep_special=True)
        before = self._render(self.messages[: self.num_past], generate=True)
        now = self._render(self.messages, generate=True)
        if now.startswith(before + raw):
            return now[len(before + raw) :]

        # otherwise the template may have its own form of the turn, as long as nothing of the turn is lost
        with_turn = self._render(self.messages[: self.num_past + 1], generate=False)
        _check_grows(before, with_turn)
        # whitespace and the form of tool calls are up to the template
        rendered = "".join(with_turn[len(before) :].split())
        names = [call["function"]["name"] for call in said.get("tool_calls", ())]
        for part in (said.get("reasoning_content", ""), said["content"], *names):
            if "".join(part.split()) not in rendered:
                raise Rewritten(f"{part[:60]!r} is no longer there")

        # a later prompt must begin with this same text, as the sampled tokens stay in its place
        _check_grows(with_turn, now)
        return self._end_of_turn(with_turn[len(before) :]) + now[len(with_turn) :]

    def text_after_any_turn(self) -> str:
        """Return the text that follows the turn, if the template writes it in another way than the model did.

        The turn is replaced by one of plain text, so nothing depends on its thinking and its calls.

        Raises: Rewritten if the template does not render a plain turn there.
        """
        after, last = self._after_plain_turn(self.messages[self.num_past + 1 :], generate=True), self._ending_token()
        # the sample ends in this token already, so it must not be given a second time
        if last and after.lstrip().startswith(last):
            return after.lstrip()[len(last) :]
        return after

    def _end_of_turn(self, rendered: str) -> str:
        """Return what the template writes after the turn, without the token that ended it, if that was sampled.

        Args:
            rendered: the turn, as the template writes it.
        """
        # after the sampled token only the template's own rest is missing, a line break for example
        if (last := self._ending_token()) and last in rendered:
            return rendered[rendered.rfind(last) + len(last) :]
        # no token ended the turn (it was cut off, for example): a plain turn shows what comes after its text
        end = self._after_plain_turn([], generate=False)
        if not rendered.endswith(end):
            raise Rewritten(f"a turn ends in {rendered[-40:]!r}, a plain one in {end[-40:]!r}")
        return end

    def _ending_token(self) -> str:
        """Return the special token that ended the turn, as text; an empty text if none did."""
        is_ended = bool(self.sampled) and self.tokenizer.is_special(self.sampled[-1])
        return self.tokenizer.decode(self.sampled[-1:], keep_special=True) if is_ended else ""

    def _after_plain_turn(self, later: list[dict[str, Any]], *, generate: bool) -> str:
        """Return what the template writes after a turn of plain text in place of this one. Raises: Rewritten."""
        plain = [*self.messages[: self.num_past], {"role": "assistant", "content": MARK}, *later]
        try:
            text = self._render(plain, generate=generate)
        except jinja2.TemplateError as error:
            raise Rewritten(f"it cannot render a plain turn here: {error}") from error
        if MARK not in text:
            raise Rewritten("a plain turn is no longer there")
        return text[text.rfind(MARK) + len(MARK) :]

    def _render(self, messages: list[dict[str, Any]], *, generate: bool) -> str:
        return self.tokenizer.render(
            messages, tools=self.tools, generate=generate, template_kwargs=self.template_kwargs
        )


def rewrites_always(tokenizer: ChatTokenizer, template_kwargs: dict[str, Any]) -> bool:
    """Return whether the template rewrites even a short turn of plain text between two questions."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}, {"role": "user", "content": "b"}]

    def render(num_messages: int, *, generate: bool) -> str:
        return tokenizer.render(talk[:num_messages], tools=None, generate=generate, template_kwargs=template_kwargs)

    try:
        before, with_turn, now = render(1, generate=True), render(2, generate=False), render(3, generate=True)
    # a template that refuses this talk has shown nothing about others
    except jinja2.TemplateError:
        return False
    is_kept = with_turn.startswith(before) and MARK in with_turn[len(before) :]
    return not (is_kept and now.startswith(with_turn))


def _check_grows(shorter: str, longer: str) -> None:
    """Check that the longer conversation begins with the shorter one."""
    if not longer.startswith(shorter):
        place = next((place for place, pair in enumerate(zip(shorter, longer, strict=False)) if pair[0] != pair[1]), 0)
        was, is_now = shorter[max(0, place - 20) : place + 40], longer[max(0, place - 20) : place + 40]
        raise Rewritten(f"{was!r} became {is_now!r}")
