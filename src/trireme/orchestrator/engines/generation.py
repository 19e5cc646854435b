"""Read one turn of the model from an engine's answer."""

from __future__ import annotations

from trireme.journal.model_turn import Turn
from trireme.orchestrator.engines.expert_routes import ExpertShape, routes_of
from trireme.orchestrator.engines.responses import (
    Choice,
    Logprobs,
    Response,
    Sampled,
    Span,
    TokenLogprob,
    choice_of,
    kept_of,
    read_choice,
    top_logprobs_of,
)

NO_VERSION = -1


class Unconfirmed(Exception):
    """An answer by weights that were never confirmed, or none: the engine was replaced by another process."""


def largest_answer(*, num_prompt: int, max_tokens: int, num_kept: int, experts: ExpertShape | None) -> int:
    """Return more bytes than an honest answer has: about 80 per token, 100 per candidate of a token, its routes, and
    the prompt if that is asked for.
    """
    routes = 0 if experts is None else 2 * experts.layers * experts.top_k * experts.dtype.itemsize
    return (4 << 20) + 16 * num_prompt + max_tokens * (1024 + 512 * num_kept) + (num_prompt + max_tokens) * routes


def read_turn(
    choice: Choice,
    *,
    newest: int,
    vocab_size: int | None = None,
    is_cut: bool = False,
    num_top: int = 0,
    experts: ExpertShape | None = None,
    num_computed: int = 0,
    num_prompt: int = 0,
    num_cached: int | None = None,
    cached_since: int = 0,
) -> Turn:
    """Build a turn from an answer that was checked.

    Args:
        newest: version that the engine has confirmed.
        is_cut: the sampler was cut, and the engine has to report what each token was chosen from.
        num_top: likeliest tokens of each place whose logprobs are kept; with 0, none are.
        experts: of the model; None if the engine does not have to report which of them it used.
        num_computed: tokens of the prompt for which it has to.
        num_prompt: tokens of the prompt.
        num_cached: of them, tokens that the engine found in its prefix cache; None if it does not say.
        cached_since: version at which the engine's caches were emptied last.

    Raises:
        BadAnswer: what the engine reports makes no sense.
        Unconfirmed: a token was sampled by weights that were never confirmed, or it was broken off.
    """
    # Any other name belongs to weights that were never confirmed: another process has replaced the engine.
    spans = choice.weight_versions
    for name in (span.version for span in spans):
        is_number = name.isascii() and name.isdecimal() and len(name) < 19
        if not (is_number and int(name) <= newest):
            raise Unconfirmed(f"it sampled under version {name[:40]!r}, known is {newest}")

    if choice.finish_reason == "abort":
        raise Unconfirmed("it was aborted in the engine")

    routes = routes_of(choice, num_prompt=num_computed, shape=experts) if experts else None

    # An update that empties the caches makes the engine compute again what it had read and sampled. It does so too if
    # it has to make room for other requests, which no answer tells.
    cuts = [span.start for span in spans if 0 < span.start < span.end and int(span.version) <= cached_since]
    again = sum(num_prompt + start for start in cuts)
    computed = None if num_cached is None else max(0, num_prompt - num_cached) + len(choice.token_ids) + again
    return Turn(
        ids=choice.token_ids,
        logprobs=[entry.logprob for entry in choice.logprobs.content],
        versions=[int(span.version) for span in spans for _ in range(span.start, span.end)],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        kept=kept_of(choice, vocab_size=vocab_size) if is_cut else None,
        top_logprobs=top_logprobs_of(choice, num_top, vocab_size=vocab_size) if num_top else None,
        routes=routes,
        routes_shape=() if routes is None else routes.shape,
        num_computed=computed,
    )


def read_foreign_turn(data: bytes, *, max_tokens: int, vocab_size: int | None) -> Turn:
    """Build a turn from an answer of `/v1/completions` by a model that is not the policy. Raises: BadAnswer."""
    found = read_choice(data, Sampled)
    ids, logprobs = found.token_ids, [TokenLogprob(logprob) for logprob in found.logprobs.token_logprobs]
    spans = [Span(str(NO_VERSION), 0, len(ids))]
    choice = Choice(ids, found.finish_reason, Logprobs(logprobs), spans, found.stop_reason)
    choice_of(Response(choices=[choice]), max_tokens=max_tokens, vocab_size=vocab_size)  # checks it
    return Turn(
        ids=ids,
        logprobs=found.logprobs.token_logprobs,
        versions=[NO_VERSION] * len(ids),
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
    )
