"""The page of all keys and the JSON schemas are those of the models, and the examples follow the schemas."""

import json
import runpy
import tomllib
from pathlib import Path

import jsonschema
import pytest

from trireme.config.run import RunConfig
from trireme.config.section import walk

ROOT = Path(__file__).parents[3]


def test_the_page_and_the_schemas_are_current():
    """Where not: `uv run python scripts/configuration_reference.py`."""
    written = dict(runpy.run_path(str(ROOT / "scripts/configuration_reference.py"))["documents"]())
    assert {path for path, text in written.items() if path.read_text(encoding="utf-8") != text} == set()
    page = written[ROOT / "docs/configuration.md"]
    assert [key for key, _ in walk(RunConfig) if f"`{key.split('.')[-1]}`" not in page and f"{key}]" not in page] == []


WITH_SCHEMA = [file for file in sorted((ROOT / "configs").glob("*/*.toml")) if file.read_text().startswith("#:schema ")]


@pytest.mark.parametrize("file", WITH_SCHEMA, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_that_names_its_schema_follows_it(file):
    first = file.read_text().partition("\n")[0]
    schema = json.loads((file.parent / first.removeprefix("#:schema ")).read_text())
    jsonschema.validate(tomllib.loads(file.read_text()), schema)


def test_a_schema_refuses_what_the_command_refuses_and_knows_none():
    schema = json.loads((ROOT / "configs/schema/rl.json").read_text())
    for table in ({"max_stepz": 1}, {"max_steps": 0}, {"trainer": {"optim": {"lr": "fast"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table, schema)
    jsonschema.validate({"orchestrator": {"eval": {"num_examples": "none"}}}, schema)
