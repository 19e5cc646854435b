"""The examples in `configs/` run on the machine that they are for, and follow the schemas of the configuration."""

import ast
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.models.model_configs import MODELS
from trireme.algo.model.architecture import architecture_of
from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules.check import check
from trireme.config.run import RunConfig
from trireme.config.section import walk
from trireme.tools.formats.run_file import read_run_file, resolve_run
from trireme.tools.plan.estimate import estimate_run
from trireme.tools.plan.machine import describe_machine
from trireme.tools.plan.step_time import lengths_of
from trireme.tools.workspace import SIZES, Size, size_of, sized

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ("alphabet-sort", "gsm8k", "math-python", "reverse-text", "wiki-search", "wordle")
FORMATS = {"ours": "configs/{}/rl.toml", "vf-rl": "configs/vf-rl/{}.toml"}
FORMATS |= {"prime-rl": "configs/prime-rl/{}.toml", "hosted": "configs/rl/{}.toml"}
GPUS: dict[Size, int] = {"cpu": 0, "one-gpu": 1, "eight-gpus": 8}

# The models of the examples, and those whose sizes they have.
KNOWN = {
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
}  # fmt: skip

examples = pytest.mark.parametrize("name", ENVIRONMENTS)
formats = pytest.mark.parametrize("kind", FORMATS)


def file_of(kind: str, name: str) -> Path:
    return ROOT / FORMATS[kind].format(name)


def run_of(kind: str, name: str, size: Size, folder: Path) -> RunConfig:
    devices = Devices(gpus=tuple(map(str, range(GPUS[size]))), cores=16)
    file = folder / f"{kind}.toml"
    file.write_text(sized(file_of(kind, name).read_text(), size))
    if kind == "ours":
        config = resolve(load_run_config(["@", str(file)], program="rl")[0], devices)
        check(config, devices)
        return config
    kinds = ("vf-rl",) if kind == "vf-rl" else ("flat", "hosted")
    return resolve_run(read_run_file(["@", str(file)], devices, program=kind, kinds=kinds), devices)


@examples
@formats
@pytest.mark.parametrize("size", SIZES)
def test_every_example_is_a_run_on_the_machine_that_it_is_for(kind, name, size, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = run_of(kind, name, size, tmp_path)
    assert config.device == ("cpu" if size == "cpu" else "cuda")
    assert {environment.id.rpartition("/")[2] for environment in config.orchestrator.env} == {name}
    assert {*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ())} == set(range(GPUS[size]))
    assert {key for environment in config.orchestrator.env for key in environment.args} <= parameters(name)
    if size == "cpu":
        assert (ROOT / config.model.name / "config.json").is_file()
        return
    # by the project's own plan, at the longest that the configuration allows
    memory_gib = 16 if (name, size) == ("reverse-text", "one-gpu") else None
    machine = describe_machine(Devices(cores=16), gpu="h100", gpus=GPUS[size], memory_gib=memory_gib)
    model = architecture_of(MODELS[KNOWN[config.model.name]])
    assert estimate_run(config, model, machine, lengths_of(config)).fits


def parameters(name: str) -> set[str]:
    module = name.replace("-", "_")
    tree = ast.parse((ROOT / "environments" / module / f"{module}.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "load_environment")
    return {argument.arg for argument in function.args.args}


@examples
@formats
def test_example_configuration_is_sized_for_a_cpu_as_shipped(kind, name):
    text = file_of(kind, name).read_text()
    assert without_empty_tables(tomllib.loads(text)) == tomllib.loads(sized(text, "cpu"))
    program = {"ours": "rl", "vf-rl": "vf-rl", "prime-rl": "prime-rl", "hosted": "prime-rl"}[kind]
    assert f"uv run {program} @ {FORMATS[kind].format(name)}" in text.partition("\n\n")[0]


def without_empty_tables(table: dict[str, Any]) -> dict[str, Any]:
    kept = {key: without_empty_tables(value) if isinstance(value, dict) else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if value != {}}


def test_a_machine_gets_the_largest_examples_that_it_can_run():
    sizes = {0: "cpu", 1: "one-gpu", 7: "one-gpu", 8: "eight-gpus", 16: "eight-gpus"}
    assert {count: size_of(Devices(gpus=tuple("g" * count))) for count in sizes} == sizes


def test_the_page_has_every_key():
    """`scripts/check` refuses a page that is not current."""
    pages = "".join(file.read_text() for file in sorted((ROOT / "docs/configuration").glob("*.md")))
    keys = [key for key, _ in walk(RunConfig)]
    assert [key for key in keys if f"`{key.split('.')[-1]}`" not in pages and f"{key}]" not in pages] == []


@cache
def validator(schema: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(schema.read_text()))


def test_files_that_name_their_schema_follow_it():
    for file in sorted((ROOT / "configs").glob("*/*.toml")):
        first, _, text = file.read_text().partition("\n")
        if first.startswith("#:schema "):
            known = validator((file.parent / first.removeprefix("#:schema ")).resolve())
            assert [error.message for error in known.iter_errors(tomllib.loads(text))] == [], file
    assert validator.cache_info().currsize > 1


def test_a_schema_refuses_what_the_command_refuses_and_knows_none():
    is_valid = validator(ROOT / "configs/schema/rl.json").is_valid
    for table in ({"max_stepz": 1}, {"max_steps": 0}, {"trainer": {"optim": {"lr": "fast"}}}):
        assert not is_valid(table)
    assert is_valid({"orchestrator": {"eval": {"num_examples": "none"}}})
