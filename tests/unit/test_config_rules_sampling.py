"""Sampling and parsers that cannot work are refused before anything is launched, in words that say what to do."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from parsing import parse
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config import engine_names
from trireme.config.engine_names import parser_names, sampling_names
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import check
from trireme.config.rules_sampling import sampling_notes
from trireme.config.run import RunConfig
from trireme.inference.server import server_arguments

CPU = Devices(gpus=(), cores=4)
GPUS = Devices(gpus=("0", "1"), cores=4)
ENV = ("--orchestrator.env", '[{ id = "reverse-text" }]')


def resolved(*flags: str, on: Devices = CPU) -> RunConfig:
    return resolve(load_run_config([*ENV, *flags], program="rl")[0], on)


def refusal(*flags: str, on: Devices = CPU) -> str:
    with pytest.raises(ConfigError) as caught:
        check(resolved(*flags, on=on), on)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [("tool-call-parser", "hermess", "hermes"), ("tool-call-parser", "qwen3_code", "qwen3_coder"),
     ("reasoning-parser", "qwen_3", "qwen3"), ("reasoning-parser", "deepseek-r1", "deepseek_r1")],
)  # fmt: skip
def test_a_parser_that_vllm_does_not_know_is_refused_with_the_likeliest(key, typed, meant):
    message = refusal(f"--inference.model.{key}", typed)
    assert f'{key.replace("-", "_")} = "{typed}"' in message
    assert f"Did you mean `{meant}`?" in message


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "deepseek_v3"])
def test_the_usual_parsers_are_taken(name):
    check(resolved("--inference.model.tool-call-parser", name), CPU)


def test_a_parser_of_ones_own_may_have_any_name():
    plugin = ["--inference.args.tool-parser-plugin", "mine.py"]
    check(resolved("--inference.model.tool-call-parser", "mine", *plugin), CPU)


def test_a_named_tool_parser_is_used_without_saying_so_twice():
    arguments = server_arguments(resolved("--inference.model.tool-call-parser", "hermes"))
    assert "--enable-auto-tool-choice" in arguments
    assert "--enable-auto-tool-choice" not in server_arguments(resolved())


def test_automatic_tool_choice_needs_a_parser():
    assert "without a `tool_call_parser`" in refusal("--inference.model.enable-auto-tool-choice")


def test_names_are_those_of_the_installed_vllm_and_cost_no_import():
    """Read in another process by vLLM's own code, from the same source; the door itself must not load it."""
    source = Path(find_spec("vllm").origin).parent / "tool_parsers" / "__init__.py"
    table = next(node for node in parse(source.read_text()).body if isinstance(node, ast.Assign) and "REGISTER" in
                 ast.unparse(node.targets[0]))  # fmt: skip
    assert set(parser_names("tool_call_parser")) == set(ast.literal_eval(table.value))
    assert {"qwen3", "deepseek_r1"} <= set(parser_names("reasoning_parser"))
    assert {"temperature", "stop_token_ids", "ignore_eos", "structured_outputs"} <= set(sampling_names())
    code = (
        "import sys; from trireme.config.engine_names import *; assert parser_names('reasoning_parser'); "
        "print({'torch', 'vllm'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_without_vllm_names_are_left_to_the_engine(monkeypatch):
    monkeypatch.setattr(engine_names, "find_spec", lambda name: None)
    engine_names.parser_names.cache_clear()
    try:
        check(resolved("--inference.model.tool-call-parser", "whatever"), CPU)
    finally:
        engine_names.parser_names.cache_clear()


@pytest.mark.parametrize("table", ["orchestrator", "orchestrator.eval"])
def test_a_seed_that_would_kill_the_engine_is_refused(table):
    seed = (f"--{table}.sampling.seed", "7")
    assert f"{table}.sampling.seed = 7" in refusal(*seed)
    check(resolved(*seed, "--max-async-level", "0"), CPU)
    check(resolved(*seed, on=GPUS), GPUS)


@pytest.mark.parametrize("key", ["n", "logprobs", "prompt_logprobs", "detokenize"])
def test_what_would_change_the_form_of_an_answer_is_refused(key):
    assert f"extra_body.{key}" in refusal("--orchestrator.sampling.extra-body", f'{{"{key}": 1}}')


def test_an_unknown_sampling_parameter_is_refused_with_the_likeliest():
    message = refusal("--orchestrator.sampling.extra-body", '{"stop_tokens_ids": [7]}')
    assert "Did you mean `stop_token_ids`?" in message


def test_sampling_that_the_engine_would_refuse_is_refused_at_once():
    few = ["--orchestrator.sampling.max-tokens", "4"]
    assert "min_tokens = 5, max_tokens = 4" in refusal(*few, "--orchestrator.sampling.min-tokens", "5")
    assert "top_k = -2" in refusal("--orchestrator.sampling.top-k", "-2")
    check(resolved("--orchestrator.sampling.top-k", "-1"), CPU)


def test_an_engine_that_returns_sampling_masks_takes_only_what_is_cut_by_top_k():
    mask = ["--inference.args.return-sampling-mask", "true"]
    cut = ["--orchestrator.sampling.top-k", "20"]
    assert "on GPUs only" in refusal(*mask, *cut)
    assert "orchestrator.sampling at temperature 1 and top_k None" in refusal(*mask, on=GPUS)
    check(resolved(*mask, *cut, on=GPUS), GPUS)
    evaluated = ["--orchestrator.eval.interval", "5"]
    assert "orchestrator.eval.sampling at temperature 0" in refusal(*mask, *cut, *evaluated, on=GPUS)


def test_sampling_that_biases_the_ratio_is_said_aloud():
    assert sampling_notes(resolved()) == []
    (note,) = sampling_notes(resolved("--orchestrator.sampling.presence-penalty", "0.5"))
    assert "presence_penalty make the engine sample from another distribution" in note
    (note,) = sampling_notes(resolved("--orchestrator.sampling.min-tokens", "3"))
    assert "min_tokens" in note
    few = ["--orchestrator.sampling.min-tokens", "3", "--orchestrator.sampling.top-k", "9"]
    assert sampling_notes(resolved(*few)) == []  # what it forbids is not among what was kept
    (note,) = sampling_notes(resolved("--orchestrator.sampling.top-p", "0.9"))
    assert "the 64 likeliest tokens" in note


@pytest.mark.parametrize(("flags", "most"), [([], 88), (["--orchestrator.sampling.top-k", "200"], 258)])
def test_the_engine_may_be_asked_for_all_that_a_cut_sampler_keeps(flags, most):
    arguments = server_arguments(resolved(*flags))
    assert arguments[arguments.index("--max-logprobs") + 1] == str(most)
