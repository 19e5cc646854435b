"""Rules of sampling and parsing: what the engine would refuse, die of, or silently do otherwise; what to say aloud."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.inference import parser_names, sampling_names
from trireme.config.orchestrator import MOST_KEPT, Sampling
from trireme.config.run import RunConfig

_OURS = frozenset({"n", "logprobs", "prompt_logprobs", "detokenize", "output_kind", "flat_logprobs"})
"""Sampling parameters that decide the form of an answer, which the orchestrator must be able to read."""

_REWEIGHT = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
_FORBID = ("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs")
_NEUTRAL = {"repetition_penalty": 1.0}  # 0 or empty for the others


def distorting(given: Mapping[str, Any], *, cut: bool) -> list[str]:
    """The arguments by which the engine samples from another distribution than the trainer can compute.

    Args:
        cut: whether the sampler chooses among a part of the vocabulary; what is forbidden is then not among it.
    """
    names = _REWEIGHT if cut else _REWEIGHT + _FORBID
    return [name for name in names if given.get(name) and given[name] != _NEUTRAL.get(name)]


def samplings(config: RunConfig) -> Iterator[tuple[str, Sampling]]:
    """Each with the name of its table."""
    yield "orchestrator.sampling", config.orchestrator.sampling
    if config.orchestrator.eval:
        yield "orchestrator.eval.sampling", config.orchestrator.eval.sampling


def _parsers_exist(config: RunConfig, _: Devices) -> Iterator[str]:
    plugins = {name.replace("_", "-") for name in config.inference.args}
    for key, plugin in (("tool_call_parser", "tool-parser-plugin"), ("reasoning_parser", "reasoning-parser-plugin")):
        name, known = getattr(config.inference.model, key), parser_names(key)
        if name is None or name in known or not known or plugin in plugins:
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        advice = f"Did you mean `{near[0]}`?" if near else "Take one of these, or leave it out."
        yield (
            f'inference.model.{key} = "{name}" - vLLM knows no parser of that name; expected one of '
            f"{', '.join(sorted(known))}. {advice} A parser of your own: `[inference.args]` `{plugin}`."
        )


def _automatic_tools_have_a_parser(config: RunConfig, _: Devices) -> Iterator[str]:
    model = config.inference.model
    if model.enable_auto_tool_choice and not model.tool_call_parser:
        yield (
            "inference.model.enable_auto_tool_choice = true without a `tool_call_parser` - vLLM wants both. Name the "
            'form in which this model writes tool calls, for example `tool_call_parser = "hermes"`, or leave both out: '
            "the hermes form is then read by the orchestrator."
        )


def _seeds_do_not_kill_the_engine(config: RunConfig, _: Devices) -> Iterator[str]:
    if config.device != "cpu" or config.synchronous:
        return
    for table, sampling in samplings(config):
        if sampling.seed is not None:
            yield (
                f'{table}.seed = {sampling.seed} with device = "cpu" in an asynchronous run: vLLM\'s engine dies '
                "of a seeded request whose prompt it takes in two parts, as happens after an update of weights. "
                "Remove it, or make the run synchronous (`max_async_level = 0`), which is seeded by `seed` as a whole."
            )


def _extra_sampling_is_known(config: RunConfig, _: Devices) -> Iterator[str]:
    known = sampling_names()
    for table, sampling in samplings(config):
        for key in sorted(sampling.extra_body):
            if key in _OURS:
                yield (
                    f"{table}.extra_body.{key} - it decides the form of the engine's answer, in which the orchestrator "
                    "reads tokens, logprobs and versions; parameters that decide what is sampled were expected. "
                    "Remove it."
                )
            elif known and key not in known and key not in Sampling.model_fields:
                near = get_close_matches(key, known, n=1, cutoff=0.6)
                advice = f"Did you mean `{near[0]}`?" if near else "Remove it."
                yield f"{table}.extra_body.{key} - vLLM's sampling knows no such parameter. {advice}"


def _sampling_is_possible(config: RunConfig, _: Devices) -> Iterator[str]:
    for table, sampling in samplings(config):
        if sampling.top_k is not None and sampling.top_k < -1:
            yield (
                f"{table}.top_k = {sampling.top_k} - expected the number of tokens to choose from. "
                "Leave it out to choose from all."
            )
        if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
            yield (
                f"{table}.min_tokens = {sampling.min_tokens}, max_tokens = {sampling.max_tokens} - expected at most as "
                "many. Lower `min_tokens`, or raise `max_tokens`."
            )


def _sampling_mask_is_possible(config: RunConfig, _: Devices) -> Iterator[str]:
    """vLLM refuses every request that is not cut by `top_k` once its engine returns sampling masks."""
    wanted = {name.replace("-", "_"): value for name, value in config.inference.args.items()}
    if not wanted.get("return_sampling_mask"):
        return
    if config.device == "cpu":
        yield (
            "inference.args.return_sampling_mask on a CPU - vLLM's engine can do that on GPUs only. Remove it: what a "
            "cut sampler could choose from is then asked for through logprobs, with the same result."
        )
    for table, sampling in samplings(config):
        if sampling.temperature == 0 or (sampling.top_k or 0) <= 0:
            yield (
                f"inference.args.return_sampling_mask with {table} at temperature {sampling.temperature:g} and top_k "
                f"{sampling.top_k} - vLLM then refuses requests that are greedy or not cut by `top_k`. Set both there, "
                "or remove `return_sampling_mask`: what was kept is asked for through logprobs where it is not set."
            )


_ROLLS_OUT: tuple[ProcessName | None, ...] = (None, "orchestrator")
_SERVES: tuple[ProcessName | None, ...] = (None, "inference")

RULES: tuple[tuple[Callable[[RunConfig, Devices], Iterator[str]], tuple[ProcessName | None, ...]], ...] = (
    (_parsers_exist, _SERVES),
    (_automatic_tools_have_a_parser, _SERVES),
    (_seeds_do_not_kill_the_engine, _ROLLS_OUT),
    (_extra_sampling_is_known, _ROLLS_OUT),
    (_sampling_is_possible, _ROLLS_OUT),
    (_sampling_mask_is_possible, (None, "orchestrator", "inference")),
)


def sampling_notes(config: RunConfig) -> list[str]:
    """What is allowed and worth knowing: one sentence each, shown by a dry run and at the start."""
    sampling = config.orchestrator.sampling
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
