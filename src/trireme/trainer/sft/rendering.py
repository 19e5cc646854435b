"""Render conversations to tokens, and mark those that are learned: exactly those that the model will have to generate.

The chat template renders the text. A learned message begins where the template has rendered everything before it (for
the assistant, with the generation prompt, as an engine has it when it starts to sample) and ends with its end-of-turn
token. Marks in templates (`{% generation %}`) are ignored: few templates have them, they mark the assistant only, and
they leave open whether the end of a turn belongs to it.

If a template only appends, a conversation is one sample. If it rewrites earlier turns (most drop earlier thinking), a
new sample begins there, as in rollouts of several turns. In each sample the model sees what an engine would show it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from trireme.algo.pictures import expand
from trireme.base.errors import ConfigError
from trireme.base.safe_text import encodable
from trireme.config.model.tokenizer import rowless_token
from trireme.journal.message_text import form_for
from trireme.messages import Picture
from trireme.trainer.sft.conversations import ASSISTANT, Completion, Conversation
from trireme.trainer.sft.pictures import Grid

_BATCH = 64  # texts that are tokenized in one call, which uses all threads


@dataclass(frozen=True)
class Rendered:
    """A text and the spans of it that are learned."""

    text: str
    spans: tuple[tuple[int, int], ...]  # pairs of characters of the text, first and last + 1, ascending
    is_plain: bool = False  # rendered without a template, so without begin and end tokens
    pictures: tuple[Grid, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Tokenized:
    """The tokens of a sample of any length."""

    ids: list[int]
    mask: list[int]  # 1 where it is learned
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Renderer:
    """Renders and tokenizes the conversations of a run."""

    tokenizer: PreTrainedTokenizerBase
    roles: tuple[str, ...] = (ASSISTANT,)
    template_kwargs: tuple[tuple[str, Any], ...] = ()
    image_token: int | None = None  # the placeholder of a picture; None in a run without pictures
    rows: int | None = None  # number in the model's embedding; None if it is not known

    def render(self, conversation: Conversation | Completion) -> list[Rendered]:
        """Render a conversation into one text per sample.

        Raises:
            ConfigError: the template cannot render it, or its generation prompt is not how it renders an answer.
        """
        # A completion has no template: the text is what the model is given.
        if isinstance(conversation, Completion):
            prompt = encodable(conversation.prompt)
            text = prompt + encodable(conversation.completion)
            return [Rendered(text, ((len(prompt), len(text)),), is_plain=True, where=conversation.where)]

        samples: list[Rendered] = []
        text, seen = "", 0
        spans: tuple[tuple[int, int], ...] = ()

        # Each learned message is rendered with all before it, as an engine would have been given them.
        for index, message in enumerate(conversation.messages):
            if not conversation.is_learned(index, self.roles):
                continue
            is_answer = message["role"] == ASSISTANT
            # What the template writes up to the message is given, and what it adds after that is learned.
            before = self._apply(conversation, index, generate=is_answer) if index or is_answer else ""
            after = self._apply(conversation, index + 1)
            if not after.startswith(before):
                raise _contradiction(conversation, before, after)
            _check_calls(conversation, message, after[len(before) :])

            if spans and not before.startswith(text):  # the template rewrote earlier turns
                samples.append(_rendered(conversation, text, spans, seen))
                spans = ()

            text, spans, seen = after, (*spans, (len(before), len(after))), index + 1
        return [*samples, _rendered(conversation, text, spans, seen)] if spans else samples

    def _apply(self, conversation: Conversation, num_messages: int, *, generate: bool = False) -> str:
        try:
            text = self._apply_template(
                [self._form(message) for message in conversation.messages[:num_messages]],
                tools=list(conversation.tools) if conversation.tools else None,
                add_generation_prompt=generate,
            )
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"{conversation.where}: the chat template cannot render its first {num_messages} messages "
                f"({type(error).__name__}: {error}) - expected messages as the template knows them. Correct the "
                "conversation, or set `chat_template` to a template that renders it."
            ) from error
        return encodable(text)

    @cached_property
    def _form(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        return form_for(self._apply_template)

    def _apply_template(self, messages: list[dict[str, Any]], **more: Any) -> str:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **more, **dict(self.template_kwargs))
        assert isinstance(text, str)
        return text

    def tokenize(self, texts: Sequence[Rendered]) -> list[Tokenized]:
        """Tokenize all texts in one call, which is faster than one by one."""
        # A slow tokenizer gives no offsets.
        if not self.tokenizer.is_fast or not texts:  # tokenizers refuse an empty list
            return [self._in_parts(rendered) for rendered in texts]
        encoded = self.tokenizer(
            [rendered.text for rendered in texts], add_special_tokens=False, return_offsets_mapping=True
        )
        pairs = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._masked(rendered, ids, offsets) for rendered, ids, offsets in pairs]

    def _masked(self, rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> Tokenized:
        # A token across a border would belong to both sides.
        if any(begin < border < end for border in _borders(rendered) for begin, end in offsets):
            return self._in_parts(rendered)
        mask, stop = [0] * len(ids), 0
        begins, ends = [begin for begin, _ in offsets], [end for _, end in offsets]

        # Offsets ascend, so a search finds a span's tokens without a pass over all of them.
        for first, last in rendered.spans:
            start = bisect_left(begins, first, stop)
            stop = bisect_right(ends, last, start)
            mask[start:stop] = self._until_end_of_turn(ids[start:stop], rendered)
        return self._whole(rendered, ids, mask)

    def _in_parts(self, rendered: Rendered) -> Tokenized:
        """Tokenize span by span, if a token would cross a border: an engine tokenizes the text before it separately."""
        ids: list[int] = []
        mask: list[int] = []
        borders = [0, *_borders(rendered)]
        for number, (first, last) in enumerate(zip(borders, [*borders[1:], len(rendered.text)], strict=True)):
            part = self.tokenizer(rendered.text[first:last], add_special_tokens=False)["input_ids"]
            ids += part
            mask += self._until_end_of_turn(part, rendered) if number % 2 else [0] * len(part)
        return self._whole(rendered, ids, mask)

    def _whole(self, rendered: Rendered, ids: list[int], mask: list[int]) -> Tokenized:
        # An engine adds the begin token to a plain text; its end is learned, as nothing else ends it.
        if rendered.is_plain:
            end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
            ids, mask = [*self._begin, *ids, *end], [*[0] * len(self._begin), *mask, *[1] * len(end)]

        # A token without a row in the embedding would fail in the middle of a step.
        if problem := rowless_token(ids, self.rows, self.tokenizer.convert_ids_to_tokens):
            raise ConfigError(f"{rendered.where}: {problem}")

        if self.image_token is None:
            return Tokenized(ids, mask)

        # The placeholder of a picture becomes all of its image tokens, none of which is learned.
        try:
            whole, pictures = expand(ids, self.image_token, rendered.pictures)
        except ValueError as error:
            raise ConfigError(
                f"{rendered.where}: the chat template writes {error}. Take a template that writes one for each part "
                '{"type": "image"}, and texts without the placeholder.'
            ) from error
        learned: list[int] = []
        unseen = iter(pictures)
        for token, is_learned in zip(ids, mask, strict=True):
            learned += [0] * next(unseen).num_tokens if token == self.image_token else [is_learned]
        return Tokenized(whole, learned, tuple(pictures))

    @cached_property
    def _begin(self) -> list[int]:
        """The tokens that an engine puts in front of a text, if any."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else []

    def _until_end_of_turn(self, ids: list[int], rendered: Rendered) -> list[int]:
        """Mark tokens up to the end of the turn, or all if none ends it. What a template adds is never sampled."""
        end, stop = self.tokenizer.eos_token_id, len(ids)
        if rendered.is_plain:
            return [1] * stop
        if end in ids:
            stop = ids.index(end) + 1
        else:
            # A template may end turns with a token of its own instead of the end of the text.
            special = [place + 1 for place, token in enumerate(ids) if token in self._special]
            if special and not self.tokenizer.decode(ids[special[-1] :]).strip():  # none that text follows ends a turn
                stop = special[-1]
        return [1] * stop + [0] * (len(ids) - stop)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)


