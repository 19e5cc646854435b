"""Rules of sampling: what no engine, no trainer or no chat template could do with a table of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from trireme.config.inference import sampling_names
from trireme.config.orchestrator import OrchestratorConfig
from trireme.config.sampling import MOST_KEPT, OF_TEMPLATE, Sampling, template_kwargs_of

OTHER_NAMES = {"max_completion_tokens": "max_tokens"}
"""Names of sampling parameters in the APIs of vendors, and ours."""


_ANSWER_FORMAT = {"n", "logprobs", "prompt_logprobs", "detokenize", "output_kind", "flat_logprobs"}
"""Sampling parameters that decide the form of an answer, which the orchestrator must be able to read."""


def samplings(config: OrchestratorConfig) -> Iterator[tuple[str, Sampling]]:
    """Yield each sampling table with its name; those of sources as they are over the run's."""
    yield "orchestrator.sampling", config.sampling
    for each in config.env:
        if each.sampling is not None:
            yield f'orchestrator.env["{each.resolved_name}"].sampling', config.of(each.resolved_name).sampling
    if config.eval:
        yield "orchestrator.eval.sampling", config.eval.sampling
        for one in config.eval.env:
            if one.sampling is not None:
                yield (
                    f'orchestrator.eval.env["{one.resolved_name}"].sampling',
                    config.eval.of(one.resolved_name).sampling,
                )


def environment_template_kwargs(config: OrchestratorConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variables of the chat template that environments' tables give, with the names of their keys."""
    for table, environments in (("env", config.env), ("eval.env", config.eval.env if config.eval else ())):
        for each in environments:
            key = f"`orchestrator.{table}` {each.resolved_name!r}"
            yield key, each.chat_template_kwargs


def sampling_problems(table: str, sampling: Sampling) -> Iterator[str]:
    """Yield what an engine of ours could not do with a table of sampling parameters."""
    known, own = sampling_names(), set(Sampling.model_fields) - {"extra_body"}
    is_given_once = not (sampling.chat_template_kwargs and "chat_template_kwargs" in sampling.extra_body)
    yield from template_problems(table, sampling.template_request)

    for key in sorted(sampling.extra_body):
        if key in OF_TEMPLATE and is_given_once:
            continue
        if key in own:
            # vLLM would silently take one of the two.
            yield (
                f"Duplicate sampling parameters: `{key}` is a key of `{table}` ({getattr(sampling, key)}) and "
                f"of its `extra_body` too ({sampling.extra_body[key]}) - expected it once. "
                f"Set `{table}.{key}` and remove it from `extra_body`."
            )
        elif key in _ANSWER_FORMAT:
            yield (
                f"{table}.extra_body.{key} - expected parameters that decide what is sampled: this one decides the "
                "form of the engine's answer, in which the orchestrator reads tokens, logprobs and versions. Remove it."
            )
        elif known and key not in known:
            # A key of the answer's form would be refused in turn, so it is never suggested.
            names = {name: name for name in {*known, *own, *OF_TEMPLATE} - _ANSWER_FORMAT} | OTHER_NAMES
            near = get_close_matches(key, names, n=1, cutoff=0.6)
            advice = f"Did you mean `{names[near[0]]}`?" if near else _AS_TEMPLATE.format(key=key)
            yield f"{table}.extra_body.{key} - expected a parameter of vLLM's SamplingParams. {advice}"

    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        least, most = sampling.min_tokens, sampling.max_tokens
        yield f"{table}.min_tokens = {least}, max_tokens = {most} - expected at most as many. Lower `min_tokens`."


_AS_TEMPLATE = "Remove it; a variable of the chat template belongs into `chat_template_kwargs = {{ {key} = … }}`."


def template_problems(table: str, request: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a table gives the chat template what no template could take."""
    try:
        template_kwargs_of(request)
    except ValueError as error:
        yield f"{table}: {error}. Correct it."


_REWEIGHT = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


_FORBID = ("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs")


_NEUTRAL = {"repetition_penalty": 1.0}  # 0 or empty for the others


def distorting(given: Mapping[str, Any], *, cut: bool) -> list[str]:
    """Return the arguments by which the engine samples from another distribution than the trainer can compute.

    Args:
        cut: whether the sampler chooses among a part of the vocabulary; tokens that are forbidden are then not in it.
    """
    names = _REWEIGHT if cut else _REWEIGHT + _FORBID
    return [name for name in names if given.get(name) and given[name] != _NEUTRAL.get(name)]


def sampling_notes(config: OrchestratorConfig) -> list[str]:
    """Return what is allowed and worth knowing, one sentence each, for a dry run and the start of a run."""
    views = (config.sources or {"": config}).values()
    return list(dict.fromkeys(note for view in views for note in _notes_of(view.sampling)))


def _notes_of(sampling: Sampling) -> list[str]:
    given = sampling.model_dump(exclude={"extra_body"}, exclude_defaults=True) | sampling.extra_body
    notes = []
    if biased := distorting(given, cut=sampling.cuts):
        notes.append(
            f"orchestrator.sampling: {', '.join(biased)} make the engine sample from another distribution than the "
            "trainer can compute, so importance ratios are off by it - leave them out, unless that is meant."
        )
    if sampling.cuts and (sampling.top_k or 0) <= 0:
        notes.append(
            f"orchestrator.sampling: top_p or min_p without top_k - at most the {MOST_KEPT} likeliest tokens are "
            "chosen from, so that the trainer can be told which they were. Set `top_k` for another number."
        )
    return notes
