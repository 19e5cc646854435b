"""Decode and check the answers of engines.

An engine is another program, in another version. Its answers are checked before they are used. One that makes no sense
costs its rollout (`BadAnswer` is a ValueError, with which a rollout fails) or its weight transfer, and nothing else.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

POSITIVE = 1e-3  # a logprob is at most 0; rounding may leave a trace above it
LEFT_OUT = -9000.0  # vLLM writes -9999 for the logprob of a token that could not be sampled

MASS_TOLERANCE = 0.02
"""The probabilities of what was kept add up to 1, unless so many tie for the last place that some are missing."""

MOST_WORKERS = 1 << 16  # most workers of one engine

LOAD = ("kv_cache_usage_perc", "num_requests_waiting", "num_preemptions_total")
LOAD_ROUTE = "metrics/?" + "&".join(f"name[]=vllm:{name}" for name in ("cache_config_info", *LOAD))
"""Only the metrics of the load, which take an idle vLLM 1 ms. All of them take 6 ms, and 160 ms the first time."""

Each = TypeVar("Each")


class BadAnswer(ValueError):
    """An engine's answer that makes no sense."""


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class Candidate(msgspec.Struct):
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "repetition", "abort"]
    logprobs: Logprobs
    weight_versions: list[Span]
    stop_reason: int | str | None = None  # the stop token or string; None at the end of sequence too
    sampling_mask: list[list[int]] | None = None  # choices for each token, with `return_sampling_mask`
    routed_experts: str | None = None  # experts of each token, base64, if they are reported; see `expert_routes`


class Prompted(msgspec.Struct, kw_only=True):
    """A choice of `/v1/completions`, for what it says of the prompt."""

    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None


class SampledLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class Sampled(msgspec.Struct):
    """A choice of `/v1/completions` with `return_token_ids`, for what was sampled."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length", "repetition"]
    logprobs: SampledLogprobs
    stop_reason: int | str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # tokens that the engine took from its prefix cache


class Usage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class Response(Prompted, kw_only=True):
    choices: list[Choice]
    prompt_token_ids: list[int] | None = None  # tokens of the prompt as the engine read it, if asked for
    usage: Usage | None = None
    prefill_s: Annotated[float, msgspec.Meta(ge=0)] | None = None  # see `fast_generate`; vLLM's own route lacks it

    @property
    def num_cached(self) -> int | None:
        """Tokens of the prompt that were in the prefix cache; None if the engine does not say."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


class Load(msgspec.Struct):
    """An engine's load, of all its cores together."""

    kv_tokens: int  # size of its KV cache
    kv_usage: float  # share of it that requests under way take: what is only kept for later ones counts as free
    waiting: int  # requests that it has no room for
    preemptions: int  # since it came up
    epoch: int = -1  # see `Window`


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class Called(msgspec.Struct):
    function: CalledFunction


class ParsedMessage(msgspec.Struct):
    """A turn as the engine's parsers read it."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Called] = []


class Parsed(msgspec.Struct):
    """A choice of `/v1/chat/completions/derender`."""

    message: ParsedMessage


class _Choices(msgspec.Struct, Generic[Each]):
    choices: list[Each]


class Answer(msgspec.Struct, Generic[Each]):
    """The answer to a `/collective_rpc` request."""

    results: list[Each]  # one per worker


class WorkerAnswer(msgspec.Struct):
    """The answer of an engine's worker to a call of one of our methods (`inference/weight_engine.py`)."""

    failure: str | None = None  # the error, if the method failed; other fields are empty then


class Ahead(WorkerAnswer, kw_only=True):
    ahead: bool  # the worker takes tensors in while it serves


class WeightReport(WorkerAnswer, kw_only=True):
    """The weights that a worker reports to hold."""

    digests: dict[str, str]  # digests of the tensors that the last update brought, by name
    incomplete: list[str]  # layers that the last update left with old weights


class WeightInfo(msgspec.Struct):
    weight_version: str | int  # "default" before the first update


