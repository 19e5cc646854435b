"""The keys of verl's PPO and GRPO configuration, and what becomes of each here. Read in verl 0.9.1, and at 0.8.

A configuration is its file, the overrides that were typed, and verl's defaults for keys that decide what is trained.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from trireme.config.rows.machine import has_gpus
from trireme.config.rows.rules import NO_GPU, on_gpus
from trireme.config.section import NONE
from trireme.config.translation import Refused, Row, Rule, Settings, nested, value_at
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
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
}
DEFAULTS: Table = nested({tuple(key.split(".")): value for key, value in _DEFAULTS.items()})

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def of(table: Table, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key of theirs."""
    return value_at(table, tuple(key.split(".")), default)


# Batches and steps. verl counts prompts, and splits a batch into mini-batches with a step of the optimizer for each.


def updates_per_step(table: Table) -> int:
    """Return the mini-batches of one of verl's steps, each of which is a batch of its own here."""
    whole, mini = of(table, "data.train_batch_size"), of(table, f"{ACTOR}.ppo_mini_batch_size")
    return int(max(1, whole // mini))


def set_batch(value: Any, table: Table) -> Settings | str:
    whole, mini = of(table, "data.train_batch_size"), of(table, f"{ACTOR}.ppo_mini_batch_size")
    return {"orchestrator.batch_size": min(whole, mini) * of(table, f"{ROLLOUT}.n")}


def total_steps(table: Table) -> int | None:
    """Return verl's steps; None if they depend on files that cannot be read."""
    if steps := of(table, "trainer.total_training_steps"):
        return int(steps)
    if (rows := num_rows(table)) is None:
        return None
    return max(1, rows // of(table, "data.train_batch_size")) * int(of(table, "trainer.total_epochs"))


def num_rows(table: Table) -> int | None:
    """Return the number of training rows, by the heads of the files."""
    from pyarrow.parquet import read_metadata  # 0.2 s

    most = of(table, "data.train_max_samples", -1)
    try:
        rows = sum(read_metadata(file).num_rows for file in files_of(of(table, "data.train_files")))
    except (OSError, ValueError):
        return None
    return min(rows, most) if most > 0 else rows


def files_of(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value] if value else []
    return [str(Path(str(file)).expanduser()) for file in listed]


def set_steps(value: Any, table: Table) -> Settings | str:
    if value is None:
        return "total_epochs decides"
    return {"max_steps": value * updates_per_step(table)}


def set_epochs(value: Any, table: Table) -> Settings | str:
    if of(table, "trainer.total_training_steps"):
        return "total_training_steps decides"
    if (steps := total_steps(table)) is None:
        raise Refused(
            f"the steps of an epoch depend on data.train_files = {of(table, 'data.train_files')}, which cannot be read "
            "here. Correct the path, or give trainer.total_training_steps."
        )
    return {"max_steps": steps * updates_per_step(table)}


def every(ours: str) -> Rule:
    return lambda value, table: {ours: value * updates_per_step(table)} if value and value > 0 else {}


def set_warmup_share(value: float, table: Table) -> Settings | str:
    if not value or of(table, f"{ACTOR}.optim.lr_warmup_steps", -1) > 0:
        return {}
    steps = total_steps(table)
    return "" if steps is None else {"trainer.scheduler.warmup_steps": int(value * steps) * updates_per_step(table)}


# The algorithm.

ADVANTAGES = {
    **{"grpo": "group_mean_std", "grpo_vectorized": "group_mean_std", "rloo": "leave_one_out"},
    **{"rloo_vectorized": "leave_one_out", "reinforce_plus_plus": "batch"},
    "reinforce_plus_plus_baseline": "group_batch",
}


def set_advantage(value: str, table: Table) -> Settings | str:
    plain = str(value).rpartition(".")[2].lower()
    if plain not in ADVANTAGES:
        nearest = "there is no value network. " if plain == "gae" else ""
        raise Refused(
            f"{nearest}Expected one of {', '.join(ADVANTAGES)}. The nearest is `algorithm.adv_estimator=grpo "
            "actor_rollout_ref.rollout.n=8`, which compares rollouts of a prompt with one another."
        )
    kind = ADVANTAGES[plain]
    if plain.startswith("grpo") and not of(table, "algorithm.norm_adv_by_std_in_grpo"):
        kind = "group_mean"
    return {"orchestrator.advantage.type": kind}


LOSSES = {
    **{"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce", "sapo": "sapo", "geo_mean": "gmpo"},
    **{"dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl"},
}
NORMALISATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}


def set_loss(value: str, table: Table) -> Settings | str:
    if value not in LOSSES:
        raise Refused(f"expected one of {', '.join(LOSSES)}. docs/algorithms.md lists the losses that there are.")
    proximal = {} if value in ("gpg", "dppo_tv", "dppo_kl") else {"trainer.loss.proximal": "recomputed"}
    if of(table, "algorithm.rollout_correction.bypass_mode"):
        proximal = {"trainer.loss.proximal": "behaviour"}
    return {"trainer.loss.type": LOSSES[value], **proximal}


def set_normalize(value: str, table: Table) -> Settings | str:
    if value not in NORMALISATIONS:
        raise Refused(f"expected one of {', '.join(NORMALISATIONS)}. Take the nearest.")
    made: Settings = {"trainer.loss.normalize": NORMALISATIONS[value]}
    if value == "seq-mean-token-sum-norm":
        length = of(table, f"{ACTOR}.loss_scale_factor") or of(table, "data.max_response_length")
        made["trainer.loss.normalize_length"] = length
    return made


def set_clip(value: Any, table: Table) -> Settings | str:
    mode, both = of(table, f"{ACTOR}.policy_loss.loss_mode"), of(table, f"{ACTOR}.clip_ratio")
    low, high = (of(table, f"{ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    bounds = ("mask_low", "mask_high") if mode in ("dppo_tv", "dppo_kl") else ("clip_low", "clip_high")
    if mode in ("gpg", "sapo"):
        return f"{mode} does not clip"
    return {f"trainer.loss.{key}": each for key, each in zip(bounds, (low, high), strict=True)}


def set_dual_clip(value: float, table: Table) -> Settings | str:
    mode = of(table, f"{ACTOR}.policy_loss.loss_mode")
    if mode == "vanilla":
        return {"trainer.loss.dual_clip": value}
    return {"trainer.loss.max_importance_ratio": value} if mode.startswith("dppo") else f"not with {mode}"


def if_mode(mode: str, ours: str) -> Rule:
    return lambda value, table: (
        {ours: value} if of(table, f"{ACTOR}.policy_loss.loss_mode") == mode else f"only with loss_mode = {mode}"
    )


ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def set_kl(value: bool, table: Table) -> Settings | str:
    if not value:
        return {"trainer.loss.beta": 0.0}
    kind = of(table, f"{ACTOR}.kl_loss_type", "low_var_kl")
    if kind.removesuffix("+") not in ESTIMATORS:
        raise Refused(f"kl_loss_type = {kind} - expected one of {', '.join(ESTIMATORS)}. Take low_var_kl.")
    estimator = "k2" if kind.endswith("+") else ESTIMATORS[kind]
    weight = of(table, f"{ACTOR}.kl_loss_coef", 0.001)
    return {"trainer.loss.beta": weight, **({"trainer.loss.kl_estimator": estimator} if weight else {})}


def set_correction(value: Any, table: Table) -> Settings | str:
    if value in (None, "null"):
        return "none"
    if value not in ("token", "sequence"):
        raise Refused("expected null, token or sequence. Take one of them.")
    bound = of(table, "algorithm.rollout_correction.rollout_is_threshold", 2.0)
    if not isinstance(bound, int | float):
        raise Refused(f"rollout_is_threshold = {bound} - expected a number. Write it, or set trainer.loss.correction.")
    return {"trainer.loss.correction": f"{value}_truncate", "trainer.loss.correction_high": bound}


# Sampling, evaluation, the run.


def set_validation(value: Any, table: Table) -> Settings | str:
    if not value or value < 0 or not evaluates(table):
        return "no evaluation while it trains"
    return {"orchestrator.eval.interval": value * updates_per_step(table)}


def evaluates(table: Table) -> bool:
    """Return whether the run evaluates. A frequency that is no number is refused by its own row."""
    often = of(table, "trainer.test_freq", -1)
    is_regular = isinstance(often, int) and often > 0
    return bool(of(table, "data.val_files")) and (is_regular or bool(of(table, "trainer.val_before_train")))


def set_base(value: bool, table: Table) -> Settings | str:
    if not evaluates(table):
        return "no evaluation"
    most = of(table, "data.val_max_samples", -1)
    own = of(table, f"{ROLLOUT}.val_kwargs", {})
    samples = own.get("do_sample", False)
    return {
        "orchestrator.eval.eval_base": value,
        "orchestrator.eval.num_examples": most if most > 0 else NONE,
        "orchestrator.eval.rollouts_per_example": own.get("n", 1),
        "orchestrator.eval.sampling.temperature": own.get("temperature", 0) if samples else 0.0,
        **({"orchestrator.eval.sampling.top_p": own["top_p"]} if samples and "top_p" in own else {}),
        **({"orchestrator.eval.sampling.top_k": own["top_k"]} if samples and own.get("top_k", -1) > 0 else {}),
    }


def set_lengths(value: int, table: Table) -> Settings | str:
    answer = of(table, "data.max_response_length")
    return {"seq_len": of(table, "data.max_prompt_length") + answer, "orchestrator.sampling.max_tokens": answer}


def set_overlong(value: Any, table: Table) -> Settings | str:
    """DAPO's soft punishment of long answers, which the reward manager `dapo` has."""
    for above in ("reward_model", "reward"):
        kwargs = of(table, f"{above}.reward_kwargs", {})
        buffer = kwargs.get("overlong_buffer_cfg", {})
        if buffer.get("enable"):
            longest = kwargs.get("max_resp_len") or of(table, "data.max_response_length")
            penalty = {"buffer": buffer.get("len"), "max_length": longest, "weight": buffer.get("penalty_factor", 1.0)}
            return {f"orchestrator.length_penalty.{key}": each for key, each in penalty.items()}
    return {}


def set_manager(value: Any, table: Table) -> Settings | str:
    if value not in (None, "naive", "dapo", "prime"):
        raise Refused("expected naive, dapo or prime. Write an environment for another one: docs/environments.md.")
    return "in the environment"


def set_logger(value: Any, table: Table) -> Settings | str:
    listed = [value] if isinstance(value, str) else list(value or ())
    if "wandb" not in listed:
        return "metrics are in the run's folder, and on its dashboard"
    name = of(table, "trainer.experiment_name")
    return {"wandb.project": of(table, "trainer.project_name", "verl_examples"), "wandb.name": name or NONE}


def set_name(value: Any, table: Table) -> Settings | str:
    if folder := of(table, "trainer.default_local_dir"):
        return {"name": PurePath(folder).name, "output_dir": str(PurePath(folder).parent)}
    return {"name": value}


def set_gpus(value: int, table: Table) -> Settings | str:
    """verl's GPUs take turns at sampling and training; here each has one of the two."""
    if not has_gpus():
        return NO_GPU
    if of(table, "trainer.nnodes", 1) > 1:
        return "several machines: their addresses go into [hosts]"
    if value == 1:
        return {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}
    tp = of(table, f"{ROLLOUT}.tensor_model_parallel_size", 1)
    engines = max(1, value // 2 // tp) * tp
    return {"inference_gpus": engines, "trainer_gpus": value - engines}


def set_lora(key: str) -> Rule:
    def rule(value: Any, table: Table) -> Settings | str:
        rank = of(table, f"{MODEL}.lora_rank") or of(table, f"{MODEL}.lora.rank")
        if not rank:
            return "lora_rank = 0"
        return {f"trainer.model.lora.{key}": [value] if key == "target_modules" and isinstance(value, str) else value}

    return rule


def set_model(value: str, table: Table) -> Settings | str:
    return {"model.name": str(Path(value).expanduser()) if value.startswith("~") else value}


def set_min_lr(value: float, table: Table) -> Settings | str:
    return {"trainer.scheduler.min_lr": value * of(table, f"{ACTOR}.optim.lr")} if value else {}


def set_vllm(value: Any, table: Table) -> Settings | str:
    return {f"inference.args.{key}": each for key, each in (value or {}).items()}


PACKED = "rows are packed up to trainer.micro_batch_tokens"
SEPARATE = "trainer and engine are processes of their own; if memory is short, trainer.model.fsdp_cpu_offload"
NO_CRITIC = "there is no value network"
WRITE_ENVIRONMENT = "write an environment: docs/environments.md."

VERL: tuple[Row, ...] = guarded(
    (
        Row("algorithm.adv_estimator", set_advantage, OF_DEVIATIONS),
        Row("algorithm.use_kl_in_reward", only(False, None, instead="set actor.use_kl_loss, a term of the loss.")),
        Row("algorithm.gamma", only(1, None, instead="rewards are not discounted.")),
        Row("algorithm.filter_groups.enable", if_true("orchestrator.buffer.online_difficulty_filtering", True)),
        Row("algorithm.use_pf_ppo", only(False, None, instead="[orchestrator.buffer] says what enters a batch.")),
        Row("algorithm.rollout_correction.rollout_is", set_correction),
        Row("algorithm.rollout_correction.rollout_rs", only(None, instead="see trainer.loss.correction for masks.")),
        *idle("see adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
        *idle("see use_kl_in_reward", "algorithm.kl_ctrl algorithm.kl_penalty"),
        *idle(NO_CRITIC, "algorithm.lam critic trainer.critic_warmup trainer.max_critic_ckpt_to_keep"),
        *idle("a batch is always filled", "algorithm.filter_groups"),
        *idle("see loss_mode", "algorithm.rollout_correction.bypass_mode"),
        *idle("see rollout_is", "algorithm.rollout_correction"),
        Row("data.train_batch_size", set_batch, "rollouts of a mini-batch, sampled with the newest weights"),
        Row("data.max_prompt_length", set_lengths),
        Row("data.max_response_length", set_lengths),
        Row("data.shuffle", "orchestrator.buffer.shuffle"),
        Row("data.seed", if_given("seed")),
        Row("data.apply_chat_template_kwargs", if_given("orchestrator.sampling.chat_template_kwargs")),
        Row("data.custom_cls.path", only(None, instead=WRITE_ENVIRONMENT)),
        Row("data.tool_config_path", only(None, instead=WRITE_ENVIRONMENT)),
        *idle("in the environment", "data.train_files data.val_files data.train_max_samples data.prompt_key"),
        *idle("in the environment", "data.reward_fn_key custom_reward_function reward.custom_reward_function"),
        *idle("see val_before_train", "data.val_max_samples actor_rollout_ref.rollout.val_kwargs"),
        *idle("the engine takes all at once", "data.val_batch_size"),
        *idle("a prompt that does not fit costs its group", "data.filter_overlong_prompts data.truncation"),
        *idle("prompts are not filtered", "data.filter_overlong_prompts_workers"),
        *idle("messages are always kept", "data.return_raw_chat data.return_full_prompt data.return_raw_input_ids"),
        *idle("pictures are in the messages", "data.image_key data.video_key data.image_patch_size"),
        *idle(HARDWARE, "data.dataloader_num_workers data.trust_remote_code data.use_shm data.validation_shuffle"),
        Row(f"{MODEL}.path", set_model),
        Row(f"{MODEL}.tokenizer_path", if_given("trainer.tokenizer.name")),
        Row(f"{MODEL}.trust_remote_code", trust),
        Row(f"{MODEL}.enable_gradient_checkpointing", if_true("trainer.model.ac.freq", 1)),
        Row(f"{MODEL}.enable_activation_offload", "trainer.model.activation_offload"),
        Row(f"{MODEL}.lora_rank", set_lora("rank")),
        Row(f"{MODEL}.lora_alpha", set_lora("alpha")),
        Row(f"{MODEL}.lora.rank", set_lora("rank"), since="0.8"),
        Row(f"{MODEL}.lora.alpha", set_lora("alpha"), since="0.8"),
        Row(f"{MODEL}.target_modules", set_lora("target_modules")),
        Row(f"{MODEL}.override_config", only({}, None, instead="edit a copy of the model's config.json.")),
        Row(f"{MODEL}.custom_chat_template", only(None, instead="put it into a copy of the model's folder.")),
        Row(f"{MODEL}.external_lib", only(None, instead="register the model in transformers.")),
        *idle(HARDWARE, f"{MODEL}.use_remove_padding {MODEL}.use_fused_kernels {MODEL}.use_liger {MODEL}.use_shm"),
        *idle(HARDWARE, f"{MODEL}.fused_kernel_options {MODEL}.tiled_mlp"),
        Row(f"{ACTOR}.ppo_mini_batch_size", set_batch),
        Row(f"{ACTOR}.ppo_epochs", "trainer.num_iterations"),
        Row(f"{ACTOR}.optim.lr", "trainer.optim.lr"),
        Row(f"{ACTOR}.optim.weight_decay", "trainer.optim.weight_decay"),
        Row(f"{ACTOR}.optim.betas", "trainer.optim.betas"),
        Row(f"{ACTOR}.optim.lr_warmup_steps", every("trainer.scheduler.warmup_steps")),
        Row(f"{ACTOR}.optim.lr_warmup_steps_ratio", set_warmup_share),
        Row(f"{ACTOR}.optim.lr_scheduler_type", if_given("trainer.scheduler.type")),
        Row(f"{ACTOR}.optim.warmup_style", if_given("trainer.scheduler.type"), since="until 0.7"),
        Row(f"{ACTOR}.optim.min_lr_ratio", set_min_lr),
        Row(f"{ACTOR}.optim.optimizer", only("AdamW", None, instead="set trainer.optim.type.")),
        Row(f"{ACTOR}.optim.clip_grad", set_max_norm),
        Row(f"{ACTOR}.grad_clip", set_max_norm),
        Row(f"{ACTOR}.policy_loss.loss_mode", set_loss),
        Row(f"{ACTOR}.loss_agg_mode", set_normalize),
        Row(f"{ACTOR}.clip_ratio", set_clip),
        Row(f"{ACTOR}.clip_ratio_low", set_clip),
        Row(f"{ACTOR}.clip_ratio_high", set_clip),
        Row(f"{ACTOR}.clip_ratio_c", set_dual_clip),
        Row(f"{ACTOR}.tau_pos", if_mode("sapo", "trainer.loss.tau_pos")),
        Row(f"{ACTOR}.tau_neg", if_mode("sapo", "trainer.loss.tau_neg")),
        Row(f"{ACTOR}.use_kl_loss", set_kl),
        Row(f"{ACTOR}.entropy_coeff", "trainer.loss.entropy_bonus"),
        Row(f"{ACTOR}.ulysses_sequence_parallel_size", "trainer.model.cp"),
        Row(f"{ACTOR}.fsdp_config.reshard_after_forward", "trainer.model.reshard_after_forward"),
        *idle("see trainer.total_training_steps", f"{ACTOR}.optim.total_training_steps"),
        *idle("see loss_agg_mode", f"{ACTOR}.loss_scale_factor"),
        *idle("see use_kl_loss", f"{ACTOR}.kl_loss_coef {ACTOR}.kl_loss_type"),
        *idle("of other losses", f"{ACTOR}.policy_loss"),
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
        Row(f"{ROLLOUT}.engine_kwargs.vllm", set_vllm),
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
        Row("reward_model.reward_kwargs", set_overlong),
        Row("reward.reward_kwargs", set_overlong, since="0.9"),
        Row("reward_model.reward_manager", set_manager),
        Row("reward_manager.name", set_manager, since="0.8"),
        Row("reward.reward_manager.name", set_manager, since="0.9"),
        *idle("of reward models, which are served elsewhere", "reward_model reward reward_manager"),
        Row("trainer.total_training_steps", set_steps),
        Row("trainer.total_epochs", set_epochs),
        Row("trainer.save_freq", every("trainer.ckpt.interval")),
        Row("trainer.max_actor_ckpt_to_keep", if_given("trainer.ckpt.keep_last")),
        Row("trainer.test_freq", set_validation),
        Row("trainer.val_before_train", set_base),
        Row("trainer.val_only", only(False, None, instead="evaluate with `uv run eval`.")),
        Row("trainer.experiment_name", set_name),
        Row("trainer.default_local_dir", set_name),
        Row("trainer.logger", set_logger),
        Row("trainer.n_gpus_per_node", set_gpus, "half of them sample, half train"),
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
    custom = {**(of(table, "custom_reward_function") or {}), **(of(table, "reward.custom_reward_function") or {})}
    args = {
        "train_files": files_of(of(table, "data.train_files")),
        "val_files": files_of(of(table, "data.val_files")) if evaluates(table) else [],
        "prompt_key": of(table, "data.prompt_key", "prompt"),
        "source_key": of(table, "data.reward_fn_key", "data_source"),
        "max_rows": of(table, "data.train_max_samples", -1),
    }
    if custom.get("path"):
        args |= {"reward_path": files_of(custom["path"])[0]}
        args |= {
            "reward_name": custom.get("name") or "compute_score",
            "reward_kwargs": custom.get("reward_kwargs") or {},
        }
    return {"id": str(Path(__file__).parent / "environments" / "verl_rows.py"), "name": "verl", "args": args}
