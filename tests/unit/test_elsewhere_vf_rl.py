"""A file of `vf-rl` as a run of ours: every key arrives, or something is said of it."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.elsewhere.translation import Translation, as_toml
from trireme.config.elsewhere.vf_rl import translate
from trireme.config.elsewhere.vf_rl_file import VfArgs
from trireme.config.load import read_as
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig

CPU, ONE, EIGHT = Devices((), 4), Devices(("0",), 8), Devices(tuple("01234567"), 64)


def vf(engine: dict[str, Any] | None = None, *, gpus: tuple[int, int] = (1, 1), **args: Any) -> dict[str, Any]:
    return {
        "model": "owner/model",
        "env": {"id": "owner/reverse-text"},
        "inference": {"gpus": gpus[0], "args": engine or {}},
        "trainer": {"gpus": gpus[1], "args": args},
    }


def run_of(translation: Translation, devices: Devices = CPU) -> RunConfig:
    """Through the file that it would be printed as."""
    table = tomllib.loads(as_toml(translation))
    return resolve(read_as(RunConfig, table, where="translated"), devices)


def run(devices: Devices = CPU, **args: Any) -> RunConfig:
    return run_of(translate(vf(**args), devices), devices)


def notes_on(key: str, **args: Any) -> list[str]:
    return [note for note in translate(vf(**args), CPU).notes if note.startswith(f"trainer.args.{key}")]


def refusal(**args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        translate(vf(**args), CPU)
    return str(caught.value)


def test_what_the_reference_gives_as_defaults_holds() -> None:
    config = run()
    lora, sampling, optim = config.trainer.model.lora, config.orchestrator.sampling, config.trainer.optim
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.use_rslora, lora.modules_to_save) == (16, 16, 0.0, False, ())
    assert set(lora.target_modules) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (512, 16)
    assert (config.seq_len, config.max_steps, optim.lr) == (2048, 500, 1e-5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 1.0, None, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert sampling.max_tokens is None
    assert (config.inference.server.port, config.inference.start_timeout_s) == (8000, 300.0)
    assert (config.max_async_level, config.trainer.ckpt.interval) == (1, 50)


def test_where_the_documents_contradict_each_other_it_is_said_which_one_counts() -> None:
    assert any("tutorial says 1.0" in note for note in notes_on("temperature"))
    assert any("tutorial says 512" in note for note in notes_on("max_tokens"))
    assert not any("tutorial" in note for note in notes_on("temperature", temperature=0.8))


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
def test_no_key_that_was_given_goes_without_a_word(key: str) -> None:
    """It is in a note, or refused by its name."""
    try:
        told = translate(vf(**{key: OTHER[key]}), CPU).notes
    except ConfigError as error:
        told = tuple(str(error).split("`"))
    assert any(line.startswith(f"trainer.args.{key}") for line in told)


def test_each_sampling_key_arrives_in_training_and_in_evaluation() -> None:
    given = {"max_tokens": 99, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.05}
    given |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    config = run(eval_strategy="steps", eval_steps=20, **given)
    evaluation = config.orchestrator.eval
    assert evaluation is not None
    assert evaluation.interval == 20
    for key, value in given.items():
        assert getattr(config.orchestrator.sampling, key) == value
        assert getattr(evaluation.sampling, key) == value


def test_the_recipe_arrives() -> None:
    config = run(
        learning_rate=2e-5,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=0.005,
        beta=0.1,
        num_iterations=2,
        weight_decay=0.01,
        adam_beta2=0.95,
        gradient_checkpointing=True,
        mask_truncated_completions=True,
        sync_ref_model=True,
        ref_model_sync_steps=100,
        num_batches_ahead=0,
        generation_timeout=120.0,
        max_concurrent=64,
        seed=7,
    )
    trainer, orchestrator = config.trainer, config.orchestrator
    assert (trainer.optim.lr, trainer.optim.max_norm, trainer.optim.weight_decay) == (2e-5, 0.005, 0.01)
    assert trainer.optim.betas == (0.9, 0.95)
    assert (trainer.scheduler.type, trainer.scheduler.warmup_steps) == ("cosine", 10)
    assert (trainer.loss.beta, trainer.loss.reference_update_every, trainer.num_iterations) == (0.1, 100, 2)
    assert trainer.model.ac is not None
    assert trainer.model.ac.freq == 1
    assert (orchestrator.filters.truncated, config.max_async_level, config.seed) == ("mask", 0, 7)
    assert (orchestrator.max_concurrent, orchestrator.env[0].max_concurrent) == (64, 64)
    assert orchestrator.env[0].rollout_timeout_s == 120.0


def test_without_lora_the_whole_model_is_trained() -> None:
    assert run(use_lora=False, learning_rate=1e-6).trainer.model.lora is None
    assert any("without effect" in note for note in notes_on("lora_rank", use_lora=False, lora_rank=8))


def test_older_names_of_the_batch_mean_the_same() -> None:
    """4 rollouts at once on each of 2 GPUs, 8 times: a batch of 64."""
    old = vf(num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=8, gpus=(1, 2))
    config = run_of(translate(old, EIGHT), EIGHT)
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (64, 8)
    assert config.trainer.micro_batch_tokens == 4 * 2048


def test_rows_on_a_cpu_stay_short() -> None:
    """Attention costs by their square there: 512 tokens, or the longest sample where that is longer."""
    lengths = [run(max_seq_len=length, micro_batch_size=16).trainer.micro_batch_tokens for length in (16, 128, 2048)]
    assert lengths == [16 * 16, 512, 2048]
    assert run(EIGHT, max_seq_len=128, micro_batch_size=16).trainer.micro_batch_tokens == 16 * 128


def test_two_names_of_one_number_must_agree() -> None:
    assert "`rollouts_per_example`, which is 16" in refusal(rollouts_per_example=16, num_generations=8)
    assert "gradient_accumulation_steps" in refusal(batch_size=100, micro_batch_size=8, gradient_accumulation_steps=8)


def test_gpus_are_given_out_contiguously_engines_first() -> None:
    config = run_of(translate(vf(gpus=(3, 2)), EIGHT), EIGHT)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0, 1, 2), (3, 4))
    assert config.trainer.num_ranks == 2
    assert problems(config, EIGHT) == []


def test_a_single_gpu_is_shared() -> None:
    config = run(ONE)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0,), (0,))
    assert config.weight_broadcast.type == "ipc"
    assert any("share" in note for note in translate(vf(), ONE).notes)


def test_without_gpus_it_runs_on_the_cpu_and_says_so() -> None:
    translation = translate(vf(gpus=(3, 5)), CPU)
    assert run_of(translation).device == "cpu"
    assert any("shows no GPU" in note for note in translation.notes)


def test_bfloat16_is_for_gpus_unless_it_is_asked_for() -> None:
    assert run(EIGHT).trainer.model.optimization_dtype == "bfloat16"
    assert run(CPU).trainer.model.optimization_dtype == "float32"
    assert run(CPU, bf16=True).trainer.model.optimization_dtype == "bfloat16"


def test_flags_of_vllm_find_their_keys_and_others_are_handed_on() -> None:
    engine = {"enforce-eager": True, "tensor_parallel_size": 2, "max-model-len": 1024, "max_num_batched_tokens": 4096}
    config = run_of(translate(vf(engine, gpus=(2, 1)), EIGHT), EIGHT)
    assert config.inference.model.enforce_eager
    assert (config.inference.parallel.tp, config.inference.parallel.dp) == (2, 1)
    assert config.inference.model.max_model_len == 1024
    assert config.inference.args == {"max_num_batched_tokens": 4096}


def test_the_server_is_looked_for_where_it_listens() -> None:
    assert run_of(translate(vf({"port": 8001}), CPU)).inference.server.port == 8001
    assert run(vllm_server_port=8002).inference.server.port == 8002
    with pytest.raises(ConfigError, match="8001"):
        translate(vf({"port": 8001}, vllm_server_port=8002), CPU)


def test_a_longer_wait_for_the_server_is_one_of_the_orchestrator_too() -> None:
    config = run(vllm_server_timeout=1200.0)
    assert (config.inference.start_timeout_s, config.orchestrator.engine_timeout_s) == (1200.0, 1200.0)
    assert run().orchestrator.engine_timeout_s == 600.0


def test_the_run_lies_where_its_name_says() -> None:
    assert str(run(run_name="alphabet").paths.root) == "outputs/alphabet"
    assert str(run().paths.root) == "outputs/reverse-text"
    assert str(run(output_dir="elsewhere/mine", run_name="alphabet").paths.root) == "elsewhere/mine"


def test_wandb_is_off_until_it_is_asked_for() -> None:
    assert run().wandb is None
    on = run(report_to="wandb", wandb={"project": "p", "name": "first"}).wandb
    assert on is not None
    assert (on.project, on.name) == ("p", "first")
    assert run(wandb={"project": "p"}).wandb is not None
    assert run(report_to="none", wandb={"project": "p"}).wandb is None


def test_completions_are_shown_until_they_are_switched_off() -> None:
    console = run(num_completions_to_print=5, logging_steps=2).console
    assert (console.style, console.samples_every, console.num_samples, console.every) == ("vf-rl", 5, 5, 2)
    assert run(log_completions=False).console.samples_every is None


def test_evaluation_is_asked_for_by_either_key() -> None:
    assert run().orchestrator.eval is None
    assert run(eval_strategy="no", eval_steps=10).orchestrator.eval is None
    for args in ({"eval_steps": 10}, {"eval_strategy": "steps", "eval_steps": 10}):
        evaluation = run(**args).orchestrator.eval
        assert evaluation is not None
        assert evaluation.interval == 10
    assert run(eval_strategy="steps").orchestrator.eval is not None


def test_a_checkpoint_to_go_on_from_is_named_as_its_folder_is() -> None:
    assert run(resume_from_checkpoint="outputs/x/checkpoint-50").trainer.ckpt.resume_step == 50
    assert run(resume_from_checkpoint="true").resume
    assert "checkpoint-N" in refusal(resume_from_checkpoint="the last")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"learning_rat": 1e-5}, "learning_rate"),
        ({"lora_rnk": 8}, "lora_rank"),
        ({"max_steps": "many"}, "integer"),
        ({"eval_strategy": "epoch"}, '"steps"'),
        ({"save_strategy": "epoch"}, '"steps"'),
        ({"mask_env_responses": False}, "never trained on"),
        ({"sync_ref_model": True}, "beta"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(args: dict[str, Any], words: str) -> None:
    assert words in refusal(**args)


def test_what_is_required_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        translate({"model": "m"}, CPU, where="mine.toml")
    assert "mine.toml: " in str(caught.value)
    for key in ("env", "inference", "trainer"):
        assert f"`{key}`" in str(caught.value)
