"""Names and file formats that users bring from other systems."""

from __future__ import annotations

from typing import Any, Literal

# Read as if the second name had been written. Other systems have a table `[data]` for supervised training.
ALIASES = {
    "restart": "supervisor.restart",
    "orchestrator.environment": "orchestrator.env",
    "data.path": "data",
    "data.name": "data",
    "data.file": "data",
}

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
    "trainer.model.head_chunk": "fused_lm_head_token_chunk_size",
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
    "orchestrator.rollouts_per_example": "num_generations group_size",
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


_BETAS = "Write both as one key: `trainer.optim.betas = [0.9, 0.999]`, with your two values."
_ROUNDS = "Retries are counted as attempts here: `orchestrator.max_rollout_attempts`, which is one more."
_ONE_SAMPLING = "Not here for one environment: `orchestrator.sampling` holds for all of training."
_ONE_GROUP = "Not here for one environment: `orchestrator.rollouts_per_example` holds for all of training."
_ALWAYS = "Remove it: this is always so here."
_NO_EFFECT = "Remove it: nothing that is trained depends on it, and there is no such thing here."
_UNDER_WAY = (
    "`orchestrator.env.max_concurrent` bounds the rollouts under way of each environment, and "
    "`orchestrator.max_concurrent` the requests under way in all engines."
)
_ENGINES = (
    "`rl` starts its engines itself. Engines on other machines are named by `hosts.inference`, and "
    "`inference.server.port` is where they listen."
)
_SHELL = "Export the variables in the shell that starts the run."
_ALGORITHM = "Set `orchestrator.advantage` and `trainer.loss`; a teacher to be distilled is `orchestrator.teacher`."
_CLIP = "Write `clip_low`, and `clip_high` too if both sides are clipped alike: each has a default of its own here."
_WHOLE_BATCH = (
    "`batch_size` counts a whole step, in however many micro-batches: another system that counts for each device "
    "multiplies its size by the accumulation steps and the devices."
)
_NO_SKIP = "Not here: a resumed run continues with everything that its checkpoint holds."

