"""Files of `vf-rl`, `prime-rl` and hosted training as runs of ours: every key arrives, or something is said of it."""

import tomllib
from typing import Any

import pytest

from resolved_runs import value_at
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.load import load_run_config, read_as
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig
from trireme.tools.formats.flat import FLAT as FLAT_FORMAT
from trireme.tools.formats.flat import HOSTED as HOSTED_FORMAT
from trireme.tools.formats.translation import Translation, as_toml, translate
from trireme.tools.formats.vf_rl import VF_RL

CPU, ONE, EIGHT = Devices((), 4), Devices(("0",), 8), Devices(tuple("01234567"), 64)


def check(translation: Translation, devices: Devices, expected: dict[str, Any]) -> None:
    config = resolve(read_as(RunConfig, tomllib.loads(as_toml(translation)), where="translated"), devices)
    assert {key: value_at(config, key) for key in expected} == expected
    assert problems(config, devices) == []


def vf(args: dict[str, Any], gpus: tuple[int, int] = (1, 1), engine: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "model": "owner/model", "env": {"id": "owner/reverse-text"},
        "inference": {"gpus": gpus[0], "args": engine or {}}, "trainer": {"gpus": gpus[1], "args": args},
    }  # fmt: skip


FLAT: dict[str, Any] = {
    **{"model_name": "owner/model", "num_gpus": 8, "tensor_parallel_size": 4, "learning_rate": 1e-5},
    **{"max_steps": 1000, "batch_size": 512, "rollouts_per_example": 16, "sampling": {"max_tokens": 1024}},
    "env": {"id": "wiki-search", "args": {"max_turns": 10}},
}
HOSTED: dict[str, Any] = {
    **{"model": "owner/model", "max_steps": 500, "batch_size": 256, "rollouts_per_example": 8},
    **{"sampling": {"max_tokens": 512}, "env_file": ["secrets.env"]},
    "env": [{"id": "gsm8k"}, {"id": "owner/reverse-text", "weight": 0.5, "args": {"num_train": 9}}],
}
SAMPLING = {"max_tokens": 99, "temperature": 0.8, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}


def test_what_the_reference_gives_as_defaults_holds():
    """Defaults that have no row of their own in `docs/coming-from.md`."""
    expected = {"max_async_level": 1, "trainer.ckpt.interval": 50, "wandb": None, "orchestrator.eval": None}
    expected |= {"inference.server.port": 8000, "inference.start_timeout_s": 300.0}
    check(translate(VF_RL, vf({}), CPU), CPU, expected | {"orchestrator.engine_timeout_s": 600.0})


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"weight_decay": 0.01, "mask_truncated_completions": True, "num_batches_ahead": 0, "seed": 7}
            | {"max_concurrent": 64, "vllm_server_timeout": 999.0, "wandb": {"project": "p"}}
            | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 100},
            {"trainer.optim.weight_decay": 0.01, "orchestrator.filters.truncated": "mask", "max_async_level": 0}
            | {"seed": 7, "orchestrator.max_concurrent": 64, "orchestrator.env.0.max_concurrent": 64}
            | {"inference.start_timeout_s": 999.0, "orchestrator.engine_timeout_s": 999.0, "wandb.project": "p"}
            | {"trainer.loss.beta": 0.1, "trainer.loss.reference_update_every": 100, "name": "reverse-text"},
        ),
        ({"output_dir": "elsewhere/mine", "run_name": "alphabet"}, {"output_dir": "elsewhere", "name": "mine"}),
        # attention costs by the square of a row on a CPU: 512 tokens, or the longest sample where that is longer
        ({"max_seq_len": 16, "micro_batch_size": 16}, {"trainer.micro_batch_tokens": 256}),
        ({"max_seq_len": 128, "micro_batch_size": 16}, {"trainer.micro_batch_tokens": 512}),
        ({"eval_strategy": "no", "eval_steps": 10}, {"orchestrator.eval": None}),
        (
            {"eval_strategy": "steps", "eval_steps": 20} | SAMPLING,
            {f"orchestrator.eval.sampling.{key}": value for key, value in SAMPLING.items()},
        ),
        ({"resume_from_checkpoint": "outputs/x/checkpoint-50"}, {"trainer.ckpt.resume_step": 50}),
        ({"resume_from_checkpoint": "true"}, {"resume": True}),
        ({"resume_from_checkpoint": True}, {"resume": True}),
        ({"resume_from_checkpoint": False}, {"resume": False}),
    ],
    ids=lambda value: min(value),
)
def test_keys_of_the_trainers_arguments_arrive(args, expected):
    check(translate(VF_RL, vf(args), CPU), CPU, expected)


VLLM = {"enforce-eager": True, "tensor_parallel_size": 2, "max-model-len": 1024, "max_num_batched_tokens": 4096}
OLD = {"num_generations": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}


