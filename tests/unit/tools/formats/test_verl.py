"""Configurations of verl as runs of ours: its arithmetic by hand, its rows and its reward function as they are."""

import asyncio
import math
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.runs.resolved_runs import CPU, value_at
from trireme.base.errors import ConfigError
from trireme.cli.rl import rl
from trireme.config.arguments import is_yaml_run
from trireme.config.nested import merged
from trireme.config.resolve import resolve
from trireme.config.rules.check import problems
from trireme.config.run import RunConfig
from trireme.config.section import find
from trireme.config.translation import translate
from trireme.tools.formats import verl
from trireme.tools.formats.environments.verl_rows import compute_score, load_environment
from trireme.tools.formats.yaml_run import read_yaml_run
from trireme_worker.loading import load_adapter
from trireme_worker.plain import PlainAdapter

ROW = {
    **{"data_source": "made/reverse", "prompt": [{"role": "user", "content": "abc"}], "ability": "text"},
    **{"reward_model": {"style": "rule", "ground_truth": "cba"}, "extra_info": {"index": 7}},
}
SCRIPT = """\
algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=train.parquet
data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=32
actor_rollout_ref.model.path=models/reverse-text-tiny actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm trainer.total_epochs=2
trainer.logger=["console"] trainer.experiment_name=tiny"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist([ROW] * 70), "train.parquet")
    return tmp_path


def read(*words: str, script: str = SCRIPT) -> RunConfig:
    return read_yaml_run([*script.split(), *words])[0]


def values(config: RunConfig, *keys: str) -> list[Any]:
    return [value_at(config, key) for key in keys]


def test_words_of_an_example_script_are_a_run_that_would_start():
    config = resolve(read(), CPU)
    assert problems(config, CPU) == []
    assert config.name == "tiny"
    assert config.seq_len == 96
    assert config.synchronous


def test_batch_is_the_rollouts_of_one_optimizer_step():
    """16 prompts are 4 steps of 4 x 8 rollouts, 70 rows 4 whole batches an epoch, and there are two epochs."""
    assert values(read(), "orchestrator.batch_size", "orchestrator.rollouts_per_example") == [32, 8]
    assert values(read(), "trainer.loss.adv_tau") == [math.sqrt(7 / 8)]
    assert read().max_steps == 4 * 4 * 2
    assert read("trainer.total_training_steps=10").max_steps == 40


def test_steps_between_saves_count_optimizer_steps_here():
    config = read("trainer.save_freq=5", "trainer.test_freq=3", "actor_rollout_ref.actor.optim.lr_warmup_steps=2")
    keys = ("trainer.ckpt.interval", "orchestrator.eval.interval", "trainer.scheduler.warmup_steps")
    assert values(config, *keys) == [20, 12, 8]


def test_file_gives_what_overrides_do_not(folder: Path):
    (folder / "verl.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "data: {train_files: train.parquet, val_files: null, train_batch_size: 8, max_response_length: 16}\n"
        "actor_rollout_ref:\n  model: {path: there}\n"
        "  rollout: {n: 4, response_length: '${data.max_response_length}'}\n"
        "  actor: {ppo_mini_batch_size: 8, optim: {lr: 3e-6}}\n"
        "algorithm: {adv_estimator: rloo}\ntrainer: {total_training_steps: 3}\n"
    )
    config = read_yaml_run(["@", "verl.yaml", "data.train_batch_size=2", "--max-steps", "5", "--name", "mine"])[0]
    keys = ("orchestrator.batch_size", "trainer.optim.lr", "orchestrator.sampling.max_tokens", "model.name")
    assert values(config, *keys) == [8, 3e-6, 16, "there"]
    assert values(config, "max_steps", "name", "orchestrator.advantage.type") == [5, "mine", "leave_one_out"]
    assert config.orchestrator.eval is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"type": "ppo", "proximal": "recomputed", "normalize": "token", "dual_clip": 3.0, "clip_high": 0.2}),
        ("clip_ratio_high=0.28", {"clip_low": 0.2, "clip_high": 0.28}),
        ("loss_agg_mode=seq-mean-token-mean", {"normalize": "sequence"}),
        ("loss_agg_mode=seq-mean-token-sum-norm", {"normalize": "constant", "normalize_length": 32}),
        ("use_kl_loss=True kl_loss_coef=0.01", {"beta": 0.01, "kl_estimator": "k3"}),
        ("use_kl_loss=True kl_loss_coef=0.01 kl_loss_type=mse", {"beta": 0.01, "kl_estimator": "k2"}),
        ("policy_loss.loss_mode=gspo clip_ratio_low=3e-4 clip_ratio_high=4e-4", {"type": "gspo", "clip_high": 4e-4}),
        ("policy_loss.loss_mode=gpg", {"type": "reinforce"}),
        ("entropy_coeff=0.001", {"entropy_bonus": 0.001}),
    ],
)
def test_loss_is_that_of_the_actor(words: str, expected: dict[str, Any]):
    loss = read(*(f"actor_rollout_ref.actor.{word}" for word in words.split())).trainer.loss
    assert {key: getattr(loss, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        ("sapo", {"tau_pos": 2.0}, {"type": "sapo", "tau_pos": 2.0, "normalize": "sequence"}),
        ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {"type": "gmpo", "clip_low": 0.4}),
        ("dppo_tv", {"clip_ratio_c": 20.0}, {"type": "dppo_tv", "mask_low": 0.2, "max_importance_ratio": 20.0}),
        ("clip_cov", {"policy_loss": {"clip_cov_lb": 2.0}}, {"type": "clip_cov", "cov_low": 2.0, "clip_high": 0.2}),
        ("kl_cov", {"policy_loss": {"kl_cov_ratio": 0.1}}, {"cov_ratio": 0.1, "cov_penalty": 0.1}),
    ],
)
def test_keys_of_other_losses_are_set(mode: str, given: dict[str, Any], expected: dict[str, Any]):
    actor = merged({"policy_loss": {"loss_mode": mode}}, given)
    made = translate(merged(verl.DEFAULTS, {"actor_rollout_ref": {"actor": actor}}), verl.VERL).settings
    assert {key: made["trainer", "loss", key] for key in expected} == expected
    assert ("trainer", "loss", "dual_clip") not in made


def test_importance_sampling_of_rollouts_is_the_correction():
    loss = read(
        "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=3"
    ).trainer.loss
    assert (loss.correction, loss.correction_high) == ("token_truncate", 3.0)


def test_overlong_buffer_is_the_length_penalty():
    words = ("enable=True", "len=8", "penalty_factor=0.5")
    config = read(
        *(f"+reward_model.reward_kwargs.overlong_buffer_cfg.{word}" for word in words),
        "reward_model.reward_manager=dapo",
    )
    keys = ("buffer", "max_length", "weight")
    assert values(config, *(f"orchestrator.length_penalty.{key}" for key in keys)) == [8, 32, 0.5]


def test_adapters_have_the_defaults_of_verl():
    assert read().trainer.model.lora is None
    lora = read("actor_rollout_ref.model.lora_rank=8").trainer.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16, ("all-linear",))


def test_gradient_norm_of_zero_bounds_nothing():
    assert read("actor_rollout_ref.actor.grad_clip=0").trainer.optim.max_norm == math.inf


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("algorithm.adv_estimator=gae", "no value network"),
        ("algorithm.use_kl_in_reward=True", "use_kl_loss"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "token-mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=dro", "loss_mode"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "docs/environments.md"),
        ("reward_model.enable=True", "reward function"),
        ("reward_model.reward_manager=batch", "dapo. or .prime"),
        ("data.train_files=missing.parquet", "missing.parquet"),
        ("reward.custom_reward_function=mine.py", "custom_reward_function.path=FILE.py"),
        ("~data.train_files", "no data.train_files"),
        ("@", "the last word"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(word: str, words: str):
    with pytest.raises(ConfigError, match=words):
        read(word)


def test_composition_of_other_files_is_refused(folder: Path):
    (folder / "a.yaml").write_text("defaults: [ppo_trainer, {algorithm: mine}]\ndata: {train_files: train.parquet}")
    with pytest.raises(ConfigError, match="algorithm"):
        read_yaml_run(["@a.yaml"])


def test_yaml_of_neither_system_is_refused_with_both_named(folder: Path):
    (folder / "a.yaml").write_text("lr: 1")
    with pytest.raises(ConfigError, match=r"verl .*trl grpo"):
        read_yaml_run(["@", "a.yaml"])


def test_each_given_key_has_a_line():
    invocation = read_yaml_run([*SCRIPT.split(), "trainer.unheard_of=1"])[1]
    notes = {".".join(line.theirs): line.note for line in invocation.lines}
    assert all(word.partition("=")[0] in notes for word in SCRIPT.split())
    assert notes["trainer.unheard_of"] == "not supported here"
    assert "default of verl" in notes["actor_rollout_ref.actor.clip_ratio_c"]


def test_rl_prints_the_run_that_words_of_a_script_make(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        rl([*SCRIPT.split(), "--print-config"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    table = tomllib.loads(printed)
    assert (table["max_steps"], table["orchestrator"]["batch_size"]) == (32, 32)
    assert "# actor_rollout_ref.rollout.name" in printed


def test_only_yaml_files_or_overrides_are_read_as_such():
    assert is_yaml_run(["@", "a.yaml"])
    assert is_yaml_run(["@a.yml"])
    assert is_yaml_run(["a.b=1"])
    assert not is_yaml_run(["@", "a.yaml", "--help"])
    assert not is_yaml_run(["@", "a.toml", "--orchestrator.env.0.args", '{"a": 1}', "--max-steps=3"])


def test_targets_of_all_plain_rows_are_keys_of_ours():
    """Those of rules are looked at when a run is validated."""
    targets = [row.ours for row in verl.VERL if isinstance(row.ours, str)]
    assert [key for key in targets if find(RunConfig, tuple(key.split("."))) is None and ".args." not in key] == []


# The environment of its rows.


def environment(reward: str = "", **more: Any) -> dict[str, Any]:
    if reward:
        Path("reward.py").write_text(reward)
        more |= {"reward_path": "reward.py"}
    return load_environment(["train.parquet"], [], **more)


def score(made: dict[str, Any], completion: str) -> Any:
    return asyncio.run(made["reward"](completion, made["dataset"][0]))


def test_reward_function_is_called_with_the_row_by_keywords():
    made = environment(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    right = solution_str == ground_truth and data_source == 'made/reverse' and extra_info['index'] == 7\n"
        "    return {'score': right + bonus, 'length': len(solution_str)}\n",
        reward_kwargs={"bonus": 0.5},
    )
    assert score(made, "cba") == {"reward": 1.5, "length": 3}
    assert score(made, "abcd") == {"reward": 0.5, "length": 4}


def test_worker_takes_the_environment_that_the_run_names():
    (environment,) = read().orchestrator.env
    adapter = load_adapter("file", str(Path(environment.id).resolve()), args=environment.args)
    assert isinstance(adapter, PlainAdapter)
    assert (len(adapter.train), len(adapter.eval), adapter.group_rewards) == (70, 70, False)


def test_async_reward_function_is_awaited():
    made = environment("async def mine(solution_str, **row):\n    return len(solution_str)\n", reward_name="mine")
    assert score(made, "four") == {"reward": 4.0}


def test_rows_of_json_lines_are_read_as_parquet_is(folder: Path):
    (folder / "rows.jsonl").write_text('{"question": [{"role": "user", "content": "?"}]}\n\n')
    made = load_environment(["rows.jsonl"], [], prompt_key="question")
    assert made["dataset"][0]["prompt"] == [{"role": "user", "content": "?"}]


def test_missing_column_or_function_is_named(folder: Path):
    with pytest.raises(ValueError, match="question"):
        environment(prompt_key="question")
    with pytest.raises(ValueError, match="compute_score"):
        environment("x = 1\n")
    with pytest.raises(ValueError, match=r"missing\.py"):
        load_environment(["train.parquet"], [], reward_path="missing.py")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("so #### 1,234", 1.0),
        ("#### 7 no, #### 1234", 1.0),
        ("1234", 0.0),
        ("#### 7", 0.0),
        (f"#### 1234{' ' * 300}", 0.0),
    ],
)
def test_built_in_reward_of_gsm8k_takes_the_last_marked_number(answer: str, reward: float):
    assert compute_score("openai/gsm8k", answer, "1234", {}) == reward


def test_source_without_a_reward_is_refused_by_name():
    with pytest.raises(ValueError, match="made/reverse"):
        score(environment(), "cba")
