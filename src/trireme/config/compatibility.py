"""Names and file formats that users bring from other systems."""

from __future__ import annotations

from typing import Any, Literal

# Refused, with the first of our keys that the command has as a suggestion: those of `sft` alone come first, and it
# leaves `trainer.` out. Other systems' names are the last parts of their keys.
NAMES_ELSEWHERE = {
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
    "micro_batch_tokens": "packing sample_packing pack_function padding_free",
    "overlong": "excess_length_strategy truncation_mode",
    "loss_on": "assistant_only_loss completion_only_loss train_on_inputs roles_to_train loss_mask",
    "chat_template": "chat_template_path chat_template_jinja",
    "trainer.optim.type": "optimizer",
    "trainer.optim.lr": "learning_rate",
    "trainer.optim.max_norm": "max_grad_norm",
    "trainer.optim.eps": "adam_epsilon",
    "trainer.scheduler.type": "lr_scheduler lr_scheduler_type",
    "trainer.micro_batch_tokens": "micro_batch_size per_device_train_batch_size",
    "trainer.tokenizer.name": "tokenizer_name",
    "trainer.model.attn": "attn_implementation flash_attention",
    "trainer.model.ac.freq": "gradient_checkpointing",
    "trainer.model.optimization_dtype": "bf16",
    "trainer.model.lora": "adapter",
    "trainer.model.lora.rank": "use_lora lora_rank lora_r",
    "trainer.model.lora.alpha": "lora_alpha",
    "trainer.model.lora.dropout": "lora_dropout",
    "trainer.model.lora.target_modules": "lora_target_modules",
    "trainer.model.lora.modules_to_save": "lora_modules_to_save",
    "trainer.model.lora.use_rslora": "lora_use_rslora",
    "trainer.num_iterations": "num_iterations ppo_epochs",
    "trainer.loss.type": "loss_type",
    "trainer.loss.beta": "beta kl_coef kl_loss_coef",
    "trainer.loss.ratio_low": "token_mask_low",
    "trainer.loss.ratio_high": "token_mask_high",
    "trainer.loss.clip_low": "epsilon_low clip_ratio_low",
    "trainer.loss.clip_high": "epsilon_high clip_ratio_high",
    "trainer.loss.dual_clip": "clip_ratio_c",
    "trainer.loss.entropy_bonus": "entropy_coeff entropy_coef",
    "trainer.loss.normalize": "loss_agg_mode",
    "trainer.loss.reference_update_every": "ref_model_sync_steps sync_ref_model",
    "trainer.ckpt": "checkpointing",
    "trainer.ckpt.interval": "save_every_n_steps save_steps save_strategy",
    "trainer.ckpt.keep_last": "keep_n_checkpoints save_total_limit",
    "orchestrator.rollouts_per_example": "num_generations",
    "orchestrator.env": "taskset",
    "orchestrator.sampling.max_tokens": "max_completion_tokens max_completion_length",
    "orchestrator.buffer.use_difficulty_filtering": "use_difficulty_filtering",
    "orchestrator.buffer.difficulty_threshold": "difficulty_threshold",
    "orchestrator.buffer.online_difficulty_filtering": "filter_groups",
    "orchestrator.advantage.type": "adv_estimator advantage_estimator scale_rewards",
    "orchestrator.advantage.reward_clip": "reward_clip_range",
    "orchestrator.length_penalty": "overlong_buffer",
    "orchestrator.eval.interval": "eval_steps eval_strategy",
    "orchestrator.env.rollout_timeout_s": "generation_timeout",
    "max_async_level": "num_batches_ahead async_level",
    "seq_len": "max_seq_len max_seq_length max_length sequence_len cutoff_len",
    "name": "run_name",
    "resume": "resume_from_checkpoint",
    "supervisor.restart": "auto_restart",
    "model.name": "model_name base_model model_name_or_path",
    "wandb.project": "report_to wandb_project monitors",
    "console.every": "logging_steps",
    "console.samples_every": "log_completions",
    "console.num_samples": "num_completions_to_print",
    "inference_gpus": "num_gpus gpus",
    "inference.args": "vllm",
    "inference.parallel.tp": "tensor_parallel_size",
    "inference.parallel.dp": "data_parallel_size",
    "inference.server.host": "vllm_server_host",
    "inference.server.port": "vllm_server_port port",
    "inference.start_timeout_s": "vllm_server_timeout",
}


def keys_for(name: str) -> list[str]:
    """Return our keys that do what a key of another system does, whose last part is `name`."""
    return [key for key, names in NAMES_ELSEWHERE.items() if name in names.split()]


Kind = Literal["run", "vf-rl", "flat", "hosted", "gepa"]

FLAT_ONLY = {"model_name", "num_gpus", "tensor_parallel_size", "pipeline_parallel_size"}
FLAT_ONLY |= {"use_difficulty_filtering", "difficulty_threshold"}
HOSTED_ONLY = {"env", "sampling", "env_file"}

_FORMATS: dict[Kind, tuple[str, str]] = {
    "run": ("rl @", "a file of `rl`"),
    "vf-rl": ("vf-rl @", "a file of `vf-rl`"),
    "flat": ("prime-rl", "a flat file of `prime-rl`"),
    "hosted": ("prime-rl", "a file of hosted training"),
    "gepa": ("trireme gepa", "a file of `trireme gepa`, which trains nothing"),
}
"""The command that starts a file of each format on this machine, and the name of the format."""


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
    words, description = _FORMATS[kind]
    also = f", or `trireme submit {file}` for a cluster" if kind == "hosted" else ""
    if kind not in ("run", "gepa"):
        also += f"; `{words} {file} --print-config > rl.toml` makes a file of `rl` out of it"
    return f"{file} is {description} - expected {_FORMATS[expected][1]}. Type `{words} {file}`{also}."