Answer = str | dict[str, str]
ELSEWHERE: dict[str, Answer] = {
    # the trainer
    "trainer.model.experimental.lora": "trainer.model.lora",
    "trainer.model.lora.r": "trainer.model.lora.rank",
    "trainer.model.ac_offloading": "Write `trainer.model.activation_offload = true`.",
    "trainer.model.lora.name": "Remove it: engines get the adapters under a name of ours.",
    "trainer.data": "Not here: batches come from the orchestrator.",
    "trainer.model.optim_cpu_offload": "`trainer.model.fsdp_cpu_offload` keeps optimizer state and parameters there.",
    "trainer.model.full_offload": "trainer.model.fsdp_cpu_offload",
    "trainer.model.load_using_meta": _ALWAYS,
    "trainer.model.tp": "Remove it: parameters are sharded by FSDP2 over all ranks. `cp` splits long rows.",
    "trainer.model.moe_use_grouped_mm": "Write `trainer.model.moe.implementation`: `grouped_mm` or `eager`.",
    "trainer.model.moe_router_dtype": "trainer.model.moe.router_dtype",
    "trainer.model.freeze_moe_router": 'Write `trainer.model.moe.router = "frozen"` for true; leave it out for false.',
    "trainer.model.ep_comm_backend": "Remove it: experts are sharded by FSDP, so nothing is dispatched between ranks.",
    "trainer.model.debug.random_init": "trainer.model.from_scratch",
    "trainer.model.debug.num_layers": "Not here: a model is trained with all its layers, as its `config.json` says.",
    "trainer.model.seq_len": "seq_len",
    "trainer.tokenizer.trust_remote_code": "trainer.model.trust_remote_code",
    "trainer.optim.betas1": _BETAS,
    "trainer.optim.betas2": _BETAS,
    "trainer.optim.beta1": _BETAS,
    "trainer.optim.beta2": _BETAS,
    "trainer.optim.epsilon": "trainer.optim.eps",
    "trainer.optim.momentum": "The momentum of `sgd` is the first of `trainer.optim.betas`; that of `muon` is 0.95.",
    "trainer.optim.mu": "Not here: the momentum of `muon` is 0.95. Leave it out if it is that.",
    "trainer.optim.nesterov": {
        "False": "Remove it: the momentum of `sgd` is the plain one.",
        "": "Not here: the momentum of `sgd` is the plain one.",
    },
    "trainer.loss.mask_ratio_low": "trainer.loss.ratio_low",
    "trainer.loss.mask_ratio_high": "trainer.loss.ratio_high",
    "trainer.loss.dppo_mask_low": "trainer.loss.mask_low",
    "trainer.loss.dppo_mask_high": "trainer.loss.mask_high",
    "trainer.loss.ipo_threshold": "trainer.loss.eps",
    "trainer.loss.import_path": "trainer.loss.path",
    "trainer.loss.kwargs": "trainer.loss.args",
    "trainer.loss.teacher_tau": "orchestrator.teacher.weight",
    "trainer.enable_router_replay": "trainer.model.moe.router_replay",
    "trainer.dist_timeout_seconds": "trainer.batch_timeout_s",
    "trainer.weight_broadcast": "weight_broadcast",
    "trainer.ckpt.keep": "trainer.ckpt.keep_last",
    "trainer.ckpt.weights": "Remove it: the weights of each checkpoint are written as Hugging Face files.",
    "trainer.ckpt.weights_only": "Not here: a checkpoint always holds what a resumed run needs.",
    "trainer.ckpt.output_dir": "Checkpoints are in the run's own folder: `output_dir`.",
    "ckpt": "trainer.ckpt",
    "max_concurrent": "orchestrator.max_concurrent",
    "resume.step": "trainer.ckpt.resume_step",
    "resume.dir": "The folder of the run is `output_dir`; a run is resumed in the folder that it is in.",
    "weight_broadcast.timeout": "weight_broadcast.timeout_s",
    "weight_broadcast.port": "ports.weights",
    "weight_broadcast.host": "`hosts.trainer` has the addresses of the trainer's machines.",
    "weight_broadcast.inference_world_size": "Remove it: engines are counted when they join.",
    "weight_broadcast.quantize_in_weight_transfer": {
        "False": "Remove it: weights travel in the precision that engines serve.",
        "": "Not here: weights travel in the precision that engines serve (`inference.model.dtype`).",
    },
    "weight_broadcast.adapter_only": 'Write `trainer.model.lora.sync = "adapter"` for true; leave it out for false.',
    # the orchestrator
    "orchestrator.train.env": "orchestrator.env",
    "orchestrator.train.source": "orchestrator.env",
    "orchestrator.train.sampling": "orchestrator.sampling",
    "orchestrator.train.group_size": "orchestrator.rollouts_per_example",
    "orchestrator.train.num_workers": "orchestrator.env.num_workers",
    "orchestrator.num_train_workers": "orchestrator.env.num_workers",
    "orchestrator.train.max_retries": _ROUNDS,
    "orchestrator.train.algo": "orchestrator.algo",
    "orchestrator.train.filter_zero_advantages": "orchestrator.filters.zero_advantage",
    "orchestrator.env.ratio": "orchestrator.env.weight",
    "orchestrator.env.max_retries": _ROUNDS,
    "orchestrator.env.sampling": _ONE_SAMPLING,
    "orchestrator.env.group_size": _ONE_GROUP,
    "orchestrator.env.rollouts_per_example": _ONE_GROUP,
    "orchestrator.env.num_examples": "How many examples there are is an argument of the environment: its `args`.",
    "orchestrator.env.extra_env_kwargs": "orchestrator.env.args",
    "orchestrator.env.env.taskset.id": "orchestrator.env.id",
    "orchestrator.env.env.agent.max_turns": "orchestrator.env.max_turns",
    "orchestrator.env.env.agent": "`orchestrator.env.agent` has the keys of a program that plays the rollouts.",
    "orchestrator.env.env": "The keys of its task set are `orchestrator.env.args`.",
    "orchestrator.env.algo": f"Not here for one environment. {_ALGORITHM}",
    "orchestrator.env.curriculum": "Not here for one environment: `orchestrator.buffer` and `orchestrator.filters`.",
    "orchestrator.env.address": "Not here: each environment runs in worker processes that the orchestrator starts.",
    "orchestrator.env_mix.probabilities": "Write each environment's share as `orchestrator.env.weight`.",
    "orchestrator.eval.source": "orchestrator.eval.env",
    "orchestrator.eval.env.group_size": "orchestrator.eval.rollouts_per_example",
    "orchestrator.eval.env.rollouts_per_example": "orchestrator.eval.rollouts_per_example",
    "orchestrator.eval.env.num_examples": "orchestrator.eval.num_examples",
    "orchestrator.eval.env.interval": "orchestrator.eval.interval",
    "orchestrator.eval.env.sampling": "orchestrator.eval.sampling",
    "orchestrator.eval.env.env.taskset.id": "orchestrator.eval.env.id",
    "orchestrator.eval.env.env.agent": "`orchestrator.eval.env.agent` has the keys of a program.",
    "orchestrator.eval.env.env": "The keys of its task set are `orchestrator.eval.env.args`.",
    "orchestrator.eval.env.ratio": "Remove it: each environment of an evaluation is evaluated whole.",
    "orchestrator.eval.group_size": "orchestrator.eval.rollouts_per_example",
    "orchestrator.eval.max_completion_tokens": "orchestrator.eval.sampling.max_tokens",
    "orchestrator.eval.num_workers": "orchestrator.eval.env.num_workers",
    "orchestrator.eval.eval_base_model": "orchestrator.eval.eval_base",
    "orchestrator.eval.skip_first_step": {
        "False": "Remove it: version 0 is evaluated (`orchestrator.eval.eval_base`).",
        "": "Write `orchestrator.eval.eval_base = false`.",
    },
    "orchestrator.eval.max_retries": _ROUNDS,
    "orchestrator.eval.save": "Remove it: the answers of each evaluation are in the run's folder `evals`.",
    "orchestrator.val": "orchestrator.eval",
    "orchestrator.model.name": "model.name",
    "orchestrator.model.lora": "trainer.model.lora",
    "orchestrator.model.trust_remote_code": "trainer.model.trust_remote_code",
    "orchestrator.model.client": _ENGINES,
    "orchestrator.client": _ENGINES,
    "orchestrator.tokenizer": "trainer.tokenizer",
    "orchestrator.optim": "trainer.optim",
    "orchestrator.ckpt": "trainer.ckpt",
    "orchestrator.weight_broadcast": "weight_broadcast",
    "orchestrator.seed": "seed",
    "orchestrator.teacher_model.client.base_url": "orchestrator.teacher.base_url",
    "orchestrator.teacher_model.model.name": "orchestrator.teacher.model",
    "orchestrator.buffer.type": {
        "online-difficulty": "Write `orchestrator.buffer.online_difficulty_filtering = true`.",
        "difficulty-pool": "Write a table `[orchestrator.buffer.pools]`.",
        "simple": "Remove it: without any other key of `[orchestrator.buffer]`, every example comes equally often.",
        "": "`[orchestrator.buffer]` has a key for each kind: `online_difficulty_filtering`, `pools`.",
    },
    "orchestrator.buffer.seed": "seed",
    "orchestrator.buffer.easy_threshold": "orchestrator.buffer.pools.easy_threshold",
    "orchestrator.buffer.hard_threshold": "orchestrator.buffer.pools.hard_threshold",
    "orchestrator.buffer.easy_fraction": "`orchestrator.buffer.pools.easy_weight` is how often easy examples come.",
    "orchestrator.buffer.hard_fraction": "`orchestrator.buffer.pools.hard_weight` is how often hard examples come.",
    "orchestrator.advantage.import_path": "orchestrator.advantage.path",
    "orchestrator.advantage.kwargs": "orchestrator.advantage.args",
    "orchestrator.advantage.length_shaping": "`[orchestrator.length_penalty]` prefers short answers.",
    "orchestrator.max_inflight_rollouts": _UNDER_WAY,
    "orchestrator.concurrency": _UNDER_WAY,
    "orchestrator.tasks_per_minute": f"Not here. {_UNDER_WAY}",
    "orchestrator.token_batch_size": "Not here: `orchestrator.batch_size` counts rollouts.",
    "orchestrator.strict_async_level": "Remove it: `max_async_level` is a bound, which a run may stay below.",
    "orchestrator.lora_name": "Remove it: engines get the adapters of `[trainer.model.lora]` under a name of ours.",
    "orchestrator.use_token_client": _ALWAYS,
    "orchestrator.heartbeat": _NO_EFFECT,
    # the engines
    "inference.vllm.model": "inference.model.name",
    "inference.vllm.tensor_parallel_size": "inference.parallel.tp",
    "inference.vllm.data_parallel_size": "inference.parallel.dp",
    "inference.vllm.gpu_memory_utilization": "inference.gpu_memory_utilization",
    "inference.vllm.max_num_seqs": "inference.max_num_seqs",
    **{
        f"inference.vllm.{name}": f"inference.model.{name}"
        for name in (
            *("dtype", "max_model_len", "enforce_eager", "trust_remote_code"),
            *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
        )
    },
    "inference.vllm": "inference.args",
    "inference.vllm_extra": "inference.args",
    "inference.weight_broadcast": "weight_broadcast",
    "inference.enable_lora": 'Engines hold adapters where `trainer.model.lora.sync = "adapter"`.',
    # the run
    "deployment.num_train_gpus": "trainer_gpus",
    "deployment.num_infer_gpus": "inference_gpus",
    "deployment.type": {
        "single_node": "Remove it: this is always so without `[hosts]`.",
        "": "Machines are named by `[hosts]`, or asked for by `trireme submit --nodes`.",
    },
    "monitors.wandb": "wandb",
    "monitors.file": "Remove it: metrics are always in `metrics.jsonl` of the run's folder.",
    "monitors.prime": _NO_EFFECT,
    "wandb.entity": "Export `WANDB_ENTITY` instead.",
    "wandb.group": "Export `WANDB_RUN_GROUP` instead.",
    "wandb.tags": "Export `WANDB_TAGS` instead.",
    "wandb.offline": 'Write `wandb.mode = "offline"` for true; leave it out for false.',
    "log.level": "log_level",
    "orchestrator.log": "log",
    "trainer.log": "log",
    "inference.log": "log",
    "orchestrator.wandb": "wandb",
    "trainer.wandb": "wandb",
    "orchestrator.monitors": "monitors",
    "trainer.monitors": "monitors",
    "run.name": "name",
    "run.dir": "output_dir",
    "clean": "Remove it: files of an earlier run are moved aside.",
    "clean_output_dir": "Remove it: files of an earlier run are moved aside.",
    "tokenizer": "trainer.tokenizer",
    # supervised training
    "data.micro_batch_size": "`micro_batch_tokens` counts the tokens of a packed micro-batch, not samples.",
    "val.interval": "validation_interval",
    "val.data": "validation",
    "data.loss_mask": "`loss_on` lists the roles that are trained on.",
    "loss_impl": _NO_EFFECT,
}
"""Keys of other formats by their whole path, and what does the same here: a key of ours, under which the rest of a path
is looked up again; a sentence; or either by value, "" for any other."""

