"""Names and file formats that users bring from other systems."""

from __future__ import annotations

from typing import Any, Literal

# Taken as if the second had been typed.
ALIASES = {
    "orchestrator.environment": "orchestrator.env",
}

# Taken by `sft`: what others have in a table `[data]`.
SFT_ALIASES = {
    "data.path": "data",
    "data.name": "data",
    "data.file": "data",
}

# Taken on the command line only: short for what is typed often.
SHORT_FLAGS = {
    "restart": "supervisor.restart",
}

# Refused, with a word on where to go: a key's last part -> our key.
KNOWN_ELSEWHERE = {
    "learning_rate": "trainer.optim.lr",
    "lr_scheduler_type": "trainer.scheduler.type",
    "max_grad_norm": "trainer.optim.max_norm",
    "adam_beta1": "trainer.optim.betas",
    "adam_beta2": "trainer.optim.betas",
    "adam_epsilon": "trainer.optim.eps",
    "warmup_ratio": "trainer.scheduler.warmup_steps",
    "micro_batch_size": "trainer.micro_batch_tokens",
    "per_device_train_batch_size": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "orchestrator.batch_size",
    "generation_batch_size": "orchestrator.batch_size",
    "gradient_checkpointing": "trainer.model.ac.freq",
    "bf16": "trainer.model.optimization_dtype",
    "use_lora": "trainer.model.lora.rank",
    "lora_rank": "trainer.model.lora.rank",
    "lora_alpha": "trainer.model.lora.alpha",
    "lora_dropout": "trainer.model.lora.dropout",
    "lora_target_modules": "trainer.model.lora.target_modules",
    "lora_modules_to_save": "trainer.model.lora.modules_to_save",
    "lora_use_rslora": "trainer.model.lora.use_rslora",
    "beta": "trainer.loss.beta",
    "num_iterations": "trainer.num_iterations",
    "ppo_epochs": "trainer.num_iterations",
    "loss_type": "trainer.loss.type",
    "epsilon": "trainer.loss.clip_low",
    "epsilon_low": "trainer.loss.clip_low",
    "epsilon_high": "trainer.loss.clip_high",
    "clip_ratio": "trainer.loss.clip_low",
    "clip_ratio_low": "trainer.loss.clip_low",
    "clip_ratio_high": "trainer.loss.clip_high",
    "clip_ratio_c": "trainer.loss.dual_clip",
    "kl_coef": "trainer.loss.beta",
    "kl_loss_coef": "trainer.loss.beta",
    "entropy_coeff": "trainer.loss.entropy_bonus",
    "entropy_coef": "trainer.loss.entropy_bonus",
    "loss_agg_mode": "trainer.loss.normalize",
    "ref_model_sync_steps": "trainer.loss.reference_update_every",
    "sync_ref_model": "trainer.loss.reference_update_every",
    "checkpointing": "trainer.ckpt",
    "save_every_n_steps": "trainer.ckpt.interval",
    "save_steps": "trainer.ckpt.interval",
    "save_strategy": "trainer.ckpt.interval",
    "keep_n_checkpoints": "trainer.ckpt.keep_last",
    "save_total_limit": "trainer.ckpt.keep_last",
    "resume_from_checkpoint": "trainer.ckpt.resume_step",
    "num_generations": "orchestrator.rollouts_per_example",
    "group_size": "orchestrator.rollouts_per_example",
    "token_mask_low": "trainer.loss.ratio_low",
    "token_mask_high": "trainer.loss.ratio_high",
    "use_difficulty_filtering": "orchestrator.buffer.use_difficulty_filtering",
    "difficulty_threshold": "orchestrator.buffer.difficulty_threshold",
    "filter_groups": "orchestrator.buffer.online_difficulty_filtering",
    "adv_estimator": "orchestrator.advantage.type",
    "advantage_estimator": "orchestrator.advantage.type",
    "scale_rewards": "orchestrator.advantage.type",
    "reward_clip_range": "orchestrator.advantage.reward_clip",
    "mask_truncated_completions": "orchestrator.filters.truncated",
    "overlong_filtering": "orchestrator.filters.truncated",
    "overlong_buffer": "orchestrator.length_penalty.buffer",
    "eval_steps": "orchestrator.eval.interval",
    "eval_strategy": "orchestrator.eval.interval",
    "generation_timeout": "orchestrator.env.rollout_timeout_s",
    "num_batches_ahead": "max_async_level",
    "async_level": "max_async_level",
    "max_seq_len": "seq_len",
    "max_prompt_len": "seq_len",
    "run_name": "name",
    "max_retries": "supervisor.max_restarts",
    "auto_restart": "supervisor.restart",
    "model_name": "model.name",
    "report_to": "wandb.project",
    "logging_steps": "console.every",
    "log_completions": "console.samples_every",
    "num_completions_to_print": "console.num_samples",
    "num_gpus": "inference_gpus",
    "gpus": "inference_gpus",
    "tensor_parallel_size": "inference.parallel.tp",
    "pipeline_parallel_size": "inference.parallel.tp",
    "data_parallel_size": "inference.parallel.dp",
    "vllm_server_host": "inference.server.host",
    "vllm_server_port": "inference.server.port",
    "vllm_server_timeout": "inference.start_timeout_s",
    "port": "inference.server.port",
}

