"""The keys of TRL's `GRPOConfig`, `SFTConfig`, `ModelConfig` and `ScriptArguments`, and what becomes of each here.

Read in TRL 1.16.0 with transformers 5.19. A script, or a YAML file of `trl grpo`, is one flat table of these keys, on
top of TRL's defaults (`defaults_of`): what a key that was not given means there is set here too.
"""

from __future__ import annotations

from trireme.config.rows.rules import on_gpus, only
from trireme.config.translation import Row, spread
from trireme.tools.formats import trl_rules as rules
from trireme.tools.formats.row_rules import (
    HARDWARE,
    OF_DEVIATIONS,
    Table,
    choose,
    if_given,
    if_kind,
    if_true,
    lora,
    sampling,
    set_dtype,
    set_folder,
    set_max_norm,
    set_wandb,
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


def defaults_of(table: Table, kind: str) -> Table:
    """Return the defaults of a script or file with these keys."""
    return DEFAULTS[kind] | (LORA if table.get("use_peft") else {})


SCALED = f"{OF_DEVIATIONS}; with batch, that of the differences from the mean of each group"
LOW_BITS = "weights that are trained are not quantised; train adapters in bfloat16."

SHARED = (
    Row("model_name_or_path", rules.set_model),
    Row("model_revision", only(None, "main", instead=rules.NEWEST)),
    Row("model_init_kwargs", rules.set_model_kwargs),
    Row("trust_remote_code", trust),
    Row("attn_implementation", rules.set_attention),
    Row("dtype torch_dtype", rules.set_dtype),
    Row("use_peft", if_true("trainer.model.lora", {})),
    *(Row(f"lora_{key}", lora(key, "use_peft")) for key in ("alpha", "dropout", "modules_to_save")),
    Row("lora_r", lora("rank", "use_peft")),
    Row("use_rslora", lora("use_rslora", "use_peft")),
    Row("lora_target_modules", rules.set_targets, "if not given, PEFT's for Llama, Qwen, Mistral and Gemma"),
    Row("use_dora", only(False, None, instead="adapters are LoRA's.")),
    Row("load_in_4bit load_in_8bit", only(False, None, instead=LOW_BITS)),
    Row("learning_rate", "trainer.optim.lr"),
    Row("weight_decay", "trainer.optim.weight_decay"),
    Row("adam_beta1 adam_beta2", lambda _, table: {"trainer.optim.betas": [table[f"adam_beta{n}"] for n in (1, 2)]}),
    Row("adam_epsilon", "trainer.optim.eps"),
    Row("max_grad_norm", set_max_norm),
    Row("optim", choose("trainer.optim.type", rules.OPTIMIZERS, "AdamW is the usual one.")),
    Row("lr_scheduler_type", choose("trainer.scheduler.type", rules.SCHEDULES, "Take the nearest.")),
    Row("lr_scheduler_kwargs", rules.set_schedule_kwargs),
    Row("warmup_steps warmup_ratio", rules.every("trainer.scheduler.warmup_steps")),
    Row("num_train_epochs", rules.set_epochs),
    Row("seed", "seed"),
    Row("output_dir", set_folder),
    Row("report_to", lambda to, table: set_wandb(to, table.get("project") or "huggingface", table.get("run_name"))),
    Row("save_strategy", lambda value, table: "the last step is always saved" if value == "no" else {}),
    Row("save_steps", rules.every("trainer.ckpt.interval", "save_strategy")),
    Row("save_total_limit", if_given("trainer.ckpt.keep_last")),
    Row("resume_from_checkpoint", if_true("resume", True), "the newest; trainer.ckpt.resume_step chooses another"),
    Row("bf16", set_dtype),
    Row("fp16", only(False, None, instead="the trainer has bfloat16 and float32. Set bf16.")),
    Row("gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
    Row("torch_compile", "trainer.model.compile"),
    Row("use_cpu", if_true("device", "cpu")),
    Row("auto_find_batch_size", only(False, None, instead="`trireme plan` says what fits.")),
    Row("label_smoothing_factor neftune_noise_alpha", only(None, 0, instead="there is none here. Remove it.")),
    Row("router_aux_loss_coef", only(None, 0, instead="experts have no loss of their own. Set 0.")),
    Row("load_best_model_at_end", only(False, None, instead="`trireme export RUN --step N` takes any checkpoint.")),
    Row("num_processes", None, "a factor of the batch"),
    Row("num_examples", None, "for the steps of an epoch"),
    Row("run_name", None, "wandb.name; the run's folder is named by output_dir"),
    Row("project logging_dir trackio_space_id", None, "see report_to"),
    Row("logging_{steps first_step strategy}", None, "every step has its line and metrics"),
    Row("push_to_hub hub_{model_id token private_repo strategy}", None, "`hf upload` sends a folder of weights/"),
    Row(
        """deepspeed fsdp fsdp_config parallelism_config accelerator_config use_liger_kernel tf32 ddp_timeout
        gradient_checkpointing_kwargs torch_compile_backend torch_empty_cache_steps pad_to_multiple_of
        dataloader_{num_workers pin_memory drop_last} ddp_find_unused_parameters per_device_eval_batch_size
        activation_offloading""",
        None,
        HARDWARE,
    ),
    Row("remove_unused_columns", None, "columns are handed to reward functions"),
    Row("disable_tqdm log_level", None, "see [console]"),
    Row("data_seed", None, "`seed` decides everything random"),
    Row("metric_for_best_model greater_is_better", None, "see load_best_model_at_end"),
    Row("disable_dropout", None, "models have no dropout in training here"),
    Row("lora_task_type", None, "always a causal language model"),
)
"""Keys of transformers' `TrainingArguments` and of TRL's `ModelConfig`."""

TRL_GRPO = spread(
    Row("num_generations", "orchestrator.rollouts_per_example"),
    Row(
        "per_device_train_batch_size gradient_accumulation_steps",
        lambda _, table: {"orchestrator.batch_size": rules.batch_size(table)},
    ),
    Row("max_steps", rules.set_steps),
    Row("num_iterations", "trainer.num_iterations"),
    Row("max_completion_length", rules.set_length, f"with max_prompt_length, or {rules.ROOM} tokens"),
    Row("max_prompt_length", None, "part of seq_len; a longer prompt costs its group", since="0.9, until 0.27"),
    Row("shuffle_dataset", "orchestrator.buffer.shuffle"),
    *(Row(key, sampling(key, rules.evaluates)) for key in ("temperature", "top_p", "min_p", "repetition_penalty")),
    Row("chat_template_kwargs", sampling("chat_template_kwargs", rules.evaluates)),
    Row("top_k", sampling("top_k", rules.evaluates, off=0)),
    Row("generation_kwargs", rules.set_generation),
    Row("vllm_structured_outputs_regex", only(None, "", instead="see orchestrator.sampling.extra_body.")),
    Row("loss_type", rules.set_loss),
    Row("importance_sampling_level", rules.set_level),
    Row("epsilon", rules.set_clip),
    Row("epsilon_high", lambda value, table: {} if value is None else rules.set_clip(value, table)),
    Row("delta", if_given("trainer.loss.dual_clip")),
    *(Row(f"sapo_temperature_{x}", if_kind("loss_type", {"sapo": f"trainer.loss.tau_{x}"})) for x in ("pos", "neg")),
    *(
        Row(f"vespo_{key}", if_kind("loss_type", {"vespo": f"trainer.loss.{key}"}))
        for key in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")
    ),
    Row("beta", rules.set_beta, "with use_bias_correction_kl, k2: the same gradient in expectation"),
    Row("sync_ref_model", rules.set_sync),
    Row("entropy_coef", "trainer.loss.entropy_bonus"),
    Row("use_adaptive_entropy", only(False, None, instead="the bonus is constant. Set entropy_coef alone.")),
    Row("top_entropy_quantile", only(1, None, instead='all tokens train. Write a loss: type = "custom".')),
    Row("off_policy_mask_threshold", only(None, instead='see trainer.loss.correction = "geometric_mask".')),
    Row("vllm_importance_sampling_correction", rules.set_correction, "as TRL has it with vLLM"),
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
    Row("generation_batch_size steps_per_generation", None, "rollouts are sampled for each batch afresh"),
    Row("use_bias_correction_kl", None, "see beta"),
    Row("ref_model_{sync_steps mixup_alpha}", None, "see sync_ref_model"),
    Row("vllm_importance_sampling_{mode cap clip_max clip_min}", None, "see vllm_importance_sampling_correction"),
    Row("eval_steps num_generations_eval eval_on_start do_eval eval_delay", None, "see eval_strategy"),
    Row(
        """use_vllm use_transformers_paged use_transformers_continuous_batching
        transformers_continuous_batching_config cache_implementation""",
        None,
        "vLLM always samples here",
    ),
    Row("vllm_mode vllm_enable_sleep_mode", None, "trainer_gpus and inference_gpus divide the GPUs"),
    Row("vllm_server_{host port base_url timeout} vllm_group_port", None, "`rl` starts the engine and finds it"),
    Row("entropy_coef_{min max delta} entropy_target", None, "entropies are not needed"),
    Row("log_unique_prompts log_multimodal log_completions_hub_repo", None, "all rollouts are in the journal"),
    Row("cast_lm_head_to_fp32", None, "logprobs are taken in float32"),
    Row("ds3_gather_for_generation", None, "weights are sent tensor by tensor"),
    Row("max_tool_calling_iterations", None, "no tools: docs/environments.md has several turns"),
    Row("reward_{funcs weights} dataset_{name config train_split test_split}", None, "in the environment"),
    SHARED,
)

EVERY_ROLE = ["assistant", "user", "system", "tool"]
TRL_SFT = spread(
    Row(
        "per_device_train_batch_size gradient_accumulation_steps",
        lambda _, table: {"batch_size": rules.completions_per_update(table)},
    ),
    Row("max_steps", lambda value, table: {"max_steps": value} if value > 0 else "num_train_epochs decides"),
    Row("max_length", "seq_len"),
    Row("max_seq_length", "seq_len", since="0.9, until 0.20"),
    Row("assistant_only_loss", lambda value, table: {"loss_on": ["assistant"] if value else EVERY_ROLE}),
    Row("completion_only_loss", only(None, True, instead="of a prompt and its completion, the latter is learned.")),
    Row("loss_type", only("nll", None, instead="the loss is the negative log-likelihood.")),
    Row("eval_strategy", lambda value, table: "no validation" if value == "no" else {}),
    Row("eval_steps", rules.every("validation_interval", "eval_strategy")),
    Row("chat_template_path", if_given("chat_template")),
    Row("truncation_mode", only("keep_start", None, instead="samples are cut at their end.")),
    Row("packing packing_strategy padding_free eval_packing", None, "rows are always packed"),
    Row("dataset_{text_field kwargs num_proc name train_split}", None, "in the data file"),
    Row("shuffle_dataset", None, "each epoch has a seeded order of its own"),
    Row("eos_token pad_token", None, "the tokenizer's own"),
    SHARED,
)
