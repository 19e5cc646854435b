"""What `trireme gepa` is made of: prompts, examples, feedback, the journal, and what is typed."""

import datetime
import json
import math
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from gepa.core.result import GEPAResult

from support.engines.reflecting import ENVIRONMENT
from support.runs.toy_environments import with_environment
from trireme.base.errors import ConfigError
from trireme.base.processes import free_port
from trireme.config.load import load_config
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Reply, RunTask
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.files import Records, Reflection, check_same, write_results
from trireme.tools.gepa.gepa import command as gepa
from trireme.tools.gepa.gepa import to_flags
from trireme.tools.gepa.optimize import draw_examples, places_of
from trireme.tools.policies.prompts import PromptedEnvironment, own_prompt, with_system
from trireme.tools.policies.selection import PolicyWanted

REPOSITORY = Path(__file__).parents[3]


def test_gepa_candidate_replaces_the_system_prompt_of_an_environment(here):
    asked: list[list[dict[str, Any]]] = []

    async def ask(question: Ask) -> Reply:
        asked.append(question.messages)
        return Reply(content="SEA", finish_reason="stop")

    async def use(environment: Environment) -> None:
        task = RunTask(task="t", index=0)
        loaded = await environment.run(Session(task, ask))
        tried = await PromptedEnvironment(environment, "Be loud.", columns=["heard", "gone"]).run(Session(task, ask))
        assert await own_prompt(environment, [("train", 0), ("train", 1)]) == "Be quiet."
        assert asked[0] == with_system(asked[1], "Be quiet.")
        assert tried.prompt[0]["content"] == "Be loud."
        assert loaded.prompt == with_system(tried.prompt, "Be quiet.")
        assert (loaded.columns, loaded.state_keys) == ({}, [])
        assert (tried.columns, tried.state_keys) == ({"heard": "sea"}, ["answer", "heard", "prompt"])

    Path("harbour.py").write_text(textwrap.dedent(ENVIRONMENT))
    with_environment(here, "harbour.py", use, args={"system_prompt": "Be quiet."})


@pytest.mark.parametrize(
    ("given", "num_train", "num_eval", "sizes"),
    [
        ({}, 2000, 100, (100, 50)),
        ({}, 48, 0, (32, 16)),
        ({}, 0, 60, (40, 20)),
        ({"num_val": 10}, 14, 0, (10, 4)),
        ({"num_train": 8, "num_val": 6}, 24, 4, (8, 4)),
    ],
)
def test_sizes_shrink_to_what_there_is_and_no_example_is_drawn_twice(given, num_train, num_eval, sizes):
    drawn = draw_examples(GepaConfig(env_id="e", model="m", **given), num_train=num_train, num_eval=num_eval)
    assert tuple(map(len, drawn)) == sizes
    assert len({each for part in drawn for each in part}) == sum(sizes)


def test_flags_mean_what_keys_of_a_file_mean(tmp_path):
    keys = {"env_id": "my-env", "model": "a/small", "reflection_model": "a/large", "max_calls": 1000}
    keys |= {"num_train": 200, "num_val": 90, "state_columns": ["parsed_answer", "tool_calls"]}
    (tmp_path / "my.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    begins, ends = "-m a/small -M a/large -B 1000", "-n 200 -N 90 --state-columns parsed_answer tool_calls"
    for typed in (
        f"run {tmp_path / 'my.toml'}",
        f"run my-env {begins} {ends}",
        f"{begins} my-env {ends}",
        f"my-env {begins.replace('-m ', '-m=')} {ends}",
    ):
        loaded, _ = load_config(to_flags(typed.split()), GepaConfig, program="trireme gepa")
        assert loaded == GepaConfig.model_validate(keys)


def test_gepa_reflection_model_defaults_to_the_endpoint_of_the_model(here, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    Path("endpoints.toml").write_text('[large]\nmodel = "org/large"\nurl = "http://127.0.0.1:2/v1"\nkey = "two"\n')
    Path("folder").mkdir()
    large = PolicyWanted("org/large", "http://127.0.0.1:2/v1", "two", trained=False)
    assert places_of(GepaConfig(env_id="e", model="large")) == (large, large)
    found = places_of(GepaConfig(env_id="e", model="folder", reflection_model="large"))
    assert found == (PolicyWanted("folder", trained=False), large)
    for url, key in (("http://127.0.0.1:3/v1", None), ("https://127.0.0.1:3/v1", "mine")):  # in clear only if asked
        _, elsewhere = places_of(GepaConfig(env_id="e", model="m", base_url=url))
        assert elsewhere == PolicyWanted("m", url, key, trained=False)
        assert "mine" not in repr(elsewhere)


def test_every_shipped_file_loads(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    for file in Path("configs/gepa").glob("*.toml"):
        assert gepa([str(file), "--dry-run", "-b", f"http://127.0.0.1:{free_port()}/v1"]) == 0
        env_id = tomllib.loads(capsys.readouterr().out)["env_id"]
        assert Path("environments", env_id.replace("-", "_")).exists()
    assert gepa([str(file), "--dry-run"]) == 0


def test_a_search_is_resumed_by_the_same_settings_alone(tmp_path):
    given = {"env_id": "e", "model": "m", "env_args": {"since": datetime.date(2024, 1, 1), "most": math.inf}}
    config = GepaConfig.model_validate(given)
    (tmp_path / "metadata.json").write_text(json.dumps(config.model_dump(mode="json")))
    check_same(tmp_path, GepaConfig.model_validate(given | {"max_calls": 7, "num_workers": 2}))
    for changed in ({"initial_prompt": "p.txt"}, {"num_val": 9}, {"env_args": {}}, {"seq_len": 99}):
        with pytest.raises(ConfigError, match=f"other settings .{next(iter(changed))}"):
            check_same(tmp_path, GepaConfig.model_validate(given | changed))


def test_gepa_repeats_reflections_that_were_torn_or_failed(tmp_path):
    file = tmp_path / "reflections.jsonl"
    records = Records(file, Reflection)
    for name in "abcd":
        records.add(Reflection(name=name, nth=0, question="q", answer=name, error="no" if name == "b" else None))
    file.write_bytes(file.read_bytes()[:-5])
    records = Records(file, Reflection)
    assert list(records.lines) == [("a", 0), ("c", 0)]
    records.add(Reflection(name="e", nth=0, question="q", answer="e"))
    with file.open("a") as lines:
        lines.write('{"name": "f", "nth": 0, "question": "q", "answer": "f", "state": NaN}\n')
    assert list(Records(file, Reflection).lines) == [("a", 0), ("c", 0), ("e", 0), ("f", 0)]


def test_a_date_of_a_toml_file_among_the_arguments_is_written_as_text(tmp_path):
    found = GEPAResult([{"system_prompt": "p"}], [[None]], [1.0], [{}], {}, [0])
    config = GepaConfig(env_id="e", model="m", env_args={"since": datetime.date(2026, 1, 2)})
    write_results(tmp_path, config, found, [], {"first_prompt": "p"})
    assert json.loads((tmp_path / "best_args.json").read_text()) == {"since": "2026-01-02", "system_prompt": "p"}
    check_same(tmp_path, config, "p")
    with pytest.raises(ConfigError, match="began with another prompt"):
        check_same(tmp_path, config, "q")
