"""A YAML file of `trl grpo --config` is a run, with its data and reward functions by name."""

import asyncio
import json
from pathlib import Path

import pytest

from support.runs.resolved_runs import CPU
from trireme.base.errors import ConfigError
from trireme.config.resolve import resolve
from trireme.config.rules.check import problems
from trireme.tools.formats.environments.trl_rows import find_reward, load_environment
from trireme.tools.formats.yaml_run import TRL_ROWS, read_yaml_run

FILE = """\
model_name_or_path: models/reverse-text-tiny
dataset_name: rows.jsonl
reward_funcs: [my_rewards_of_yaml.long, think_format_reward]
reward_weights: [1.0, 0.5]
learning_rate: 3e-4
max_steps: 7
per_device_train_batch_size: 16
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "grpo.yaml").write_text(FILE)
    (tmp_path / "my_rewards_of_yaml.py").write_text(
        "def long(completions, **row):\n    return list(map(len, completions))\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    return tmp_path


def test_file_is_a_run_that_would_start():
    config = resolve(read_yaml_run(["@", "grpo.yaml"])[0], CPU)
    assert problems(config, CPU) == []
    assert (config.max_steps, config.trainer.optim.lr, config.orchestrator.batch_size) == (7, 3e-4, 16)
    (environment,) = config.orchestrator.env
    assert environment.id == str(TRL_ROWS)
    assert environment.args["reward_funcs"] == ["my_rewards_of_yaml.long", "think_format_reward"]


def test_flags_of_ours_take_precedence_over_the_file():
    config, invocation = read_yaml_run(["@grpo.yaml", "--max-steps", "3", "--trainer.optim.lr=1e-5", "--dry-run"])
    assert (config.max_steps, config.trainer.optim.lr, invocation.dry_run) == (3, 1e-5, True)


def test_environment_scores_by_the_named_functions(folder: Path):
    made = load_environment(**read_yaml_run(["@", "grpo.yaml"])[0].orchestrator.env[0].args)
    (row,) = made["dataset"]
    text = "<think></think>y"
    assert asyncio.run(made["reward"]([text], [[]], [row]))[0]["reward"] == len(text) + 0.5


@pytest.mark.parametrize(
    "name", ["unheard_of", "missing_module.reward", "my_rewards_of_yaml.missing", "accuracy_reward"]
)
def test_reward_that_cannot_be_found_is_named(name: str):
    with pytest.raises(ValueError, match=name):
        find_reward(name)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("max_steps: 7\n", "", "--max-steps N"),
        ("max_steps: 7", "max_steps: 7\nreward_model_name_or_path: m", "reward_model_name_or_path"),
        ("dataset_name: rows.jsonl\n", "", "no dataset_name"),
        ("learning_rate: 3e-4", "learning_rate: much", "`learning_rate`"),
        ("learning_rate: 3e-4", "warmup_steps: much", "warmup_steps"),
    ],
)
def test_problem_is_told_in_the_keys_of_the_file(folder: Path, before: str, after: str, words: str):
    (folder / "grpo.yaml").write_text(FILE.replace(before, after))
    with pytest.raises(ConfigError, match=words):
        read_yaml_run(["@", "grpo.yaml"])


def test_two_files_are_refused():
    with pytest.raises(ConfigError, match="one YAML file"):
        read_yaml_run(["@", "grpo.yaml", "@", "other.toml"])
