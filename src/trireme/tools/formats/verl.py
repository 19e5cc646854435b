"""The keys of verl's PPO and GRPO configuration, and what becomes of each here. Read in verl 0.9.1, and at 0.8.

A configuration is its file, the overrides that were typed, and verl's defaults for keys that decide what is trained.
"""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path

from trireme.config.nested import nested
from trireme.config.rows.prime_rl import under
from trireme.config.rows.rules import on_gpus, only
from trireme.config.translation import Row, Settings, spread
from trireme.tools.formats import verl_rules as rules
from trireme.tools.formats.row_rules import (
    ASK_MODEL,
    HARDWARE,
    OF_DEVIATIONS,
    Table,
    if_given,
    if_kind,
    if_true,
    lora,
    of,
    set_max_norm,
    trust,
)
from trireme.tools.formats.verl_rules import ACTOR, MODE, MODEL, ROLLOUT

VERSION = "0.9.1"

_DEFAULTS = {
    **{"algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True},
    **{"data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512},
    **{"data.shuffle": True, "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "actor_rollout_ref.rollout.n": 1},
    **{"actor_rollout_ref.actor.ppo_epochs": 1, "actor_rollout_ref.actor.loss_agg_mode": "token-mean"},
    **{"actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla", "actor_rollout_ref.actor.clip_ratio": 0.2},
    **{"actor_rollout_ref.actor.clip_ratio_c": 3.0, "actor_rollout_ref.actor.use_kl_loss": False},
    **{"actor_rollout_ref.actor.entropy_coeff": 0, "actor_rollout_ref.actor.grad_clip": 1.0},
    **{"actor_rollout_ref.actor.optim.lr": 1e-6, "actor_rollout_ref.actor.optim.weight_decay": 0.01},
    **{"actor_rollout_ref.actor.optim.betas": [0.9, 0.999], "actor_rollout_ref.rollout.temperature": 1.0},
    **{"trainer.total_epochs": 30, "trainer.val_before_train": True},
    **{"actor_rollout_ref.actor.optim.lr_scheduler_type": "constant", "actor_rollout_ref.model.lora_alpha": 16},
    **{"actor_rollout_ref.model.target_modules": "all-linear", "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": 0.1},
}
DEFAULTS: Table = nested({tuple(key.split(".")): value for key, value in _DEFAULTS.items()})


PACKED = "rows are packed up to trainer.micro_batch_tokens"
SEPARATE = "trainer and engine are processes of their own; if memory is short, trainer.model.fsdp_cpu_offload"
NO_CRITIC = "there is no value network"
IN_ENVIRONMENT = "in the environment"
WRITE_ENVIRONMENT = "write an environment: docs/environments.md."

MANAGERS = only(None, "naive", "dapo", "prime", instead=f"for another, {WRITE_ENVIRONMENT}", note=IN_ENVIRONMENT)

ALGORITHM = under(
    "algorithm",
    Row("adv_estimator", rules.set_advantage, OF_DEVIATIONS),
    Row("use_kl_in_reward", only(False, None, instead="set actor.use_kl_loss, a term of the loss.")),
    Row("gamma", only(1, None, instead="rewards are not discounted.")),
    Row("filter_groups.enable", if_true("orchestrator.buffer.online_difficulty_filtering", True)),
    Row("use_pf_ppo", only(False, None, instead="[orchestrator.buffer] says what enters a batch.")),
    Row("rollout_correction.rollout_is", rules.set_correction),
    Row("rollout_correction.rollout_rs", only(None, instead="see trainer.loss.correction for masks.")),
    Row("norm_adv_by_std_in_grpo", None, "see adv_estimator"),
    Row("kl_ctrl kl_penalty", None, "see use_kl_in_reward"),
    Row("lam", None, NO_CRITIC),
    Row("filter_groups", None, "a batch is always filled"),
    Row("rollout_correction.bypass_mode", None, "see loss_mode"),
    Row("rollout_correction", None, "see rollout_is"),
)
DATA = under(
    "data",
    Row("train_batch_size", rules.set_batch, "rollouts of a mini-batch, sampled with the newest weights"),
    Row("max_prompt_length max_response_length", rules.set_lengths),
    Row("shuffle", "orchestrator.buffer.shuffle"),
    Row("seed", if_given("seed")),
    Row("apply_chat_template_kwargs", if_given("orchestrator.sampling.chat_template_kwargs")),
    Row("custom_cls.path tool_config_path", only(None, instead=WRITE_ENVIRONMENT)),
    Row("train_files val_files train_max_samples prompt_key reward_fn_key", None, IN_ENVIRONMENT),
    Row("val_max_samples", None, "see val_before_train"),
    Row("val_batch_size", None, "the engine takes all at once"),
    Row("filter_overlong_prompts truncation", None, "a prompt that does not fit costs its group"),
    Row("filter_overlong_prompts_workers", None, "prompts are not filtered"),
    Row("return_{raw_chat full_prompt raw_input_ids}", None, "messages are always kept"),
    Row("image_key video_key image_patch_size", None, "pictures are in the messages"),
    Row("dataloader_num_workers trust_remote_code use_shm validation_shuffle", None, HARDWARE),
)
OF_MODEL = under(
    MODEL,
    Row("path", lambda path, table: {"model.name": expanduser(path)}),
    Row("tokenizer_path", if_given("trainer.tokenizer.name")),
    Row("trust_remote_code", trust),
    Row("enable_gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
    Row("enable_activation_offload", "trainer.model.activation_offload"),
    Row("lora_rank lora.rank", lora("rank", *rules.RANKS)),
    Row("lora_alpha lora.alpha", lora("alpha", *rules.RANKS)),
    Row("target_modules", lora("target_modules", *rules.RANKS)),
    Row("override_config", only({}, None, instead="edit a copy of the model's config.json.")),
    Row("custom_chat_template", only(None, instead="put it into a copy of the model's folder.")),
    Row("external_lib", only(None, instead="register the model in transformers.")),
    Row("use_remove_padding use_fused_kernels use_liger use_shm fused_kernel_options tiled_mlp", None, HARDWARE),
)
OF_ACTOR = under(
    ACTOR,
    Row("ppo_mini_batch_size", rules.set_batch),
    Row("ppo_epochs", "trainer.num_iterations"),
    Row("optim.{lr weight_decay betas}", "trainer.optim.{}"),
    Row("optim.lr_warmup_steps", rules.every("trainer.scheduler.warmup_steps")),
    Row("optim.lr_warmup_steps_ratio", rules.set_warmup_share),
    Row("optim.lr_scheduler_type", if_given("trainer.scheduler.type")),
    Row("optim.warmup_style", if_given("trainer.scheduler.type"), since="until 0.7"),
    Row("optim.min_lr_ratio", rules.set_min_lr),
    Row("optim.optimizer", only("AdamW", None, instead="set trainer.optim.type.")),
    Row("optim.clip_grad grad_clip", set_max_norm),
    Row("policy_loss.loss_mode", rules.set_loss),
    Row("policy_loss.clip_cov_ratio", if_kind(MODE, {"clip_cov": "trainer.loss.cov_ratio"})),
    Row("policy_loss.clip_cov_lb", if_kind(MODE, {"clip_cov": "trainer.loss.cov_low"})),
    Row("policy_loss.clip_cov_ub", if_kind(MODE, {"clip_cov": "trainer.loss.cov_high"})),
    Row("policy_loss.kl_cov_ratio", if_kind(MODE, {"kl_cov": "trainer.loss.cov_ratio"})),
    Row("policy_loss.ppo_kl_coef", if_kind(MODE, {"kl_cov": "trainer.loss.cov_penalty"})),
    Row("loss_agg_mode", rules.set_normalize),
    Row("clip_ratio clip_ratio_low clip_ratio_high", rules.set_clip),
    Row("clip_ratio_c", rules.set_dual_clip),
    Row("tau_pos", if_kind(MODE, {"sapo": "trainer.loss.tau_pos"})),
    Row("tau_neg", if_kind(MODE, {"sapo": "trainer.loss.tau_neg"})),
    Row("use_kl_loss", rules.set_kl),
    Row("entropy_coeff", "trainer.loss.entropy_bonus"),
    Row("ulysses_sequence_parallel_size", "trainer.model.cp"),
    Row("fsdp_config.reshard_after_forward", "trainer.model.reshard_after_forward"),
    Row("optim.total_training_steps", None, "see trainer.total_training_steps"),
    Row("loss_scale_factor", None, "see loss_agg_mode"),
    Row("kl_loss_coef kl_loss_type", None, "see use_kl_loss"),
    Row("ppo_micro_batch_size_per_gpu ppo_micro_batch_size use_dynamic_bsz ppo_max_token_len_per_gpu", None, PACKED),
    Row("fsdp_config.model_dtype", None, "parameters are float32"),
    Row("fsdp_config", None, SEPARATE),
    Row("strategy megatron", None, "FSDP2 trains; trainer.model has its keys"),
    Row("shuffle", None, "a batch is one step of the optimizer"),
    Row("use_torch_compile", None, "see trainer.model.compile"),
    Row("checkpoint profiler entropy_checkpointing calculate_entropy use_fused_kernels", None, HARDWARE),
    Row("entropy_from_logits_with_chunking", None, HARDWARE),
)
OF_ROLLOUT = under(
    ROLLOUT,
    Row("n", "orchestrator.rollouts_per_example"),
    Row("temperature top_p", "orchestrator.sampling.{}"),
    Row("top_k", lambda value, table: {"orchestrator.sampling.top_k": value} if value > 0 else {}),
    Row("do_sample", only(True, None, instead="greedy rollouts of a prompt are all the same.")),
    Row("{gpu_memory_utilization max_num_seqs}", "inference.{}"),
    Row("tensor_model_parallel_size", on_gpus("inference.parallel.tp")),
    Row("max_model_len", if_given("inference.model.max_model_len")),
    Row("enforce_eager", "inference.model.enforce_eager"),
    Row("max_num_batched_tokens", if_given("inference.args.max_num_batched_tokens")),
    Row(
        "engine_kwargs.vllm", lambda args, table: {f"inference.args.{key}": each for key, each in (args or {}).items()}
    ),
    Row("multi_turn.enable", only(False, None, instead=WRITE_ENVIRONMENT)),
    Row("name engine_kwargs", None, "vLLM always samples here"),
    Row("multi_turn", None, "see multi_turn.enable"),
    Row("val_kwargs", None, "see val_before_train"),
    Row("log_prob_{micro_batch_size use_dynamic_bsz max_token_len_per_gpu}", None, PACKED),
    Row("calculate_log_probs log_prob_micro_batch_size_per_gpu", None, "logprobs are always kept"),
    Row("mode enable_chunked_prefill free_cache_engine dtype load_format enable_prefix_caching agent", None, HARDWARE),
    Row("layered_summon disable_log_stats multi_stage_wake_up checkpoint_engine", None, HARDWARE),
)
OF_TRAINER = under(
    "trainer",
    Row("total_training_steps", rules.set_steps),
    Row("total_epochs", rules.set_epochs),
    Row("save_freq", rules.every("trainer.ckpt.interval")),
    Row("max_actor_ckpt_to_keep", if_given("trainer.ckpt.keep_last")),
    Row("test_freq", rules.set_validation),
    Row("val_before_train", rules.set_base),
    Row("val_only", only(False, None, instead="evaluate with `uv run eval`.")),
    Row("experiment_name default_local_dir", rules.set_name),
    Row("logger", rules.set_logger),
    Row("n_gpus_per_node", rules.set_gpus, "half of them sample, half train"),
    Row("device", lambda value, table: {"device": value} if value in ("cpu", "cuda") else "CUDA or CPUs"),
    Row("resume_mode", lambda value, table: {"resume": True} if value == "resume_path" else "type --resume"),
    Row("resume_from_path", only(None, False, instead="type `--trainer.ckpt.resume-step N`.")),
    Row("critic_warmup max_critic_ckpt_to_keep", None, NO_CRITIC),
    Row("project_name", None, "see logger"),
    Row("nnodes", None, "several machines: their addresses go into [hosts]"),
    Row("log_val_generations rollout_data_dir validation_data_dir", None, "all rollouts are in the journal"),
    Row("balance_batch default_hdfs_dir use_legacy_worker_impl", None, HARDWARE),
    Row("ray_wait_register_center_timeout", None, rules.NO_RAY),
)
VERL = spread(
    *(ALGORITHM, DATA, OF_MODEL, OF_ACTOR, OF_ROLLOUT, OF_TRAINER),
    Row("custom_reward_function reward.custom_reward_function", rules.set_custom),
    Row("{reward_model reward}.reward_kwargs", rules.set_overlong),
    Row("reward_model.reward_manager reward_manager.name reward.reward_manager.name", MANAGERS),
    Row("reward_model.enable reward.reward_model.enable", only(False, None, instead=ASK_MODEL)),
    Row("reward_model reward reward_manager", None, "of reward models, which are served elsewhere"),
    Row("distillation.enabled", only(False, None, instead="see [orchestrator.teacher].")),
    Row("critic", None, NO_CRITIC),
    Row("actor_rollout_ref.ref", None, "the trainer computes the reference's logprobs"),
    Row("actor_rollout_ref.{hybrid_engine nccl_timeout}", None, HARDWARE),
    Row("ray_kwargs ray_init transfer_queue", None, rules.NO_RAY),
    Row("global_profiler", None, "docs/metrics.md says what is measured"),
)


def environment(table: Table) -> Settings:
    """Return the environment that reads verl's rows and calls its reward function."""
    above = ("custom_reward_function", "reward.custom_reward_function")
    tables = [found for each in above if isinstance(found := of(table, each), dict)]
    custom = {key: value for each in tables for key, value in each.items()}
    args = {
        "train_files": rules.files_of(of(table, "data.train_files")),
        "val_files": rules.files_of(of(table, "data.val_files")) if rules.evaluates(table) else [],
        "prompt_key": of(table, "data.prompt_key", "prompt"),
        "source_key": of(table, "data.reward_fn_key", "data_source"),
        "max_rows": of(table, "data.train_max_samples", -1),
    }

    # The function is loaded by the environment's worker, never here.
    if custom.get("path"):
        name, kwargs = custom.get("name") or "compute_score", custom.get("reward_kwargs") or {}
        args |= {"reward_path": rules.files_of(custom["path"])[0], "reward_name": name, "reward_kwargs": kwargs}
    return {"id": str(Path(__file__).parent / "environments" / "verl_rows.py"), "name": "verl", "args": args}
