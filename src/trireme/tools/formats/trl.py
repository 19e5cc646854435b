"""The keys of TRL's `GRPOConfig`, `SFTConfig`, `ModelConfig` and `ScriptArguments`, and what becomes of each here.

Read in TRL 1.16.0 with transformers 5.19. A script, or a YAML file of `trl grpo`, is one flat table of these keys, on
top of TRL's defaults (`with_defaults`): what a key that was not given means there is set here too.
"""

from __future__ import annotations

from trireme.config.rows.rules import on_gpus
from trireme.config.translation import Row
from trireme.tools.formats import trl_rules as rules
from trireme.tools.formats.row_rules import (
    HARDWARE,
    OF_DEVIATIONS,
    Table,
    guarded,
    idle,
    if_given,
    if_true,
    only,
    set_max_norm,
    trust,
)

VERSION = "1.16.0"

TRAINING: Table = {
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_processes": 1, "num_train_epochs": 3.0},
    **{"max_steps": -1, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optim": "adamw_torch_fused", "seed": 42},
    **{"logging_steps": 10, "save_strategy": "steps", "save_steps": 500, "eval_strategy": "no"},
}
GRPO: Table = {
    **{"learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "shuffle_dataset": True},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "beta": 0.0, "num_iterations": 1},
    **{"loss_type": "dapo", "epsilon": 0.2, "importance_sampling_level": "token", "scale_rewards": "group"},
    **{"mask_truncated_completions": False, "vllm_importance_sampling_correction": True},
}
SFT: Table = {"learning_rate": 2e-5, "max_length": 1024, "assistant_only_loss": False}
DEFAULTS: dict[str, Table] = {"grpo": TRAINING | GRPO, "sft": TRAINING | SFT}
"""TRL's values of keys that were not given, as far as they decide what is trained. `num_processes` is not TRL's,
and counts the processes that `accelerate launch` would start."""

LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": None}
"""`ModelConfig`'s, which `use_peft` switches on."""


def with_defaults(table: Table, kind: str) -> Table:
    adapters = LORA if table.get("use_peft") else {}
    return DEFAULTS[kind] | adapters | table


SCALED = f"{OF_DEVIATIONS}; with batch, that of the differences from the mean of each group"
VLLM_SAMPLES = "vLLM always samples here"
LOW_BITS = "weights that are trained are not quantised; train adapters in bfloat16."
NEWEST = "a model is its newest. Download that one, and give its folder."

SHARED = (
    Row("model_name_or_path", rules.set_model),
    Row("model_revision", only(None, "main", instead=NEWEST)),
    Row("model_init_kwargs", rules.set_model_kwargs),
    Row("trust_remote_code", trust),
    Row("attn_implementation", rules.set_attention),
    Row("dtype", rules.set_dtype),
    Row("torch_dtype", rules.set_dtype),
    Row("use_peft", if_true("trainer.model.lora", {})),
    Row("lora_r", rules.lora("rank")),
    Row("lora_alpha", rules.lora("alpha")),
    Row("lora_dropout", rules.lora("dropout")),
    Row("lora_target_modules", rules.set_targets, "if not given, PEFT's for Llama, Qwen, Mistral and Gemma"),
    Row("lora_modules_to_save", rules.lora("modules_to_save")),
    Row("use_rslora", rules.lora("use_rslora")),
    Row("use_dora", only(False, None, instead="adapters are LoRA's.")),
    Row("load_in_4bit", only(False, None, instead=LOW_BITS)),
    Row("load_in_8bit", only(False, None, instead=LOW_BITS)),
    Row("learning_rate", "trainer.optim.lr"),
    Row("weight_decay", "trainer.optim.weight_decay"),
    Row("adam_beta1", rules.set_betas),
    Row("adam_beta2", rules.set_betas),
    Row("adam_epsilon", "trainer.optim.eps"),
    Row("max_grad_norm", set_max_norm),
    Row("optim", rules.choose("trainer.optim.type", rules.OPTIMIZERS, "AdamW is the usual one.")),
    Row("lr_scheduler_type", rules.choose("trainer.scheduler.type", rules.SCHEDULES, "Take the nearest.")),
    Row("lr_scheduler_kwargs", rules.set_schedule_kwargs),
    Row("warmup_steps", rules.every("trainer.scheduler.warmup_steps")),
    Row("warmup_ratio", rules.every("trainer.scheduler.warmup_steps")),
    Row("seed", "seed"),
    Row("output_dir", rules.set_name),
    Row("report_to", rules.set_report),
    Row("save_strategy", rules.set_save),
    Row("save_steps", rules.every("trainer.ckpt.interval", "save_strategy")),
    Row("save_total_limit", if_given("trainer.ckpt.keep_last")),
    Row("resume_from_checkpoint", if_true("resume", True), "the newest; trainer.ckpt.resume_step chooses another"),
    Row("bf16", lambda value, table: {"trainer.model.optimization_dtype": "bfloat16" if value else "float32"}),
    Row("fp16", only(False, None, instead="the trainer has bfloat16 and float32. Set bf16.")),
    Row("gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
    Row("torch_compile", "trainer.model.compile"),
    Row("use_cpu", if_true("device", "cpu")),
    Row("auto_find_batch_size", only(False, None, instead="`trireme plan` says what fits.")),
    Row("label_smoothing_factor", only(0, None, instead="there is none here. Remove it.")),
    Row("neftune_noise_alpha", only(None, 0, instead="there is none here. Remove it.")),
    Row("router_aux_loss_coef", only(None, 0, instead="experts have no loss of their own. Set 0.")),
    Row("load_best_model_at_end", only(False, None, instead="`trireme export RUN --step N` takes any checkpoint.")),
    *idle("a factor of the batch", "num_processes"),
    *idle("for the steps of an epoch", "num_examples"),
    *idle("wandb.name; the run's folder is named by output_dir", "run_name"),
    *idle("see report_to", "project logging_dir trackio_space_id"),
    *idle("every step has its line and metrics", "logging_steps logging_first_step logging_strategy"),
    *idle("`hf upload` sends a folder of weights/", "push_to_hub hub_model_id hub_token hub_private_repo hub_strategy"),
    *idle(HARDWARE, "deepspeed fsdp fsdp_config parallelism_config accelerator_config use_liger_kernel tf32"),
    *idle(HARDWARE, "gradient_checkpointing_kwargs torch_compile_backend torch_empty_cache_steps pad_to_multiple_of"),
    *idle(HARDWARE, "dataloader_num_workers dataloader_pin_memory dataloader_drop_last ddp_find_unused_parameters"),
    *idle(HARDWARE, "ddp_timeout per_device_eval_batch_size activation_offloading"),
    *idle("columns are handed to reward functions", "remove_unused_columns"),
    *idle("see [console]", "disable_tqdm log_level"),
    *idle("`seed` decides everything random", "data_seed"),
    *idle("see load_best_model_at_end", "metric_for_best_model greater_is_better"),
    *idle("models have no dropout in training here", "disable_dropout"),
    *idle("always a causal language model", "lora_task_type"),
)
"""Keys of transformers' `TrainingArguments` and of TRL's `ModelConfig`."""

TRL_GRPO: tuple[Row, ...] = guarded(
    (
        Row("num_generations", "orchestrator.rollouts_per_example"),
        Row("per_device_train_batch_size", rules.set_batch),
        Row("gradient_accumulation_steps", rules.set_batch),
        Row("max_steps", rules.set_steps),
        Row("num_train_epochs", rules.set_epochs),
        Row("num_iterations", "trainer.num_iterations"),
        Row("max_completion_length", rules.set_length, f"with max_prompt_length, or {rules.ROOM} tokens"),
        Row("max_prompt_length", None, "part of seq_len; a longer prompt costs its group", since="0.9, until 0.27"),
        Row("shuffle_dataset", "orchestrator.buffer.shuffle"),
        Row("temperature", rules.sampling("temperature")),
        Row("top_p", rules.sampling("top_p")),
        Row("top_k", rules.sampling("top_k", off=0)),
        Row("min_p", rules.sampling("min_p")),
        Row("repetition_penalty", rules.sampling("repetition_penalty")),
        Row("generation_kwargs", rules.set_generation),
        Row("chat_template_kwargs", rules.sampling("chat_template_kwargs")),
        Row("vllm_structured_outputs_regex", only(None, "", instead="see orchestrator.sampling.extra_body.")),
        Row("loss_type", rules.set_loss),
        Row("importance_sampling_level", rules.set_level),
        Row("epsilon", rules.set_clip),
        Row("epsilon_high", lambda value, table: {} if value is None else rules.set_clip(table["epsilon"], table)),
        Row("delta", if_given("trainer.loss.dual_clip")),
        Row("sapo_temperature_pos", rules.if_loss("sapo", "trainer.loss.tau_pos")),
        Row("sapo_temperature_neg", rules.if_loss("sapo", "trainer.loss.tau_neg")),
        *(Row(f"vespo_{key}", rules.if_loss("vespo", f"trainer.loss.{key}")) for key in ("k_pos", "k_neg")),
        *(Row(f"vespo_{key}", rules.if_loss("vespo", f"trainer.loss.{key}")) for key in ("lambda_pos", "lambda_neg")),
        Row("beta", rules.set_beta, "with use_bias_correction_kl, k2: the same gradient in expectation"),
        Row("sync_ref_model", rules.set_sync),
        Row("entropy_coef", "trainer.loss.entropy_bonus"),
        Row("use_adaptive_entropy", only(False, None, instead="the bonus is constant. Set entropy_coef alone.")),
        Row("top_entropy_quantile", only(1, None, instead='all tokens train. Write a loss: type = "custom".')),
        Row("off_policy_mask_threshold", only(None, instead='see trainer.loss.correction = "geometric_mask".')),
        Row(
            "vllm_importance_sampling_correction",
            rules.set_correction,
            "as TRL has it with vLLM",
        ),
        Row("scale_rewards", rules.set_scale, SCALED),
        Row("multi_objective_aggregation", only("sum_then_normalize", None, instead="rewards are summed first.")),
        Row("mask_truncated_completions", if_true("orchestrator.filters.truncated", "mask")),
        Row("eval_strategy", rules.set_evaluation),
        Row("vllm_gpu_memory_utilization", "inference.gpu_memory_utilization"),
        Row("vllm_tensor_parallel_size", on_gpus("inference.parallel.tp")),
        Row("vllm_max_model_length", if_given("seq_len")),
        Row("vllm_model_impl", "inference.args.model_impl"),
        Row("log_completions", if_true("console.samples_every", 10), "all of them are in the journal"),
        Row("num_completions_to_print", if_given("console.num_samples")),
        Row("reward_model_name_or_path", only(None, instead="serve the model, and ask it in a reward function.")),
        Row("datasets", only(None, [], instead="give one `dataset_name`, or an `[[orchestrator.env]]` for each.")),
        Row("dataset_streaming", only(False, None, instead="examples are drawn from all of the data.")),
        *idle("rollouts are sampled for each batch afresh", "generation_batch_size steps_per_generation"),
        *idle("see beta", "use_bias_correction_kl"),
        *idle("see sync_ref_model", "ref_model_sync_steps ref_model_mixup_alpha"),
        *idle("see vllm_importance_sampling_correction", "vllm_importance_sampling_mode vllm_importance_sampling_cap"),
        *idle("see vllm_importance_sampling_correction", "vllm_importance_sampling_clip_max"),
        *idle("see vllm_importance_sampling_correction", "vllm_importance_sampling_clip_min"),
        *idle("see eval_strategy", "eval_steps num_generations_eval eval_on_start do_eval eval_delay"),
        *idle(VLLM_SAMPLES, "use_vllm use_transformers_paged use_transformers_continuous_batching"),
        *idle(VLLM_SAMPLES, "transformers_continuous_batching_config cache_implementation"),
        *idle("trainer_gpus and inference_gpus divide the GPUs", "vllm_mode vllm_enable_sleep_mode"),
        *idle("`rl` starts the engine and finds it", "vllm_server_host vllm_server_port vllm_server_base_url"),
        *idle("`rl` starts the engine and finds it", "vllm_server_timeout vllm_group_port"),
        *idle("entropies are not needed", "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
        *idle("all rollouts are in the journal", "log_unique_prompts log_multimodal log_completions_hub_repo"),
        *idle("logprobs are taken in float32", "cast_lm_head_to_fp32"),
        *idle("weights are sent tensor by tensor", "ds3_gather_for_generation"),
        *idle("no tools: docs/environments.md has several turns", "max_tool_calling_iterations"),
        *idle("in the environment", "reward_funcs reward_weights dataset_name dataset_config"),
        *idle("in the environment", "dataset_train_split dataset_test_split"),
        *SHARED,
    )
)

EVERY_ROLE = ["assistant", "user", "system", "tool"]
TRL_SFT: tuple[Row, ...] = guarded(
    (
        Row("per_device_train_batch_size", rules.set_sft_batch),
        Row("gradient_accumulation_steps", rules.set_sft_batch),
        Row("max_steps", lambda value, table: {"max_steps": value} if value > 0 else "num_train_epochs decides"),
        Row("num_train_epochs", rules.set_sft_epochs),
        Row("max_length", "seq_len"),
        Row("max_seq_length", "seq_len", since="0.9, until 0.20"),
        Row("assistant_only_loss", lambda value, table: {"loss_on": ["assistant"] if value else EVERY_ROLE}),
        Row("completion_only_loss", only(None, True, instead="of a prompt and its completion, the latter is learned.")),
        Row("loss_type", only("nll", None, instead="the loss is the negative log-likelihood.")),
        Row("eval_strategy", lambda value, table: "no validation" if value == "no" else {}),
        Row("eval_steps", rules.every("validation_interval", "eval_strategy")),
        Row("chat_template_path", if_given("chat_template")),
        Row("truncation_mode", only("keep_start", None, instead="samples are cut at their end.")),
        *idle("rows are always packed", "packing packing_strategy padding_free eval_packing"),
        *idle(
            "in the data file", "dataset_text_field dataset_kwargs dataset_num_proc dataset_name dataset_train_split"
        ),
        *idle("each epoch has a seeded order of its own", "shuffle_dataset"),
        *idle("the tokenizer's own", "eos_token pad_token"),
        *SHARED,
    )
)
