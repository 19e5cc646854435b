"""A file of `vf-rl` as a run of ours: every key arrives, or something is said of it."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from resolved_runs import value_at
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.elsewhere.translation import as_toml
from trireme.config.elsewhere.vf_rl import translate
from trireme.config.elsewhere.vf_rl_file import VfArgs
from trireme.config.load import read_as
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig

CPU, ONE, EIGHT = Devices((), 4), Devices(("0",), 8), Devices(tuple("01234567"), 64)


def vf(args: dict[str, Any], gpus: tuple[int, int] = (1, 1), engine: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "model": "owner/model",
        "env": {"id": "owner/reverse-text"},
        "inference": {"gpus": gpus[0], "args": engine or {}},
        "trainer": {"gpus": gpus[1], "args": args},
    }


def run_of(table: dict[str, Any], devices: Devices = CPU) -> RunConfig:
    """Through the file that it would be printed as."""
    printed = tomllib.loads(as_toml(translate(table, devices)))
    return resolve(read_as(RunConfig, printed, where="translated"), devices)


def check(table: dict[str, Any], devices: Devices, expected: dict[str, Any]) -> None:
    config = run_of(table, devices)
    assert {key: value_at(config, key) for key in expected} == expected


def notes_on(key: str, devices: Devices = CPU, **args: Any) -> list[str]:
    return [note for note in translate(vf(args), devices).notes if key in note]


PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
SAMPLING = {"max_tokens": 99, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.05} | PENALTIES


def test_what_the_reference_gives_as_defaults_holds():
    lora = {"rank": 16, "alpha": 16, "dropout": 0.0, "use_rslora": False, "modules_to_save": []}
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": None, "min_p": 0.0, "max_tokens": None}
    sampling |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    expected = {f"trainer.model.lora.{key}": value for key, value in lora.items()}
    expected |= {f"orchestrator.sampling.{key}": value for key, value in sampling.items()}
    expected |= {"orchestrator.batch_size": 512, "orchestrator.rollouts_per_example": 16, "seq_len": 2048}
    expected |= {"max_steps": 500, "trainer.optim.lr": 1e-5, "max_async_level": 1, "trainer.ckpt.interval": 50}
    expected |= {"inference.server.port": 8000, "inference.start_timeout_s": 300.0, "wandb": None}
    expected |= {"orchestrator.engine_timeout_s": 600.0, "orchestrator.eval": None}
    check(vf({}), CPU, expected)
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(value_at(run_of(vf({})), "trainer.model.lora.target_modules")) == modules


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"weight_decay": 0.01}, {"trainer.optim.weight_decay": 0.01}),
        ({"adam_beta2": 0.95}, {"trainer.optim.betas": [0.9, 0.95]}),
        ({"lr_scheduler_type": "cosine"}, {"trainer.scheduler.type": "cosine"}),
        ({"mask_truncated_completions": True}, {"orchestrator.filters.truncated": "mask"}),
        ({"num_batches_ahead": 0, "seed": 7}, {"max_async_level": 0, "seed": 7}),
        ({"max_concurrent": 64}, {"orchestrator.max_concurrent": 64, "orchestrator.env.0.max_concurrent": 64}),
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 100},
            {"trainer.loss.beta": 0.1, "trainer.loss.reference_update_every": 100},
        ),
        ({"use_lora": False, "learning_rate": 1e-6}, {"trainer.model.lora": None}),
        ({}, {"trainer.model.optimization_dtype": "float32"}),
        # attention costs by the square of a row on a CPU: 512 tokens, or the longest sample where that is longer
        ({"max_seq_len": 16, "micro_batch_size": 16}, {"trainer.micro_batch_tokens": 256}),
        ({"max_seq_len": 128, "micro_batch_size": 16}, {"trainer.micro_batch_tokens": 512}),
        ({"vllm_server_port": 8002}, {"inference.server.port": 8002}),
        (
            {"vllm_server_timeout": 1200.0},  # of the orchestrator too
            {"inference.start_timeout_s": 1200.0, "orchestrator.engine_timeout_s": 1200.0},
        ),
        ({"report_to": "wandb", "wandb": {"project": "p", "name": "first"}}, {"wandb.project": "p"}),
        ({"wandb": {"project": "p"}}, {"wandb.project": "p"}),
        (
            {"num_completions_to_print": 5, "logging_steps": 2},
            {"console.style": "vf-rl", "console.samples_every": 5, "console.num_samples": 5, "console.every": 2},
        ),
        ({"eval_strategy": "no", "eval_steps": 10}, {"orchestrator.eval": None}),
        (
            {"eval_strategy": "steps", "eval_steps": 20} | SAMPLING,
            {"orchestrator.eval.interval": 20}
            | {
                f"orchestrator.{table}.{key}": SAMPLING[key]
                for table in ("sampling", "eval.sampling")
                for key in SAMPLING
            },
        ),
        ({"resume_from_checkpoint": "outputs/x/checkpoint-50"}, {"trainer.ckpt.resume_step": 50}),
        ({"resume_from_checkpoint": "true"}, {"resume": True}),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_key_of_the_trainers_arguments_arrives(args, expected):
    """`docs/coming-from.md` has the other keys, and a test of its own."""
    check(vf(args), CPU, expected)


def test_evaluation_by_its_strategy_alone_has_an_interval_of_its_own():
    assert run_of(vf({"eval_strategy": "steps"})).orchestrator.eval is not None


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
        (vf({"max_seq_len": 128, "micro_batch_size": 16}), EIGHT, {"trainer.micro_batch_tokens": 16 * 128}),
        (
            vf({}, (3, 2)),
            EIGHT,
            {"inference_gpu_ids": [0, 1, 2], "trainer_gpu_ids": [3, 4], "trainer.num_ranks": 2}
            | {"trainer.model.optimization_dtype": "bfloat16"},
        ),
        (vf({}), ONE, {"inference_gpu_ids": [0], "trainer_gpu_ids": [0], "weight_broadcast.type": "ipc"}),
        (vf({}, (3, 5)), CPU, {"device": "cpu"}),
        # flags of vLLM that have keys of their own, and one that is passed through
        (
            vf({}, (2, 1), VLLM),
            EIGHT,
            {"inference.model.enforce_eager": True, "inference.parallel.tp": 2, "inference.parallel.dp": 1}
            | {"inference.model.max_model_len": 1024, "inference.args": {"max_num_batched_tokens": 4096}},
        ),
        (vf({}, engine={"port": 8001}), CPU, {"inference.server.port": 8001}),
    ],
)
def test_batches_gpus_and_flags_of_the_engine_arrive(table, devices, expected):
    check(table, devices, expected)
    assert problems(run_of(table, devices), devices) == []


def test_notes_say_what_counts_where_the_file_leaves_it_open():
    assert any("tutorial says 1.0" in note for note in notes_on("trainer.args.temperature"))
    assert any("tutorial says 512" in note for note in notes_on("trainer.args.max_tokens"))
    assert not any("tutorial" in note for note in notes_on("trainer.args.temperature", temperature=0.8))
    assert any("without effect" in note for note in notes_on("trainer.args.lora_rank", use_lora=False, lora_rank=8))
    assert notes_on("share", ONE)
    assert notes_on("shows no GPU")


# Every key of `[trainer.args]` with a value that is not its default.
OTHER: dict[str, Any] = {
    **{"run_name": "x", "output_dir": "a/b", "seed": 1, "resume_from_checkpoint": "checkpoint-50"},
    **{"use_lora": False, "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.1, "lora_target_modules": ["q_proj"]},
    **{"lora_modules_to_save": ["lm_head"], "lora_use_rslora": True},
    **{"learning_rate": 1e-4, "lr_scheduler_type": "linear", "warmup_steps": 5, "max_grad_norm": 0.1},
    **{"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "bf16": False},
    **{"gradient_checkpointing": True, "max_steps": 5, "num_iterations": 2, "beta": 0.1, "sync_ref_model": True},
    **{"ref_model_sync_steps": 9, "mask_truncated_completions": True, "mask_env_responses": False},
    **{"micro_batch_size": 4, "batch_size": 64, "rollouts_per_example": 8, "num_generations": 8},
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_seq_len": 512, "max_prompt_len": 99},
    **{"max_tokens": 64, "temperature": 1.2, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "num_batches_ahead": 2, "generation_timeout": 9.0},
    **{"max_concurrent": 8, "generation_batch_size": 16, "vllm_server_host": "localhost", "vllm_server_port": 8001},
    **{"vllm_server_timeout": 600.0, "eval_strategy": "steps", "eval_steps": 10, "save_strategy": "no"},
    **{"save_steps": 10, "save_total_limit": 2, "logging_steps": 5, "log_completions": False},
    **{"num_completions_to_print": 5, "report_to": "wandb", "wandb": {"project": "p"}},
    "ds3_gather_for_generation": False,
}


@pytest.mark.parametrize("key", sorted(VfArgs.model_fields))
def test_no_key_that_was_given_goes_without_a_word(key):
    """It is in a note, or refused by its name."""
    try:
        told = translate(vf({key: OTHER[key]}), CPU).notes
    except ConfigError as error:
        told = tuple(str(error).split("`"))
    assert any(line.startswith(f"trainer.args.{key}") for line in told)


def test_the_run_lies_where_its_name_says():
    given = ({"run_name": "alphabet"}, {}, {"output_dir": "elsewhere/mine", "run_name": "alphabet"})
    roots = [str(run_of(vf(args)).paths.root) for args in given]
    assert roots == ["outputs/alphabet", "outputs/reverse-text", "elsewhere/mine"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (vf({"learning_rat": 1e-5}), "learning_rate"),
        (vf({"lora_rnk": 8}), "lora_rank"),
        (vf({"max_steps": "many"}), "integer"),
        (vf({"eval_strategy": "epoch"}), '"steps"'),
        (vf({"save_strategy": "epoch"}), '"steps"'),
        (vf({"mask_env_responses": False}), "never trained on"),
        (vf({"sync_ref_model": True}), "beta"),
        (vf({"resume_from_checkpoint": "the last"}), "checkpoint-N"),
        # two names of one number must agree
        (vf({"rollouts_per_example": 16, "num_generations": 8}), "`rollouts_per_example`, which is 16"),
        (
            vf({"batch_size": 100, "micro_batch_size": 8, "gradient_accumulation_steps": 8}),
            "gradient_accumulation_steps",
        ),
        (vf({"vllm_server_port": 8002}, engine={"port": 8001}), "8001"),
        *(({"model": "m"}, words) for words in ("mine.toml: ", "`env`", "`inference`", "`trainer`")),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(table, words):
    with pytest.raises(ConfigError) as caught:
        translate(table, CPU, where="mine.toml")
    assert words in str(caught.value)
