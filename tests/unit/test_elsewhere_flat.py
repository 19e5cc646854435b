"""Flat files of `prime-rl` and files of hosted training as runs of ours, and how formats are told apart."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.elsewhere import flat, hosted
from trireme.config.elsewhere.flat import engine_share
from trireme.config.elsewhere.kinds import kind_of
from trireme.config.elsewhere.translation import Translation, as_toml
from trireme.config.load import load_run_config, read_as
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig

CPU, EIGHT = Devices((), 4), Devices(tuple("01234567"), 64)
REPOSITORY = Path(__file__).resolve().parents[2]

FLAT: dict[str, Any] = {
    "model_name": "owner/model",
    "num_gpus": 8,
    "tensor_parallel_size": 4,
    "max_steps": 1000,
    "batch_size": 512,
    "rollouts_per_example": 16,
    "learning_rate": 1e-5,
    "env": {"id": "wiki-search", "args": {"max_turns": 10}},
    "sampling": {"max_tokens": 1024, "temperature": 1.0, "top_p": 0.9},
    "wandb": {"project": "wiki-search", "name": "first"},
}
HOSTED: dict[str, Any] = {
    "model": "owner/model",
    "max_steps": 500,
    "batch_size": 256,
    "rollouts_per_example": 8,
    "sampling": {"max_tokens": 512},
    "env": [{"id": "gsm8k"}, {"id": "owner/reverse-text", "weight": 0.5, "args": {"num_train": 9}}],
    "env_file": ["secrets.env"],
    "checkpointing": {"save_every_n_steps": 50, "keep_n_checkpoints": 10},
}


def run_of(translation: Translation, devices: Devices) -> RunConfig:
    return resolve(read_as(RunConfig, tomllib.loads(as_toml(translation)), where="translated"), devices)


def flat_run(devices: Devices = EIGHT, **keys: Any) -> RunConfig:
    return run_of(flat.translate(FLAT | keys, devices), devices)


def test_a_flat_file_arrives_whole() -> None:
    config = flat_run()
    orchestrator = config.orchestrator
    assert config.trainer.model.name == config.inference.model.name == "owner/model"
    assert (config.max_steps, orchestrator.batch_size, orchestrator.rollouts_per_example) == (1000, 512, 16)
    assert (orchestrator.env[0].id, orchestrator.env[0].args) == ("wiki-search", {"max_turns": 10})
    assert (orchestrator.sampling.max_tokens, orchestrator.sampling.top_p) == (1024, 0.9)
    assert config.trainer.optim.lr == 1e-5
    assert config.wandb is not None
    assert (config.wandb.project, config.wandb.name) == ("wiki-search", "first")
    assert problems(config, EIGHT) == []


def test_half_of_the_gpus_serve_in_whole_engines() -> None:
    """8 GPUs with engines of 4: one engine. 8 with engines of 1: four. 3 with engines of 2: one."""
    assert [engine_share(8, 4), engine_share(8, 1), engine_share(3, 2), engine_share(2, 1)] == [4, 4, 2, 1]
    config = flat_run()
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (config.inference.parallel.tp, config.inference.parallel.dp) == (4, 1)


def test_one_gpu_is_shared_and_none_is_the_cpu() -> None:
    one = flat_run(Devices(("0",), 8), num_gpus=1, tensor_parallel_size=1)
    assert (one.inference_gpu_ids, one.trainer_gpu_ids) == ((0,), (0,))
    none = flat.translate(FLAT, CPU)
    assert run_of(none, CPU).device == "cpu"
    assert any("shows no GPU" in note for note in none.notes)


def test_adapters_and_difficulty_arrive() -> None:
    config = flat_run(
        use_lora=True, lora_rank=64, lora_alpha=128, use_difficulty_filtering=True, difficulty_threshold=0.3
    )
    lora, buffer = config.trainer.model.lora, config.orchestrator.buffer
    assert lora is not None
    assert (lora.rank, lora.alpha) == (64, 128)
    assert (buffer.use_difficulty_filtering, buffer.difficulty_threshold) == (True, 0.3)


def test_the_learning_rate_begins_where_the_guide_does() -> None:
    without = {key: value for key, value in FLAT.items() if key != "learning_rate"}
    whole, adapters = (run_of(flat.translate(without | {"use_lora": lora}, CPU), CPU) for lora in (False, True))
    assert (whole.trainer.optim.lr, adapters.trainer.optim.lr) == (1e-6, 1e-5)


def test_a_sample_has_room_for_some_turns() -> None:
    assert flat_run().seq_len == 4 * 1024
    assert flat_run(sampling={"max_tokens": 100}).seq_len == 2048
    assert flat_run(seq_len=16384).seq_len == 16384


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pipeline_parallel_size": 2}, "tensor_parallel_size"),
        ({"lora_rank": 8}, "use_lora"),
        ({"difficulty_threshold": 0.3}, "use_difficulty_filtering"),
        ({"learning_rat": 1e-5}, "learning_rate"),
        ({"sampling": {"temprature": 1.0}}, "sampling.temperature"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flat.translate(FLAT | keys, EIGHT)
    assert words in str(caught.value)


def test_a_hosted_file_arrives_whole() -> None:
    translation = hosted.translate(HOSTED, EIGHT)
    config = run_of(translation, EIGHT)
    assert translation.env_files == (Path("secrets.env"),)
    assert [(env.id, env.weight) for env in config.orchestrator.env] == [("gsm8k", 1.0), ("owner/reverse-text", 0.5)]
    assert config.orchestrator.env[1].args == {"num_train": 9}
    assert (config.trainer.ckpt.interval, config.trainer.ckpt.keep_last) == (50, 10)
    assert (config.orchestrator.sampling.max_tokens, config.max_steps) == (512, 500)
    assert config.name == "gsm8k"


@pytest.mark.parametrize("key", ["output_dir", "seed", "max_async_level", "name", "seq_len"])
def test_keys_that_those_formats_have_no_word_for_may_be_given_too(key: str) -> None:
    value: Any = {"output_dir": "there", "name": "mine"}.get(key, 4096)
    config = run_of(hosted.translate(HOSTED | {key: value}, EIGHT), EIGHT)
    assert str(getattr(config, key)) == str(value)


def test_keys_of_the_run_may_stand_where_the_guide_shows_them() -> None:
    """Below `[sampling]` and `[wandb]`, where TOML takes them for keys of those."""
    table = FLAT | {"sampling": {"max_tokens": 64, "num_gpus": 4, "tensor_parallel_size": 2}}
    del table["num_gpus"], table["tensor_parallel_size"]
    config = run_of(flat.translate(table, EIGHT), EIGHT)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0, 1), (2, 3))
    assert config.orchestrator.sampling.max_tokens == 64

    below = HOSTED | {"wandb": {"project": "p", "env_file": ["other.env"]}}
    del below["env_file"]
    translation = hosted.translate(below, EIGHT)
    assert translation.env_files == (Path("other.env"),)
    assert any("wandb.env_file" in note for note in translation.notes)


def test_formats_are_told_apart() -> None:
    vf = {"model": "m", "env": {"id": "e"}, "inference": {"gpus": 1}, "trainer": {"gpus": 1}}
    assert kind_of(vf) == "vf-rl"
    assert kind_of({"model": "m", "env": {"id": "e"}, "trainer": {"args": {}}}) == "vf-rl"
    assert (kind_of(FLAT), kind_of(HOSTED)) == ("flat", "hosted")
    assert kind_of({"env_id": "e", "model": "m", "sampling": {}}) == "gepa"
    assert kind_of({"model": {"name": "m"}, "wandb": {"project": "p"}, "max_steps": 3}) == "run"
    assert kind_of({"inference": {"gpu_memory_utilization": 0.5}, "trainer": {"optim": {"lr": 1.0}}}) == "run"


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*/rl.toml")), ids=lambda file: file.parent.name)
def test_our_own_files_are_never_taken_for_others(file: Path) -> None:
    assert kind_of(tomllib.loads(file.read_text())) == "run"


@pytest.mark.parametrize(
    ("table", "command"),
    [
        (FLAT, "prime-rl {}"),
        (HOSTED, "trireme submit {}"),
        ({"trainer": {"args": {}}}, "vf-rl @ {}"),
        ({"env_id": "e"}, "trireme gepa {}"),
    ],
)
def test_rl_answers_a_foreign_file_with_the_command_to_type(
    table: dict[str, Any], command: str, tmp_path: Path
) -> None:
    file = tmp_path / "theirs.toml"
    file.write_text(as_toml(Translation(table)))
    with pytest.raises(ConfigError) as caught:
        load_run_config(["@", str(file)], program="rl")
    assert f"`{command.format(file)}`" in str(caught.value)