# Refused, as no key of ours does the same; with what to do instead. These are the last parts of keys.
NOT_A_KEY: dict[str, Answer] = {
    "env_file": "Export its variables in the shell; files of `prime-rl` and `trireme submit` may name it.",
    "env_vars": _SHELL,
    "ds3_gather_for_generation": "Remove it: weights travel to the engine tensor by tensor, nothing is gathered.",
    "mask_env_responses": {
        "False": "Not here: only what the model sampled is ever trained on.",
        "": "Remove it: only what the model sampled is ever trained on.",
    },
    "deepspeed": "Remove it: parameters are sharded by FSDP2, without a file for it.",
    "impl": "Remove it: every model is computed by its class in transformers, also those that see (`[model.vlm]`).",
    "renderer": (
        "The tokenizer's own chat template renders conversations. Leave this out if your renderer writes the same."
    ),
    "algo": _ALGORITHM,
    "enable_token_export": "Remove it: the journal holds the tokens of every batch.",
    "skip_gather_master_weights": _NO_EFFECT,
    "deployment": (
        "Set `inference_gpus` and `trainer_gpus` (for `sft`, `num_ranks`). Machines are named by `hosts`, or "
        "asked for by `trireme submit --nodes`."
    ),
    "slurm": "Remove it, and type `trireme submit FILE --on slurm`: its flags are in `trireme submit --help`.",
    "cp_style": "Remove it: ranks that share a row (`trainer.model.cp`) gather the keys and values of the others.",
    "mask_truncated_completions": {
        "False": "Remove it: truncated rollouts are trained on unless `orchestrator.filters.truncated` says otherwise.",
        "": 'Write `orchestrator.filters.truncated = "mask"`.',
    },
    "zero_truncated_completions": {
        "False": "Remove it: truncated rollouts keep their reward.",
        "": (
            "A reward of 0 for truncated rollouts is not here. `orchestrator.filters.truncated` is the nearest: `mask` "
            "keeps the reward and trains on none of the tokens, `drop` drops the group. Or let the environment give 0."
        ),
    },
    "max_retries": _ROUNDS,
    "epsilon": _CLIP,
    "clip_ratio": _CLIP,
    "gradient_accumulation_steps": _WHOLE_BATCH,
    "generation_batch_size": _WHOLE_BATCH,
    "pipeline_parallel_size": "Not here: `inference.parallel.tp` splits a model over GPUs in another way.",
    "warmup_ratio": "`trainer.scheduler.warmup_steps` counts steps: the ratio times `max_steps`.",
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "max_prompt_len": "Not here for prompts alone: `seq_len` is the longest prompt with its completion.",
    "max_prompt_length": "Not here for prompts alone: `seq_len` is the longest prompt with its completion.",
    "overlong_filtering": 'Write `orchestrator.filters.truncated = "mask"` for true; leave it out for false.',
    "skip_progress": _NO_SKIP,
    "skip_optimizer": _NO_SKIP,
    "skip_scheduler": _NO_SKIP,
    "skip_dataloader": _NO_SKIP,
    "skip_buffer": _NO_SKIP,
    "vf_level": "`log_level` holds for all processes.",
    **dict.fromkeys(
        (
            *("trace_path", "memory_profiler_path", "bench", "prime_monitor", "log_extras", "rollout_transport"),
            *("collect_inference_metrics", "json_logging", "log_data", "metrics_server", "gc", "shared"),
        ),
        _NO_EFFECT,
    ),
}

# Refused values: table, key and value -> what to do instead.
NOT_A_VALUE: dict[tuple[str, ...], str] = {
    ("loss", "type", "default"): (
        "That name was prime-rl's until August 2026 and meant several losses: `importance` until February, `ipo` in "
        'March, then DPPO: `type = "dppo_tv"` with `kl_tau = 0.001` and `max_importance_ratio = inf`.'
    ),
}

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
