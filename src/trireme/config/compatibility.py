"""Names and file formats that users bring from other systems."""

from __future__ import annotations

from typing import Any, Literal

# Read as if the second name had been written.
ALIASES = {
    "orchestrator.environment": "orchestrator.env",
}

# Read by `sft`: other systems have a table `[data]`.
SFT_ALIASES = {
    "data.path": "data",
    "data.name": "data",
    "data.file": "data",
}

# Read on the command line only.
SHORT_FLAGS = {
    "restart": "supervisor.restart",
}


def _invert(names: dict[str, str]) -> dict[str, str]:
    """Return our key for each of several names, which are written as one text."""
    return {name: key for key, several in names.items() for name in several.split()}


# Refused, with our key as a suggestion. Other systems' names are the last parts of their keys.
KNOWN_ELSEWHERE = _invert(
    {
        "trainer.optim.lr": "learning_rate",
        "trainer.scheduler.type": "lr_scheduler_type",
        "trainer.optim.max_norm": "max_grad_norm",
        "trainer.optim.betas": "adam_beta1 adam_beta2",
        "trainer.optim.eps": "adam_epsilon",
        "trainer.scheduler.warmup_steps": "warmup_ratio",
        "trainer.micro_batch_tokens": "micro_batch_size per_device_train_batch_size",
        "orchestrator.batch_size": "gradient_accumulation_steps generation_batch_size",
        "trainer.model.ac.freq": "gradient_checkpointing",
        "trainer.model.optimization_dtype": "bf16",
        "trainer.model.lora.rank": "use_lora lora_rank",
        "trainer.model.lora.alpha": "lora_alpha",
        "trainer.model.lora.dropout": "lora_dropout",
        "trainer.model.lora.target_modules": "lora_target_modules",
        "trainer.model.lora.modules_to_save": "lora_modules_to_save",
        "trainer.model.lora.use_rslora": "lora_use_rslora",
        "trainer.loss.beta": "beta kl_coef kl_loss_coef",
        "trainer.num_iterations": "num_iterations ppo_epochs",
        "trainer.loss.type": "loss_type",
        "trainer.loss.clip_low": "epsilon epsilon_low clip_ratio clip_ratio_low",
        "trainer.loss.clip_high": "epsilon_high clip_ratio_high",
        "trainer.loss.dual_clip": "clip_ratio_c",
        "trainer.loss.entropy_bonus": "entropy_coeff entropy_coef",
        "trainer.loss.normalize": "loss_agg_mode",
        "trainer.loss.reference_update_every": "ref_model_sync_steps sync_ref_model",
        "trainer.ckpt": "checkpointing",
        "trainer.ckpt.interval": "save_every_n_steps save_steps save_strategy",
        "trainer.ckpt.keep_last": "keep_n_checkpoints save_total_limit",
        "trainer.ckpt.resume_step": "resume_from_checkpoint",
        "orchestrator.rollouts_per_example": "num_generations group_size",
        "trainer.loss.ratio_low": "token_mask_low",
        "trainer.loss.ratio_high": "token_mask_high",
        "orchestrator.buffer.use_difficulty_filtering": "use_difficulty_filtering",
        "orchestrator.buffer.difficulty_threshold": "difficulty_threshold",
        "orchestrator.buffer.online_difficulty_filtering": "filter_groups",
        "orchestrator.advantage.type": "adv_estimator advantage_estimator scale_rewards",
        "orchestrator.advantage.reward_clip": "reward_clip_range",
        "orchestrator.filters.truncated": "mask_truncated_completions overlong_filtering",
        "orchestrator.length_penalty.buffer": "overlong_buffer",
        "orchestrator.eval.interval": "eval_steps eval_strategy",
        "orchestrator.env.rollout_timeout_s": "generation_timeout",
        "max_async_level": "num_batches_ahead async_level",
        "seq_len": "max_seq_len max_prompt_len",
        "name": "run_name",
        "supervisor.max_restarts": "max_retries",
        "supervisor.restart": "auto_restart",
        "model.name": "model_name",
        "wandb.project": "report_to",
        "console.every": "logging_steps",
        "console.samples_every": "log_completions",
        "console.num_samples": "num_completions_to_print",
        "inference_gpus": "num_gpus gpus",
        "inference.parallel.tp": "tensor_parallel_size pipeline_parallel_size",
        "inference.parallel.dp": "data_parallel_size",
        "inference.server.host": "vllm_server_host",
        "inference.server.port": "vllm_server_port port",
        "inference.start_timeout_s": "vllm_server_timeout",
    }
)