def tokenized(renderer: Renderer, conversations: Iterator[Conversation | Completion]) -> Iterator[list[Tokenized]]:
    """Yield the samples of each conversation."""
    while batch := [renderer.render(one) for one in islice(conversations, _BATCH)]:
        samples = iter(renderer.tokenize([rendered for texts in batch for rendered in texts]))
        for texts in batch:
            yield [next(samples) for _ in texts]


def _rendered(conversation: Conversation, text: str, spans: tuple[tuple[int, int], ...], num_messages: int) -> Rendered:
    seen = conversation.pictures[:num_messages]
    return Rendered(text, spans, pictures=tuple(each for one in seen for each in one), where=conversation.where)


def _borders(rendered: Rendered) -> list[int]:
    return [border for span in rendered.spans for border in span]


def _check_calls(conversation: Conversation, message: Mapping[str, Any], rendered: str) -> None:
    """Check that a learned message has its calls: a model that is trained without them learns to call nothing."""
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name")
        if encodable(str(name)) not in rendered:
            raise ConfigError(
                f"{conversation.where}: the chat template leaves the call of `{name}` out of the message that is to be "
                f"learned ({rendered[:60]!r}) - expected its name there. Set `chat_template` to a template that writes "
                'the tool calls of such messages, or mark the message with `"train": false`.'
            )


def _contradiction(conversation: Conversation, before: str, after: str) -> ConfigError:
    same = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), len(after))
    return ConfigError(
        f"{conversation.where}: before an answer the chat template writes …{before[max(0, same - 20) :]!r}, and then "
        f"renders the answer as …{after[max(0, same - 20) : same + 60]!r} - expected one to begin with the other, for "
        "that is what the model would be given. Templates that open the thinking want `<think>` in every answer: add "
        "it, or set `chat_template_kwargs = { enable_thinking = false }`, or another `chat_template`."
    )
