"""The page of all keys and the JSON schemas are those of the models, and the examples follow the schemas."""

import json
import runpy
import tomllib
from functools import cache
from pathlib import Path

import jsonschema

from trireme.config.run import RunConfig
from trireme.config.section import walk

ROOT = Path(__file__).parents[3]


def test_the_page_and_the_schemas_are_current():
    """Where not: `uv run python scripts/configuration_reference.py`."""
    written = dict(runpy.run_path(str(ROOT / "scripts/configuration_reference.py"))["documents"]())
    assert {path for path, text in written.items() if path.read_text(encoding="utf-8") != text} == set()
    page = written[ROOT / "docs/configuration.md"]
    assert [key for key, _ in walk(RunConfig) if f"`{key.split('.')[-1]}`" not in page and f"{key}]" not in page] == []


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
