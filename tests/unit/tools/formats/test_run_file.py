"""Files of `vf-rl`, `prime-rl` and hosted training as runs of ours: every key arrives, or something is said of it."""

from typing import Any

import pytest

from support.runs.resolved_runs import value_at
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import to_toml
from trireme.config.load import load_run_config, read_as
from trireme.config.resolve import resolve
from trireme.config.rules.check import problems
from trireme.config.run import RunConfig
from trireme.config.translation import Translated
from trireme.tools.formats.flat import FLAT as FLAT_FORMAT
from trireme.tools.formats.flat import HOSTED as HOSTED_FORMAT
from trireme.tools.formats.translation import translate
from trireme.tools.formats.vf_rl import VF_RL

CPU, ONE, EIGHT = Devices((), 4), Devices(("0",), 8), Devices(tuple("01234567"), 64)


def translated(table: dict[str, Any], devices: Devices) -> Translated:
    format = FLAT_FORMAT if "model_name" in table else HOSTED_FORMAT if "batch_size" in table else VF_RL
    return translate(format, table, devices, where="mine.toml")


def check(table: dict[str, Any], devices: Devices, expected: dict[str, Any]) -> None:
    config = resolve(read_as(RunConfig, translated(table, devices).table, where="translated"), devices)
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
SEVERAL = {"weight_decay": 0.01, "mask_truncated_completions": True, "num_batches_ahead": 0, "max_concurrent": 64}
SEVERAL |= {"vllm_server_timeout": 999.0, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 100}
VLLM = {"enforce-eager": True, "tensor_parallel_size": 2, "max-model-len": 1024, "max_num_batched_tokens": 4096}
OLD = {"num_generations": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
KEYS = {"output_dir": "there", "seed": 4096, "max_async_level": 3, "seq_len": 4095}


def test_what_the_reference_gives_as_defaults_holds():
    """Defaults that have no row of their own in `docs/coming-from.md`."""
    expected = {"max_async_level": 1, "trainer.ckpt.interval": 50, "wandb": None, "orchestrator.eval": None}
    expected |= {"inference.server.port": 8000, "inference.start_timeout_s": 300.0, "name": "reverse-text"}
    check(vf({}), CPU, expected | {"orchestrator.engine_timeout_s": 600.0})


@pytest.mark.parametrize(
    ("table", "devices", "expected"),
    [
        (
            vf(SEVERAL),
            CPU,
            {"trainer.optim.weight_decay": 0.01, "orchestrator.filters.truncated": "mask", "max_async_level": 0}
            | {"orchestrator.max_concurrent": 64, "orchestrator.env.0.max_concurrent": 64, "trainer.loss.beta": 0.1}
            | {"inference.start_timeout_s": 999.0, "orchestrator.engine_timeout_s": 999.0}
            | {"trainer.loss.reference_update_every": 100},
        ),
        (vf({"wandb": {"project": "p"}}), CPU, {"wandb.project": "p"}),
        (vf({"output_dir": "a/mine", "run_name": "alphabet"}), CPU, {"output_dir": "a", "name": "mine"}),
        # attention costs by the square of a row on a CPU: 512 tokens, or the longest sample where that is longer
        (vf({"max_seq_len": 16, "micro_batch_size": 16}), CPU, {"trainer.micro_batch_tokens": 256}),
        (vf({"max_seq_len": 128, "micro_batch_size": 16}), CPU, {"trainer.micro_batch_tokens": 512}),
        (vf({"eval_strategy": "no", "eval_steps": 10}), CPU, {"orchestrator.eval": None}),
        (
            vf({"eval_strategy": "steps", "eval_steps": 20} | SAMPLING),
            CPU,
            {f"orchestrator.eval.sampling.{key}": value for key, value in SAMPLING.items()},
        ),
        (vf({"resume_from_checkpoint": "outputs/x/checkpoint-50"}), CPU, {"trainer.ckpt.resume_step": 50}),
        (vf({"resume_from_checkpoint": "true"}), CPU, {"resume": True}),
        (vf({"resume_from_checkpoint": True}), CPU, {"resume": True}),
        (vf({"resume_from_checkpoint": False}), CPU, {"resume": False}),
        # 4 rollouts at once on each of 2 GPUs, 8 times: a batch of 64
        (
            vf(OLD, (1, 2)),
            EIGHT,
            {"orchestrator.batch_size": 64, "orchestrator.rollouts_per_example": 8}
            | {"trainer.micro_batch_tokens": 4 * 2048},
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
        (
            FLAT,
            EIGHT,
            {"inference_gpu_ids": [0, 1, 2, 3], "trainer_gpu_ids": [4, 5, 6, 7], "inference.parallel.dp": 1}
            | {"seq_len": 4 * 1024, "orchestrator.env.0.args": {"max_turns": 10}},
        ),
        (FLAT | {"num_gpus": 1, "tensor_parallel_size": 1}, ONE, {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}),
        # without a rate of its own, and with room for some turns in a sample
        (FLAT | {"learning_rate": "none", "use_lora": False}, CPU, {"trainer.optim.lr": 1e-6}),
        (FLAT | {"sampling": {"max_tokens": 100}}, CPU, {"seq_len": 2048}),
        # keys of the run may stand where the guide shows them: below `[sampling]`
        (
            {key: value for key, value in FLAT.items() if key not in ("num_gpus", "tensor_parallel_size")}
            | {"sampling": {"max_tokens": 64, "num_gpus": 4, "tensor_parallel_size": 2}},
            EIGHT,
            {"inference_gpu_ids": [0, 1], "trainer_gpu_ids": [2, 3], "orchestrator.sampling.max_tokens": 64},
        ),
        (HOSTED | KEYS, EIGHT, KEYS | {"name": "gsm8k", "orchestrator.env.1.args": {"num_train": 9}}),
    ],
)
def test_keys_of_a_file_arrive(table, devices, expected):
    check(table, devices, expected)


def test_each_key_that_is_given_or_sets_something_has_a_line():
    lines = translated(vf({"max_steps": 5, "max_prompt_len": 99, "num_generations": 8}), CPU).lines
    notes = [str(line) for line in lines]
    assert "trainer.args.max_steps = 5 -> max_steps = 5" in notes
    assert "trainer.args.warmup_steps = 0 -> trainer.scheduler.warmup_steps = 0: the default of vf-rl" in notes
    (unused,) = (note for note in notes if "max_prompt_len" in note)
    assert unused.startswith("trainer.args.max_prompt_len = 99 -> no effect: ")
    unmentioned = ("trainer.args.generation_batch_size", "trainer.args.rollouts_per_example")
    assert [note for note in notes if note.startswith(unmentioned)] == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (vf({"lora_rnk": 8}), "lora_rank"),
        (vf({"eval_strategy": "epoch"}), "`trainer.args.eval_strategy = "),
        (vf({"mask_env_responses": False}), "never trained on"),
        (vf({"bf16": "yes"}), 'bf16 = "yes"` - expected true or false'),
        (vf({"sync_ref_model": True}), "ref_model_sync_steps"),
        (vf({"ref_model_sync_steps": 9}), "beta"),
        (vf({"resume_from_checkpoint": "the last"}), "checkpoint-N"),
        # two names of one number must agree
        (vf({"rollouts_per_example": 16, "num_generations": 8}), "Remove one"),
        (vf({"batch_size": 100, "gradient_accumulation_steps": 8}), "gradient_accumulation_steps"),
        (vf({"vllm_server_port": 8002}, engine={"port": 8001}), "8001"),
        (FLAT | {"lora_rank": 8}, "use_lora"),
        (FLAT | {"seq_len": 0}, "seq_len"),
        (FLAT | {"difficulty_threshold": 0.3}, "use_difficulty_filtering"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(table, words):
    with pytest.raises(ConfigError) as caught:
        check(table, EIGHT if "model_name" in table else CPU, {})
    assert words in str(caught.value)


def test_rl_answers_a_foreign_file_with_the_command_to_type(tmp_path):
    file = tmp_path / "theirs.toml"
    commands = {"prime-rl": FLAT, "trireme submit": HOSTED, "vf-rl @": {"trainer": {"args": {}}}}
    for command, table in (commands | {"trireme gepa": {"env_id": "e"}}).items():
        file.write_text(to_toml(table))
        with pytest.raises(ConfigError, match=f"`{command} {file}`"):
            load_run_config(["@", str(file)], program="rl")
