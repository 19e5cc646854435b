"""Flat files of `prime-rl` and files of hosted training as runs of ours, and how formats are told apart."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from resolved_runs import value_at
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


def config_of(translation: Translation, devices: Devices = EIGHT) -> RunConfig:
    return resolve(read_as(RunConfig, tomllib.loads(as_toml(translation)), where="translated"), devices)


def check(translation: Translation, devices: Devices, expected: dict[str, Any]) -> None:
    config = config_of(translation, devices)
    assert {key: value_at(config, key) for key in expected} == expected
    assert problems(config, devices) == []


@pytest.mark.parametrize(
    ("keys", "devices", "expected"),
    [
        (
            {},
            EIGHT,
            {"trainer.model.name": "owner/model", "inference.model.name": "owner/model", "max_steps": 1000}
            | {"orchestrator.batch_size": 512, "orchestrator.rollouts_per_example": 16, "trainer.optim.lr": 1e-5}
            | {"orchestrator.env.0.id": "wiki-search", "orchestrator.env.0.args": {"max_turns": 10}}
            | {"orchestrator.sampling.max_tokens": 1024, "orchestrator.sampling.top_p": 0.9, "seq_len": 4 * 1024}
            | {"wandb.project": "wiki-search", "wandb.name": "first"}
            | {"inference_gpu_ids": [0, 1, 2, 3], "trainer_gpu_ids": [4, 5, 6, 7]}
            | {"inference.parallel.tp": 4, "inference.parallel.dp": 1},
        ),
        (
            {"num_gpus": 1, "tensor_parallel_size": 1},
            Devices(("0",), 8),
            {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]},
        ),
        ({}, CPU, {"device": "cpu"}),
        # the learning rate begins where the guide does
        ({"learning_rate": None, "use_lora": False}, CPU, {"trainer.optim.lr": 1e-6}),
        ({"learning_rate": None, "use_lora": True}, CPU, {"trainer.optim.lr": 1e-5}),
        # a sample has room for some turns
        ({"sampling": {"max_tokens": 100}}, EIGHT, {"seq_len": 2048}),
        ({"seq_len": 16384}, EIGHT, {"seq_len": 16384}),
        # keys of the run may stand where the guide shows them: below `[sampling]`
        (
            {"num_gpus": None, "tensor_parallel_size": None}
            | {"sampling": {"max_tokens": 64, "num_gpus": 4, "tensor_parallel_size": 2}},
            EIGHT,
            {"inference_gpu_ids": [0, 1], "trainer_gpu_ids": [2, 3], "orchestrator.sampling.max_tokens": 64},
        ),
    ],
)
def test_a_flat_file_arrives_whole(keys, devices, expected):
    table = {key: value for key, value in (FLAT | keys).items() if value is not None}
    check(flat.translate(table, devices), devices, expected)


def test_half_of_the_gpus_serve_in_whole_engines():
    """8 GPUs with engines of 4: one engine. 8 with engines of 1: four. 3 with engines of 2: one."""
    assert [engine_share(8, 4), engine_share(8, 1), engine_share(3, 2), engine_share(2, 1)] == [4, 4, 2, 1]


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
def test_what_cannot_be_is_refused_with_what_to_write(keys, words):
    with pytest.raises(ConfigError, match=words):
        flat.translate(FLAT | keys, EIGHT)


def test_a_hosted_file_arrives_whole():
    """With keys that the format has no word for, too."""
    keys = {"output_dir": "there", "seed": 4096, "max_async_level": 3, "seq_len": 4095}
    expected = {"orchestrator.env.0.id": "gsm8k", "orchestrator.env.0.weight": 1.0, "max_steps": 500, "name": "gsm8k"}
    expected |= {"orchestrator.env.1.id": "owner/reverse-text", "orchestrator.env.1.weight": 0.5}
    expected |= {"orchestrator.env.1.args": {"num_train": 9}, "orchestrator.sampling.max_tokens": 512}
    check(
        hosted.translate(HOSTED | keys, EIGHT),
        EIGHT,
        keys | expected | {"trainer.ckpt.interval": 50, "trainer.ckpt.keep_last": 10},
    )
    assert config_of(hosted.translate(HOSTED | {"name": "mine"}, EIGHT)).name == "mine"


def test_notes_say_that_there_is_no_gpu_and_where_a_key_stood():
    assert any("shows no GPU" in note for note in flat.translate(FLAT, CPU).notes)
    assert hosted.translate(HOSTED, EIGHT).env_files == (Path("secrets.env"),)
    below = HOSTED | {"wandb": {"project": "p", "env_file": ["other.env"]}}
    del below["env_file"]
    translation = hosted.translate(below, EIGHT)
    assert translation.env_files == (Path("other.env"),)
    assert any("wandb.env_file" in note for note in translation.notes)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"model": "m", "env": {"id": "e"}, "inference": {"gpus": 1}, "trainer": {"gpus": 1}}, "vf-rl"),
        ({"model": "m", "env": {"id": "e"}, "trainer": {"args": {}}}, "vf-rl"),
        (FLAT, "flat"),
        (HOSTED, "hosted"),
        ({"env_id": "e", "model": "m", "sampling": {}}, "gepa"),
        ({"model": {"name": "m"}, "wandb": {"project": "p"}, "max_steps": 3}, "run"),
        ({"inference": {"gpu_memory_utilization": 0.5}, "trainer": {"optim": {"lr": 1.0}}}, "run"),
        *((tomllib.loads(file.read_text()), "run") for file in REPOSITORY.glob("configs/*/rl.toml")),
    ],
)
def test_formats_are_told_apart(table, kind):
    assert kind_of(table) == kind


@pytest.mark.parametrize(
    ("table", "command"),
    [
        (FLAT, "prime-rl {}"),
        (HOSTED, "trireme submit {}"),
        ({"trainer": {"args": {}}}, "vf-rl @ {}"),
        ({"env_id": "e"}, "trireme gepa {}"),
    ],
)
def test_rl_answers_a_foreign_file_with_the_command_to_type(table, command, tmp_path):
    file = tmp_path / "theirs.toml"
    file.write_text(as_toml(Translation(table)))
    with pytest.raises(ConfigError) as caught:
        load_run_config(["@", str(file)], program="rl")
    assert f"`{command.format(file)}`" in str(caught.value)