_NO_DPPO = (
    'Remove it: there is no DPPO here. Write that loss as a function (`type = "custom"`, `docs/algorithms.md`), or '
    "bound ratios, not differences of probabilities, by `ratio_low` and `ratio_high`."
)
# Refused, where no key of ours does the same: what to do instead.
NOT_A_KEY = {
    "env_file": "Export its variables in the shell; files of `prime-rl` and `trireme submit` may name it.",
    "ds3_gather_for_generation": "Remove it: weights travel to the engine tensor by tensor, nothing is gathered.",
    "mask_env_responses": "Remove it: only what the model sampled is ever trained on.",
    "deepspeed": "Remove it: parameters are sharded by FSDP2, without a file for it.",
    "dppo_mask_low": _NO_DPPO,
    "dppo_mask_high": _NO_DPPO,
    "adv_tau": "Remove it: advantages are taken as they are (1.0 there).",
}

# Likewise for values: table, key and value -> what to do instead.
NOT_A_VALUE: dict[tuple[str, ...], str] = {
    ("loss", "type", "default"): (
        "Leave it out for our default, `importance`, which was prime-rl's in December 2025. Its later one, DPPO with a "
        'squared KL, is not here: write it as `type = "custom"`.'
    ),
}

# Our keys for what people type to `sft`; where a key's name is not here, `KNOWN_ELSEWHERE` holds.
KNOWN_ELSEWHERE_SFT = {
    "dataset": "data",
    "datasets": "source",
    "dataset_name": "data",
    "dataset_path": "data",
    "train_file": "data",
    "train_data": "data",
    "dataset_config": "subset",
    "dataset_config_name": "subset",
    "subsets": "source.subset",
    "splits": "source.split",
    "dataset_train_split": "split",
    "dataset_test_split": "validation_split",
    "probabilities": "source.repeat",
    "weight": "source.repeat",
    "eval_dataset": "validation",
    "test_datasets": "validation",
    "validation_file": "validation",
    "val_set_size": "validation_fraction",
    "val_size": "validation_fraction",
    "eval_steps": "validation_interval",
    "eval_interval": "validation_interval",
    "eval_strategy": "validation_interval",
    "val_check_interval": "validation_interval",
    "num_train_epochs": "num_epochs",
    "epochs": "num_epochs",
    "max_epochs": "num_epochs",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "global_batch_size": "batch_size",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "packing": "micro_batch_tokens",
    "sample_packing": "micro_batch_tokens",
    "pack_function": "micro_batch_tokens",
    "padding_free": "micro_batch_tokens",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "sequence_len": "seq_len",
    "cutoff_len": "seq_len",
    "excess_length_strategy": "overlong",
    "truncation_mode": "overlong",
    "assistant_only_loss": "loss_on",
    "completion_only_loss": "loss_on",
    "train_on_inputs": "loss_on",
    "roles_to_train": "loss_on",
    "loss_mask": "loss_on",
    "chat_template_path": "chat_template",
    "chat_template_jinja": "chat_template",
    "warmup_ratio": "scheduler.warmup_steps",
    "lr_scheduler": "scheduler.type",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "resume_from_checkpoint": "resume",
    "base_model": "model.name",
    "model_name_or_path": "model.name",
    "tokenizer_name": "tokenizer.name",
    "attn_implementation": "model.attn",
    "flash_attention": "model.attn",
    "adapter": "model.lora",
    "lora_r": "model.lora.rank",
    "wandb_project": "wandb.project",
    "optimizer": "optim.type",
}


Kind = Literal["run", "vf-rl", "flat", "hosted", "gepa"]

FLAT_ONLY = frozenset(
    {
        "model_name",
        "num_gpus",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "use_difficulty_filtering",
        "difficulty_threshold",
    }
)
HOSTED_ONLY = frozenset({"env", "sampling", "env_file"})

COMMANDS: dict[Kind, str] = {
    "run": "rl @",
    "vf-rl": "vf-rl @",
    "flat": "prime-rl",
    "hosted": "prime-rl",
    "gepa": "trireme gepa",
}
"""What starts a file of each on this machine, before its name."""

_DESCRIPTIONS: dict[Kind, str] = {
    "run": "a file of `rl`",
    "vf-rl": "a file of `vf-rl`",
    "flat": "a flat file of `prime-rl`",
    "hosted": "a file of hosted training",
    "gepa": "a file of `trireme gepa`, which trains nothing",
}


def kind_of(table: dict[str, Any]) -> Kind:
    """Ours (`run`) unless something in it says otherwise.

    Example:
        kind_of({"model": "m", "env": [{"id": "e"}]})  # "hosted"
    """
    if "orchestrator" in table:
        return "run"
    sides = [side for name in ("inference", "trainer") if isinstance(side := table.get(name), dict)]
    if _is_vf_rl(table, sides):
        return "vf-rl"
    if sides:
        return "run"
    if "env_id" in table:
        return "gepa"
    if FLAT_ONLY & table.keys():
        return "flat"
    return "hosted" if HOSTED_ONLY & table.keys() else "run"


def _is_vf_rl(table: dict[str, Any], sides: list[dict[str, Any]]) -> bool:
    """Each side counts its GPUs there; the trainer's keys are in a table of their own."""
    trainer, env = table.get("trainer"), table.get("env")
    if any("gpus" in side for side in sides) or (isinstance(trainer, dict) and "args" in trainer):
        return True
    return isinstance(table.get("model"), str) and isinstance(env, dict) and bool(sides)


def belongs_elsewhere(file: str, kind: Kind, *, expected: Kind = "run") -> str:
    """What to say of a file that was given to the command of another format."""
    command = f"{COMMANDS[kind]} {file}"
    also = (
        f"; `{command} --print-config > rl.toml` makes a file of `rl` out of it" if kind not in ("run", "gepa") else ""
    )
    cluster = f", or `trireme submit {file}` for a cluster" if kind == "hosted" else ""
    return f"{file} is {_DESCRIPTIONS[kind]} - expected {_DESCRIPTIONS[expected]}. Type `{command}`{cluster}{also}."
