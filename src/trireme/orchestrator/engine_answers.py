"""What engines answer, as far as we read it, and whether it makes sense.

An engine is another program in another version. What it answers is measured before anything is made of it: an answer
that makes no sense costs its rollout (`BadAnswer` is a ValueError, with which a rollout fails) or its transfer, and
nothing else.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

POSITIVE = 1e-3
"""A logprob is at most 0; rounding may leave a trace above it."""


class BadAnswer(ValueError):
    """An engine's answer that makes no sense."""


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class TokenLogprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs
    weight_versions: list[Span]


class Response(msgspec.Struct):
    choices: list[Choice]
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None


class _Report(msgspec.Struct):
    """Of one worker of an engine."""

    digests: dict[str, str]
    incomplete: list[str]


class _Reports(msgspec.Struct):
    results: list[_Report]


_decode = msgspec.json.Decoder(Response).decode


def read_response(data: bytes) -> Response:
    """Raises: BadAnswer."""
    try:
        return _decode(data)
    except Exception as error:  # whatever bytes can make a decoder raise: RecursionError, UnicodeDecodeError, ...
        shown = data[:80].decode(errors="backslashreplace")
        raise BadAnswer(
            f"The engine answered {len(data)} bytes that are no completion ({type(error).__name__}: {error}): {shown!r}"
        ) from error


def choice_of(response: Response, *, max_tokens: int) -> Choice:
    """The one completion, with a logprob and a version for each token.

    Raises: BadAnswer.
    """
    if len(response.choices) != 1:
        raise BadAnswer(f"The engine gave {len(response.choices)} completions - one was expected.")
    choice = response.choices[0]
    num_tokens = len(choice.token_ids)
    if num_tokens > max_tokens or any(not 0 <= token < 2**31 for token in choice.token_ids):
        raise BadAnswer(f"The engine gave {num_tokens} tokens, {choice.token_ids[:5]} ... - {max_tokens} ids allowed.")
    _check_logprobs([entry.logprob for entry in choice.logprobs.content], num_tokens)
    _check_spans(choice.weight_versions, num_tokens)
    return choice


def _check_logprobs(logprobs: list[float], num_tokens: int) -> None:
    if len(logprobs) != num_tokens:
        raise BadAnswer(f"The engine gave {num_tokens} tokens but {len(logprobs)} logprobs.")
    if odd := [logprob for logprob in logprobs if not (math.isfinite(logprob) and logprob <= POSITIVE)]:
        raise BadAnswer(f"The engine gave {odd[0]} for a logprob - finite ones of at most 0 were expected.")


def _check_spans(spans: list[Span], num_tokens: int) -> None:
    """One after the other, from the first token to the last."""
    at = 0
    for span in spans:
        if span.start != at or span.end < at:
            raise BadAnswer(f"The engine gave versions for tokens {span.start} to {span.end} after {at} tokens.")
        at = span.end
    if at != num_tokens:
        raise BadAnswer(f"The engine gave {num_tokens} tokens but versions for {at}.")


def prompt_logprobs_of(response: Response, ids: list[int]) -> list[float]:
    """[T - 1] of ids[t + 1] after ids[:t + 1].

    Raises: BadAnswer.
    """
    given = response.prompt_logprobs or []
    if len(given) != len(ids):
        raise BadAnswer(f"The engine gave logprobs for {len(given)} tokens of a prompt that has {len(ids)}.")
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids[1:], given[1:], strict=True)]
    missing = [place + 1 for place, entry in enumerate(found) if entry is None]
    if missing:
        raise BadAnswer(f"The engine gave no logprob for token {missing[0]} of the prompt.")
    return [entry.logprob for entry in found if entry is not None]


def weight_reports_of(answer: Any, *, num_workers: int | None = None) -> list[tuple[dict[str, str], list[str]]]:
    """Digests and incomplete layers, worker by worker.

    Raises: BadAnswer where not every worker has reported.
    """
    try:
        results = msgspec.convert(answer, _Reports).results
    except msgspec.ValidationError as error:
        raise BadAnswer(f"The engine's report of its weights cannot be read: {error}") from error
    if not results or (num_workers is not None and len(results) != num_workers):
        raise BadAnswer(f"{len(results)} of the engine's {num_workers or 1} workers reported their weights.")
    return [(result.digests, result.incomplete) for result in results]


def number_of(answer: Any, key: str, *, low: int, high: int) -> int:
    """Raises: BadAnswer."""
    value = answer.get(key) if isinstance(answer, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadAnswer(f"The engine answered {str(answer)[:200]} - `{key}` from {low} to {high} was expected.")
    return value


def text_of(answer: Any, key: str) -> str:
    """Raises: BadAnswer."""
    value = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise BadAnswer(f"The engine answered {str(answer)[:200]} - `{key}` was expected.")
    return str(value)