class WorldSize(msgspec.Struct):
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKERS)]


class PauseInfo(msgspec.Struct):
    is_paused: bool


class _Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[_Model]


def read_answer(data: bytes, kind: type[Each]) -> Each:
    """Raises: BadAnswer."""
    try:
        return msgspec.json.decode(data, type=kind)
    except Exception as error:  # any bytes may arrive: RecursionError, UnicodeDecodeError, ...
        shown = data[:80].decode(errors="backslashreplace")
        words = f"({type(error).__name__}: {error}): {shown!r}"
        name = getattr(kind, "__name__", kind)
        raise BadAnswer(f"The engine answered {len(data)} bytes that are no {name} {words}") from error


def read_choice(data: bytes, kind: type[Each]) -> Each:
    """Read the one choice of an answer of vLLM's OpenAI routes. Raises: BadAnswer."""
    return _only(read_answer(data, _Choices[kind]).choices)  # type: ignore[valid-type]


def _only(choices: list[Each]) -> Each:
    if len(choices) != 1:
        raise BadAnswer(f"The engine gave {len(choices)} answers to one request - one was expected.")
    return choices[0]


def choice_of(response: Response, *, max_tokens: int, vocab_size: int | None = None) -> Choice:
    """Return the one completion, with a logprob and a version for each token.

    Args:
        vocab_size: of the model, if it is known: no token is beyond it.

    Raises: BadAnswer.
    """
    choice = _only(response.choices)
    num_tokens = len(choice.token_ids)
    if num_tokens > max_tokens:
        raise BadAnswer(f"The engine gave {num_tokens} tokens, {choice.token_ids[:5]} ... - {max_tokens} allowed.")
    _check_ids(choice.token_ids, vocab_size)

    # A logprob that is not finite would make the loss NaN, and one above 0 is no probability.
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if len(logprobs) != num_tokens:
        raise BadAnswer(f"The engine gave {num_tokens} tokens but {len(logprobs)} logprobs.")
    if odd := [logprob for logprob in logprobs if not (math.isfinite(logprob) and logprob <= POSITIVE)]:
        raise BadAnswer(f"The engine gave {odd[0]} for a logprob - finite ones of at most 0 were expected.")

    # Logprobs name their tokens, which must be those that were sampled.
    named = [entry.token_id for entry in choice.logprobs.content]
    if others := [pair for pair in zip(named, choice.token_ids, strict=True) if pair[0] not in (None, pair[1])]:
        raise BadAnswer(f"The engine gave the logprob of token {others[0][0]} where it sampled {others[0][1]}.")

    # Versions cover all tokens without a gap, because staleness is judged by the oldest of them.
    at = 0
    for span in choice.weight_versions:  # contiguous, from the first token to the last
        if span.start != at or span.end < at:
            raise BadAnswer(f"The engine gave versions for tokens {span.start} to {span.end} after {at} tokens.")
        at = span.end
    if at != num_tokens:
        raise BadAnswer(f"The engine gave {num_tokens} tokens but versions for {at}.")
    return choice


def _check_ids(ids: list[int], vocab_size: int | None) -> None:
    limit = vocab_size or 2**31
    if strange := [place for place, token in enumerate(ids) if not 0 <= token < limit]:
        raise BadAnswer(
            f"The engine gave token {ids[strange[0]]} - ids from 0 to {limit - 1} were expected (place {strange[0]} of "
            f"{len(ids)})."
        )