# Refused by `sft`, with its own keys; for other names `KNOWN_ELSEWHERE` holds.
KNOWN_ELSEWHERE_SFT = _invert(
    {
        "data": "dataset dataset_name dataset_path train_file train_data",
        "source": "datasets",
        "subset": "dataset_config dataset_config_name",
        "source.subset": "subsets",
        "source.split": "splits",
        "split": "dataset_train_split",
        "validation_split": "dataset_test_split",
        "source.repeat": "probabilities weight",
        "validation": "eval_dataset test_datasets validation_file",
        "validation_fraction": "val_set_size val_size",
        "validation_interval": "eval_steps eval_interval eval_strategy val_check_interval",
        "num_epochs": "num_train_epochs epochs max_epochs",
        "batch_size": "train_batch_size per_device_train_batch_size global_batch_size",
        "micro_batch_tokens": "gradient_accumulation_steps packing sample_packing pack_function padding_free",
        "seq_len": "max_length max_seq_length sequence_len cutoff_len",
        "overlong": "excess_length_strategy truncation_mode",
        "loss_on": "assistant_only_loss completion_only_loss train_on_inputs roles_to_train loss_mask",
        "chat_template": "chat_template_path chat_template_jinja",
        "scheduler.warmup_steps": "warmup_ratio",
        "scheduler.type": "lr_scheduler",
        "ckpt.interval": "save_steps",
        "ckpt.keep_last": "save_total_limit",
        "resume": "resume_from_checkpoint",
        "model.name": "base_model model_name_or_path",
        "tokenizer.name": "tokenizer_name",
        "model.attn": "attn_implementation flash_attention",
        "model.lora": "adapter",
        "model.lora.rank": "lora_r",
        "wandb.project": "wandb_project",
        "optim.type": "optimizer",
    }
)

_NO_DPPO = (
    'Remove it: there is no DPPO here. Write that loss as a function (`type = "custom"`, `docs/algorithms.md`), or '
    "bound ratios, not differences of probabilities, by `ratio_low` and `ratio_high`."
)
# Refused, as no key of ours does the same; with what to do instead.
NOT_A_KEY = {
    "env_file": "Export its variables in the shell; files of `prime-rl` and `trireme submit` may name it.",
    "ds3_gather_for_generation": "Remove it: weights travel to the engine tensor by tensor, nothing is gathered.",
    "mask_env_responses": "Remove it: only what the model sampled is ever trained on.",
    "deepspeed": "Remove it: parameters are sharded by FSDP2, without a file for it.",
    "dppo_mask_low": _NO_DPPO,
    "dppo_mask_high": _NO_DPPO,
    "adv_tau": "Remove it: advantages are taken as they are (1.0 there).",
}

# Refused values: table, key and value -> what to do instead.
NOT_A_VALUE: dict[tuple[str, ...], str] = {
    ("loss", "type", "default"): (
        "Leave it out for our default, `importance`, which was prime-rl's in December 2025. Its later one, DPPO with a "
        'squared KL, is not here: write it as `type = "custom"`.'
    ),
}

Kind = Literal["run", "vf-rl", "flat", "hosted", "gepa"]

FLAT_ONLY = {"model_name", "num_gpus", "tensor_parallel_size", "pipeline_parallel_size"}
FLAT_ONLY |= {"use_difficulty_filtering", "difficulty_threshold"}
HOSTED_ONLY = {"env", "sampling", "env_file"}

COMMANDS: dict[Kind, str] = {
    "run": "rl @",
    "vf-rl": "vf-rl @",
    "flat": "prime-rl",
    "hosted": "prime-rl",
    "gepa": "trireme gepa",
}
"""The words that start a file of each format on this machine, before its name."""

_DESCRIPTIONS: dict[Kind, str] = {
    "run": "a file of `rl`",
    "vf-rl": "a file of `vf-rl`",
    "flat": "a flat file of `prime-rl`",
    "hosted": "a file of hosted training",
    "gepa": "a file of `trireme gepa`, which trains nothing",
}


def kind_of(table: dict[str, Any]) -> Kind:
    """Return the format of a file, told by keys that only that format has; ours (`run`) if there are none.

    Example:
        kind_of({"model": "m", "env": [{"id": "e"}]})  # "hosted"
    """
    if "orchestrator" in table:
        return "run"
    sides = [side for name in ("inference", "trainer") if isinstance(side := table.get(name), dict)]
    # In `vf-rl` each side counts its GPUs, and the trainer's keys are in a table of their own.
    trainer = table.get("trainer")
    has_vf_tables = any("gpus" in side for side in sides) or (isinstance(trainer, dict) and "args" in trainer)
    if has_vf_tables or (sides and isinstance(table.get("model"), str) and isinstance(table.get("env"), dict)):
        return "vf-rl"
    if sides:
        return "run"
    if "env_id" in table:
        return "gepa"
    if FLAT_ONLY & table.keys():
        return "flat"
    return "hosted" if HOSTED_ONLY & table.keys() else "run"


def belongs_elsewhere(file: str, kind: Kind, *, expected: Kind = "run") -> str:
    """Return the message for a file that was given to the command of another format."""
    command = f"{COMMANDS[kind]} {file}"
    is_translated = kind not in ("run", "gepa")
    also = f"; `{command} --print-config > rl.toml` makes a file of `rl` out of it" if is_translated else ""
    cluster = f", or `trireme submit {file}` for a cluster" if kind == "hosted" else ""
    return f"{file} is {_DESCRIPTIONS[kind]} - expected {_DESCRIPTIONS[expected]}. Type `{command}`{cluster}{also}."