@pytest.mark.parametrize(
    ("table", "devices", "expected"),
    [
        # 4 rollouts at once on each of 2 GPUs, 8 times: a batch of 64
        (
            vf(OLD, (1, 2)),
            EIGHT,
            {"orchestrator.batch_size": 64, "orchestrator.rollouts_per_example": 8}
            | {"trainer.micro_batch_tokens": 4 * 2048},
        ),
        (
            vf({}, (3, 2)),
            EIGHT,
            {"inference_gpu_ids": [0, 1, 2], "trainer_gpu_ids": [3, 4], "trainer.num_ranks": 2}
            | {"trainer.model.optimization_dtype": "bfloat16"},
        ),
        (vf({}), ONE, {"inference_gpu_ids": [0], "trainer_gpu_ids": [0], "weight_broadcast.type": "ipc"}),
        (vf({}, (3, 5), {"port": 8001}), CPU, {"device": "cpu", "inference.server.port": 8001}),
        # flags of vLLM that have keys of their own, and one that is passed through
        (
            vf({}, (2, 1), VLLM),
            EIGHT,
            {"inference.model.enforce_eager": True, "inference.parallel.tp": 2, "inference.parallel.dp": 1}
            | {"inference.model.max_model_len": 1024, "inference.args": {"max_num_batched_tokens": 4096}},
        ),
    ],
)
def test_batches_gpus_and_flags_of_the_engine_arrive(table, devices, expected):
    check(translate(VF_RL, table, devices), devices, expected)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (vf({"lora_rnk": 8}), "lora_rank"),
        (vf({"eval_strategy": "epoch"}), "no | steps"),
        (vf({"mask_env_responses": False}), "never trained on"),
        (vf({"sync_ref_model": True}), "ref_model_sync_steps"),
        (vf({"ref_model_sync_steps": 9}), "beta"),
        (vf({"save_strategy": "epoch"}), "no | steps"),
        (vf({"resume_from_checkpoint": "the last"}), "checkpoint-N"),
        # two names of one number must agree
        (vf({"rollouts_per_example": 16, "num_generations": 8}), "Remove one of the two"),
        (vf({"batch_size": 100, "gradient_accumulation_steps": 8}), "gradient_accumulation_steps"),
        (vf({"vllm_server_port": 8002}, engine={"port": 8001}), "8001"),
        ({"model": "m"}, "`inference`"),
        (FLAT | {"lora_rank": 8}, "use_lora"),
        (FLAT | {"difficulty_threshold": 0.3}, "use_difficulty_filtering"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(table, words):
    format, devices = (FLAT_FORMAT, EIGHT) if "model_name" in table else (VF_RL, CPU)
    with pytest.raises(ConfigError) as caught:
        translate(format, table, devices, where="mine.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "devices", "expected"),
    [
        (
            {},
            EIGHT,
            {"inference_gpu_ids": [0, 1, 2, 3], "trainer_gpu_ids": [4, 5, 6, 7], "inference.parallel.dp": 1}
            | {"seq_len": 4 * 1024, "orchestrator.env.0.args": {"max_turns": 10}},
        ),
        ({"num_gpus": 1, "tensor_parallel_size": 1}, ONE, {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}),
        # a sample has room for some turns
        (
            {"learning_rate": None, "use_lora": False, "sampling": {"max_tokens": 100}},
            CPU,
            {"trainer.optim.lr": 1e-6, "seq_len": 2048},
        ),
        # keys of the run may stand where the guide shows them: below `[sampling]`
        (
            {"num_gpus": None, "tensor_parallel_size": None}
            | {"sampling": {"max_tokens": 64, "num_gpus": 4, "tensor_parallel_size": 2}},
            EIGHT,
            {"inference_gpu_ids": [0, 1], "trainer_gpu_ids": [2, 3], "orchestrator.sampling.max_tokens": 64},
        ),
    ],
)
def test_the_keys_of_a_flat_file_arrive(keys, devices, expected):
    table = {key: value for key, value in (FLAT | keys).items() if value is not None}
    check(translate(FLAT_FORMAT, table, devices), devices, expected)


def test_the_keys_of_a_hosted_file_arrive():
    keys = {"output_dir": "there", "seed": 4096, "max_async_level": 3, "seq_len": 4095}
    expected = {"name": "gsm8k", "orchestrator.env.1.args": {"num_train": 9}}
    check(translate(HOSTED_FORMAT, HOSTED | keys, EIGHT), EIGHT, keys | expected)


def test_rl_answers_a_foreign_file_with_the_command_to_type(tmp_path):
    file = tmp_path / "theirs.toml"
    commands = {"prime-rl": FLAT, "trireme submit": HOSTED, "vf-rl @": {"trainer": {"args": {}}}}
    for command, table in (commands | {"trireme gepa": {"env_id": "e"}}).items():
        file.write_text(as_toml(Translation(table)))
        with pytest.raises(ConfigError, match=f"`{command} {file}`"):
            load_run_config(["@", str(file)], program="rl")