def kept_of(choice: Choice, *, vocab_size: int | None = None) -> list[list[int]]:
    """Return [C] tokens that each one was chosen from, ascending: the engine's sampling mask, or its likeliest tokens.

    Raises: BadAnswer.
    """
    if choice.sampling_mask is not None:
        kept = choice.sampling_mask
    else:
        kept = [_candidates(entry) for entry in choice.logprobs.content]
    if len(kept) != len(choice.token_ids):
        raise BadAnswer(f"The engine gave {len(choice.token_ids)} tokens, and what {len(kept)} were chosen from.")

    # A token outside of its choices would have probability 0 in the trainer, so a loss that is not finite.
    for token, ids in zip(choice.token_ids, kept, strict=True):
        _check_ids(ids, vocab_size)
        if token not in ids or len(set(ids)) != len(ids):
            raise BadAnswer(f"The engine sampled token {token} from {ids[:5]} ... - expected it there, and each once.")
    return [sorted(ids) for ids in kept]


def _candidates(entry: TokenLogprob) -> list[int]:
    possible = [candidate for candidate in entry.top_logprobs if candidate.logprob > LEFT_OUT]
    mass = sum(math.exp(min(candidate.logprob, POSITIVE)) for candidate in possible)
    if not abs(mass - 1) < MASS_TOLERANCE:
        raise BadAnswer(
            f"The engine gave {len(possible)} tokens of probability {mass:.3f} in all for those that a cut sampler "
            "could choose from - 1 was expected. Lower `top_k`, or leave out what cuts."
        )
    return [candidate.token_id for candidate in possible]


def top_logprobs_of(choice: Choice, num_top: int, *, vocab_size: int | None = None) -> list[dict[int, float]]:
    """Return [C] the likeliest tokens that each one was chosen from, at most `num_top`, with their logprobs.

    Raises: BadAnswer.
    """
    found = []
    for entry in choice.logprobs.content:
        # vLLM puts the sampled token among them if it is none of them.
        likeliest = sorted(entry.top_logprobs, key=lambda each: (-each.logprob, each.token_id))[:num_top]
        top = {each.token_id: min(each.logprob, 0.0) for each in likeliest if each.logprob > LEFT_OUT}
        _check_ids(list(top), vocab_size)
        mass = sum(map(math.exp, top.values()))
        if not 0 < mass < 1 + MASS_TOLERANCE:
            raise BadAnswer(
                f"The engine gave {len(top)} likeliest tokens of probability {mass:.3f} in all - above 0 and at most 1 "
                f"was expected, of up to {num_top}."
            )
        found.append(top)
    return found


def check_prompt(response: Response, ids: list[int]) -> None:
    """Check that the engine read a prompt with pictures as these tokens. Raises: BadAnswer."""
    read = response.prompt_token_ids or []
    if read != ids:
        raise BadAnswer(
            f"The engine made {len(read)} tokens of a prompt with pictures, and the orchestrator {len(ids)} - expected "
            "the same. Compare preprocessor_config.json in the model that the engine serves with that of `model.name`."
        )


def prompt_logprobs_of(response: Prompted, ids: list[int]) -> list[float]:
    """Return [T - 1] logprobs: of ids[t + 1] after ids[:t + 1]. Raises: BadAnswer."""
    given = response.prompt_logprobs or []
    if len(given) != len(ids):
        raise BadAnswer(f"The engine gave logprobs for {len(given)} tokens of a prompt that has {len(ids)}.")

    # vLLM has nothing for the first token, which nothing precedes.
    found = [(entry or {}).get(str(token)) for token, entry in zip(ids[1:], given[1:], strict=True)]
    missing = [place + 1 for place, entry in enumerate(found) if entry is None]
    if missing:
        raise BadAnswer(f"The engine gave no logprob for token {missing[0]} of the prompt.")
    return [entry.logprob for entry in found if entry is not None]


def read_load(metrics: str) -> Load | None:
    """Read the answer to `LOAD_ROUTE`. Returns None if a metric is missing."""
    sizes = re.findall(r'kv_cache_size_tokens="(\d+)"', metrics)
    found = [re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE) for name in LOAD]
    if not sizes or not all(found):
        return None
    usage, waiting, preemptions = (list(map(float, each)) for each in found)  # a line for each core
    return Load(sum(map(int, sizes)), max(usage), int(sum(waiting)), int(sum(preemptions)))
