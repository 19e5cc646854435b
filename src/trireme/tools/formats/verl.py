"""The keys of verl's PPO and GRPO configuration, and what becomes of each here. Read in verl 0.9.1, and at 0.8.

A configuration is its file, the overrides that were typed, and verl's defaults for keys that decide what is trained.
"""

from __future__ import annotations

from pathlib import Path

from trireme.config.rows.rules import on_gpus
from trireme.config.translation import Row, Settings, nested
from trireme.tools.formats import verl_rules as rules
from trireme.tools.formats.row_rules import (
    ASK_MODEL,
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
from trireme.tools.formats.verl_rules import ACTOR, MODEL, ROLLOUT

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
WRITE_ENVIRONMENT = "write an environment: docs/environments.md."

VERL: tuple[Row, ...] = guarded(
    (
        Row("algorithm.adv_estimator", rules.set_advantage, OF_DEVIATIONS),
        Row("algorithm.use_kl_in_reward", only(False, None, instead="set actor.use_kl_loss, a term of the loss.")),
        Row("algorithm.gamma", only(1, None, instead="rewards are not discounted.")),
        Row("algorithm.filter_groups.enable", if_true("orchestrator.buffer.online_difficulty_filtering", True)),
        Row("algorithm.use_pf_ppo", only(False, None, instead="[orchestrator.buffer] says what enters a batch.")),
        Row("algorithm.rollout_correction.rollout_is", rules.set_correction),
        Row("algorithm.rollout_correction.rollout_rs", only(None, instead="see trainer.loss.correction for masks.")),
        *idle("see adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
        *idle("see use_kl_in_reward", "algorithm.kl_ctrl algorithm.kl_penalty"),
        *idle(NO_CRITIC, "algorithm.lam critic trainer.critic_warmup trainer.max_critic_ckpt_to_keep"),
        *idle("a batch is always filled", "algorithm.filter_groups"),
        *idle("see loss_mode", "algorithm.rollout_correction.bypass_mode"),
        *idle("see rollout_is", "algorithm.rollout_correction"),
        Row("data.train_batch_size", rules.set_batch, "rollouts of a mini-batch, sampled with the newest weights"),
        Row("data.max_prompt_length", rules.set_lengths),
        Row("data.max_response_length", rules.set_lengths),
        Row("data.shuffle", "orchestrator.buffer.shuffle"),
        Row("data.seed", if_given("seed")),
        Row("data.apply_chat_template_kwargs", if_given("orchestrator.sampling.chat_template_kwargs")),
        Row("data.custom_cls.path", only(None, instead=WRITE_ENVIRONMENT)),
        Row("data.tool_config_path", only(None, instead=WRITE_ENVIRONMENT)),
        Row("custom_reward_function", rules.set_custom),
        Row("reward.custom_reward_function", rules.set_custom, since="0.9"),
        *idle("in the environment", "data.train_files data.val_files data.train_max_samples data.prompt_key"),
        *idle("in the environment", "data.reward_fn_key"),
        *idle("see val_before_train", "data.val_max_samples actor_rollout_ref.rollout.val_kwargs"),
        *idle("the engine takes all at once", "data.val_batch_size"),
        *idle("a prompt that does not fit costs its group", "data.filter_overlong_prompts data.truncation"),
        *idle("prompts are not filtered", "data.filter_overlong_prompts_workers"),
        *idle("messages are always kept", "data.return_raw_chat data.return_full_prompt data.return_raw_input_ids"),
        *idle("pictures are in the messages", "data.image_key data.video_key data.image_patch_size"),
        *idle(HARDWARE, "data.dataloader_num_workers data.trust_remote_code data.use_shm data.validation_shuffle"),
        Row(f"{MODEL}.path", rules.set_model),
        Row(f"{MODEL}.tokenizer_path", if_given("trainer.tokenizer.name")),
        Row(f"{MODEL}.trust_remote_code", trust),
        Row(f"{MODEL}.enable_gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
        Row(f"{MODEL}.enable_activation_offload", "trainer.model.activation_offload"),
        Row(f"{MODEL}.lora_rank", rules.set_lora("rank")),
        Row(f"{MODEL}.lora_alpha", rules.set_lora("alpha")),
        Row(f"{MODEL}.lora.rank", rules.set_lora("rank"), since="0.8"),
        Row(f"{MODEL}.lora.alpha", rules.set_lora("alpha"), since="0.8"),
        Row(f"{MODEL}.target_modules", rules.set_lora("target_modules")),
        Row(f"{MODEL}.override_config", only({}, None, instead="edit a copy of the model's config.json.")),
        Row(f"{MODEL}.custom_chat_template", only(None, instead="put it into a copy of the model's folder.")),
        Row(f"{MODEL}.external_lib", only(None, instead="register the model in transformers.")),
        *idle(HARDWARE, f"{MODEL}.use_remove_padding {MODEL}.use_fused_kernels {MODEL}.use_liger {MODEL}.use_shm"),
        *idle(HARDWARE, f"{MODEL}.fused_kernel_options {MODEL}.tiled_mlp"),
        Row(f"{ACTOR}.ppo_mini_batch_size", rules.set_batch),
        Row(f"{ACTOR}.ppo_epochs", "trainer.num_iterations"),
        Row(f"{ACTOR}.optim.lr", "trainer.optim.lr"),
        Row(f"{ACTOR}.optim.weight_decay", "trainer.optim.weight_decay"),
        Row(f"{ACTOR}.optim.betas", "trainer.optim.betas"),
        Row(f"{ACTOR}.optim.lr_warmup_steps", rules.every("trainer.scheduler.warmup_steps")),
        Row(f"{ACTOR}.optim.lr_warmup_steps_ratio", rules.set_warmup_share),
        Row(f"{ACTOR}.optim.lr_scheduler_type", if_given("trainer.scheduler.type")),
        Row(f"{ACTOR}.optim.warmup_style", if_given("trainer.scheduler.type"), since="until 0.7"),
        Row(f"{ACTOR}.optim.min_lr_ratio", rules.set_min_lr),
        Row(f"{ACTOR}.optim.optimizer", only("AdamW", None, instead="set trainer.optim.type.")),
        Row(f"{ACTOR}.optim.clip_grad", set_max_norm),
        Row(f"{ACTOR}.grad_clip", set_max_norm),
        Row(f"{ACTOR}.policy_loss.loss_mode", rules.set_loss),
        Row(f"{ACTOR}.policy_loss.clip_cov_ratio", rules.if_mode({"clip_cov": "trainer.loss.cov_ratio"})),
        Row(f"{ACTOR}.policy_loss.clip_cov_lb", rules.if_mode({"clip_cov": "trainer.loss.cov_low"})),
        Row(f"{ACTOR}.policy_loss.clip_cov_ub", rules.if_mode({"clip_cov": "trainer.loss.cov_high"})),
        Row(f"{ACTOR}.policy_loss.kl_cov_ratio", rules.if_mode({"kl_cov": "trainer.loss.cov_ratio"})),
        Row(f"{ACTOR}.policy_loss.ppo_kl_coef", rules.if_mode({"kl_cov": "trainer.loss.cov_penalty"})),
        Row(f"{ACTOR}.loss_agg_mode", rules.set_normalize),
        Row(f"{ACTOR}.clip_ratio", rules.set_clip),
        Row(f"{ACTOR}.clip_ratio_low", rules.set_clip),
        Row(f"{ACTOR}.clip_ratio_high", rules.set_clip),
        Row(f"{ACTOR}.clip_ratio_c", rules.set_dual_clip),
        Row(f"{ACTOR}.tau_pos", rules.if_mode({"sapo": "trainer.loss.tau_pos"})),
        Row(f"{ACTOR}.tau_neg", rules.if_mode({"sapo": "trainer.loss.tau_neg"})),
        Row(f"{ACTOR}.use_kl_loss", rules.set_kl),
        Row(f"{ACTOR}.entropy_coeff", "trainer.loss.entropy_bonus"),
        Row(f"{ACTOR}.ulysses_sequence_parallel_size", "trainer.model.cp"),
        Row(f"{ACTOR}.fsdp_config.reshard_after_forward", "trainer.model.reshard_after_forward"),
        *idle("see trainer.total_training_steps", f"{ACTOR}.optim.total_training_steps"),
        *idle("see loss_agg_mode", f"{ACTOR}.loss_scale_factor"),
        *idle("see use_kl_loss", f"{ACTOR}.kl_loss_coef {ACTOR}.kl_loss_type"),
        *idle(PACKED, f"{ACTOR}.ppo_micro_batch_size_per_gpu {ACTOR}.ppo_micro_batch_size {ACTOR}.use_dynamic_bsz"),
        *idle(PACKED, f"{ACTOR}.ppo_max_token_len_per_gpu {ROLLOUT}.log_prob_micro_batch_size"),
        *idle(PACKED, f"{ROLLOUT}.log_prob_use_dynamic_bsz {ROLLOUT}.log_prob_max_token_len_per_gpu"),
        *idle("logprobs are always kept", f"{ROLLOUT}.calculate_log_probs {ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        *idle("parameters are float32", f"{ACTOR}.fsdp_config.model_dtype"),
        *idle(SEPARATE, f"{ACTOR}.fsdp_config"),
        *idle("FSDP2 trains; trainer.model has its keys", f"{ACTOR}.strategy {ACTOR}.megatron"),
        *idle("a batch is one step of the optimizer", f"{ACTOR}.shuffle"),
        *idle("see trainer.model.compile", f"{ACTOR}.use_torch_compile"),
        *idle(HARDWARE, f"{ACTOR}.checkpoint {ACTOR}.profiler {ACTOR}.entropy_checkpointing {ACTOR}.calculate_entropy"),
        *idle(HARDWARE, f"{ACTOR}.entropy_from_logits_with_chunking {ACTOR}.use_fused_kernels"),
        *idle("the trainer computes the reference's logprobs", "actor_rollout_ref.ref"),
        Row(f"{ROLLOUT}.n", "orchestrator.rollouts_per_example"),
        Row(f"{ROLLOUT}.temperature", "orchestrator.sampling.temperature"),
        Row(f"{ROLLOUT}.top_p", "orchestrator.sampling.top_p"),
        Row(f"{ROLLOUT}.top_k", lambda value, table: {"orchestrator.sampling.top_k": value} if value > 0 else {}),
        Row(f"{ROLLOUT}.do_sample", only(True, None, instead="greedy rollouts of a prompt are all the same.")),
        Row(f"{ROLLOUT}.gpu_memory_utilization", "inference.gpu_memory_utilization"),
        Row(f"{ROLLOUT}.tensor_model_parallel_size", on_gpus("inference.parallel.tp")),
        Row(f"{ROLLOUT}.max_num_seqs", "inference.max_num_seqs"),
        Row(f"{ROLLOUT}.max_model_len", if_given("inference.model.max_model_len")),
        Row(f"{ROLLOUT}.enforce_eager", "inference.model.enforce_eager"),
        Row(f"{ROLLOUT}.max_num_batched_tokens", if_given("inference.args.max_num_batched_tokens")),
        Row(f"{ROLLOUT}.engine_kwargs.vllm", rules.set_vllm),
        Row(f"{ROLLOUT}.multi_turn.enable", only(False, None, instead=WRITE_ENVIRONMENT)),
        *idle("vLLM always samples here", f"{ROLLOUT}.name {ROLLOUT}.engine_kwargs"),
        *idle("see multi_turn.enable", f"{ROLLOUT}.multi_turn"),
        *idle(HARDWARE, f"{ROLLOUT}.mode {ROLLOUT}.enable_chunked_prefill {ROLLOUT}.free_cache_engine {ROLLOUT}.dtype"),
        *idle(
            HARDWARE, f"{ROLLOUT}.load_format {ROLLOUT}.enable_prefix_caching {ROLLOUT}.agent {ROLLOUT}.layered_summon"
        ),
        *idle(HARDWARE, f"{ROLLOUT}.disable_log_stats {ROLLOUT}.multi_stage_wake_up {ROLLOUT}.checkpoint_engine"),
        *idle(HARDWARE, "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout"),
        Row("reward_model.enable", only(False, None, instead=ASK_MODEL)),
        Row("reward.reward_model.enable", only(False, None, instead=ASK_MODEL), since="0.9"),
        Row("reward_model.reward_kwargs", rules.set_overlong),
        Row("reward.reward_kwargs", rules.set_overlong, since="0.9"),
        Row("reward_model.reward_manager", rules.set_manager),
        Row("reward_manager.name", rules.set_manager, since="0.8"),
        Row("reward.reward_manager.name", rules.set_manager, since="0.9"),
        *idle("of reward models, which are served elsewhere", "reward_model reward reward_manager"),
        Row("trainer.total_training_steps", rules.set_steps),
        Row("trainer.total_epochs", rules.set_epochs),
        Row("trainer.save_freq", rules.every("trainer.ckpt.interval")),
        Row("trainer.max_actor_ckpt_to_keep", if_given("trainer.ckpt.keep_last")),
        Row("trainer.test_freq", rules.set_validation),
        Row("trainer.val_before_train", rules.set_base),
        Row("trainer.val_only", only(False, None, instead="evaluate with `uv run eval`.")),
        Row("trainer.experiment_name", rules.set_name),
        Row("trainer.default_local_dir", rules.set_name),
        Row("trainer.logger", rules.set_logger),
        Row("trainer.n_gpus_per_node", rules.set_gpus, "half of them sample, half train"),
        Row("trainer.device", lambda value, table: {"device": value} if value in ("cpu", "cuda") else "CUDA or CPUs"),
        Row(
            "trainer.resume_mode", lambda value, table: {"resume": True} if value == "resume_path" else "type --resume"
        ),
        Row("trainer.resume_from_path", only(None, False, instead="type `--trainer.ckpt.resume-step N`.")),
        Row("distillation.enabled", only(False, None, instead="see [orchestrator.teacher].")),
        *idle("see logger", "trainer.project_name"),
        *idle("several machines: their addresses go into [hosts]", "trainer.nnodes"),
        *idle("all rollouts are in the journal", "trainer.log_val_generations trainer.rollout_data_dir"),
        *idle("all rollouts are in the journal", "trainer.validation_data_dir"),
        *idle(HARDWARE, "trainer.balance_batch trainer.default_hdfs_dir trainer.use_legacy_worker_impl"),
        *idle("there is no Ray", "ray_kwargs ray_init transfer_queue trainer.ray_wait_register_center_timeout"),
        *idle("docs/metrics.md says what is measured", "global_profiler"),
    )
)


def environment(table: Table) -> Settings:
    """Return the environment that reads verl's rows and calls its reward function."""
    above = ("custom_reward_function", "reward.custom_reward_function")
    tables = [found for each in above if isinstance(found := rules.of(table, each), dict)]
    custom = {key: value for each in tables for key, value in each.items()}
    args = {
        "train_files": rules.files_of(rules.of(table, "data.train_files")),
        "val_files": rules.files_of(rules.of(table, "data.val_files")) if rules.evaluates(table) else [],
        "prompt_key": rules.of(table, "data.prompt_key", "prompt"),
        "source_key": rules.of(table, "data.reward_fn_key", "data_source"),
        "max_rows": rules.of(table, "data.train_max_samples", -1),
    }

    # The function is loaded by the environment's worker, never here.
    if custom.get("path"):
        name, kwargs = custom.get("name") or "compute_score", custom.get("reward_kwargs") or {}
        args |= {"reward_path": rules.files_of(custom["path"])[0], "reward_name": name, "reward_kwargs": kwargs}
    return {"id": str(Path(__file__).parent / "environments" / "verl_rows.py"), "name": "verl", "args": args}
