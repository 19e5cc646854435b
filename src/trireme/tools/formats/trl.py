"""The keys of TRL's `GRPOConfig`, `SFTConfig`, `ModelConfig` and `ScriptArguments`, and what becomes of each here.

Read in TRL 1.16.0 with transformers 5.19. A script, or a YAML file of `trl grpo`, is one flat table of these keys, on
top of TRL's defaults (`with_defaults`): what a key that was not given means there is set here too.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Any

from trireme.config.rows.rules import on_gpus
from trireme.config.section import NONE
from trireme.config.translation import Refused, Row, Rule, Settings
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
"""What TRL takes for keys that were not given, as far as it decides what is trained. `num_processes` is not TRL's,
and counts the processes that `accelerate launch` would start."""

LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""`ModelConfig`'s, which `use_peft` switches on."""
ROOM = 1024  # tokens for a prompt, which TRL does not limit
TOKEN_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo")


def with_defaults(table: Table, kind: str) -> Table:
    adapters = LORA if table.get("use_peft") else {}
    return DEFAULTS[kind] | adapters | table


# Batches and steps. TRL counts completions per process, and steps of the optimizer.


def completions_per_update(table: Table) -> int:
    """Return the completions of one optimizer step."""
    return int(
        table["per_device_train_batch_size"] * table["gradient_accumulation_steps"] * table.get("num_processes", 1)
    )


def batch_size(table: Table) -> int:
    """Return the rollouts of a batch here: those of one optimizer step there, or of all that share a group."""
    update, group = completions_per_update(table), table["num_generations"]
    if update % group == 0:
        return update

    # The groups of a generation are split among several steps, which a batch of whole groups cannot be.
    steps, processes = table.get("steps_per_generation"), table.get("num_processes", 1)
    generated = table.get("generation_batch_size") or (
        table["per_device_train_batch_size"] * processes * (steps or table["gradient_accumulation_steps"])
    )
    if generated % group:
        raise Refused(
            f"{generated} completions per generation with num_generations = {group}, which TRL refuses too. Make "
            "per_device_train_batch_size x gradient_accumulation_steps x processes a multiple of num_generations."
        )
    return int(generated)


def updates_per_batch(table: Table) -> int:
    """Return TRL's optimizer steps in one step here."""
    if "num_generations" not in table:
        return 1
    return max(1, batch_size(table) // completions_per_update(table)) * int(table["num_iterations"])


def max_steps(table: Table) -> int | None:
    """Return TRL's optimizer steps; None if they depend on how many examples there are, which is not known."""
    if table["max_steps"] > 0:
        return int(table["max_steps"])
    examples = table.get("num_examples")
    if examples is None:
        return None
    batches = (
        examples
        * table.get("num_generations", 1)
        // (batch_size(table) if "num_generations" in table else completions_per_update(table))
    )
    return max(1, math.ceil(batches * updates_per_batch(table) * table["num_train_epochs"]))


def set_batch(value: Any, table: Table) -> Settings | str:
    return {"orchestrator.batch_size": batch_size(table)}


def set_sft_batch(value: Any, table: Table) -> Settings | str:
    return {"batch_size": completions_per_update(table)}


def set_steps(value: Any, table: Table) -> Settings | str:
    steps = max_steps(table)
    if value == -1:
        return "num_train_epochs decides"
    if steps is None:
        return "not known: give --num-examples, or set max_steps"
    return {"max_steps": max(1, steps // updates_per_batch(table))}


def set_epochs(value: Any, table: Table) -> Settings | str:
    return "max_steps decides" if table["max_steps"] > 0 else set_steps(value, table)


def set_sft_epochs(value: Any, table: Table) -> Settings | str:
    return "max_steps decides" if table["max_steps"] > 0 else {"num_epochs": float(value)}


def every(ours: str, switch: str = "") -> Rule:
    """Return a rule for a number of steps; a value below 1 is a share of all."""

    def rule(value: Any, table: Table) -> Settings | str:
        if switch and table.get(switch, "no") == "no":
            return f'{switch} = "no"'
        steps = value
        if 0 < value < 1:
            if (total := max_steps(table)) is None:
                raise Refused("a share of steps whose number is not known. Write a number of steps.")
            steps = total * value
        return {ours: max(1, round(steps / updates_per_batch(table)))} if value else {}

    return rule


# The optimizer.

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **{"sgd": "sgd", "muon": "muon"},
}
SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    **{"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"},
}


def choose(ours: str, names: dict[Any, Any], advice: str) -> Rule:
    """Return a rule that takes these values, each with ours for it."""

    def rule(value: Any, table: Table) -> Settings | str:
        plain = value.rpartition(".")[2].lower() if isinstance(value, str) else value
        if plain not in names:
            raise Refused(f"expected one of {', '.join(map(str, names))}. {advice}")
        return {ours: names[plain]}

    return rule


def set_schedule_kwargs(value: Any, table: Table) -> Settings | str:
    if not value:
        return {}
    found = {
        "min_lr": value.get("min_lr", table["learning_rate"] * value.get("min_lr_rate", 0)),
        **({"decay_steps": value["num_decay_steps"]} if "num_decay_steps" in value else {}),
    }
    if unknown := sorted(value.keys() - {"min_lr", "min_lr_rate", "num_decay_steps", "num_stable_steps"}):
        raise Refused(f"`{unknown[0]}` has no counterpart in `[trainer.scheduler]`. Remove it.")
    return {f"trainer.scheduler.{key}": each for key, each in found.items() if each}


def set_betas(value: Any, table: Table) -> Settings | str:
    return {"trainer.optim.betas": [table["adam_beta1"], table["adam_beta2"]]}


# The loss.


def set_loss(value: str, table: Table) -> Settings | str:
    names = {"grpo": "grpo", "dapo": "dapo", "bnpo": "ppo", "dr_grpo": "dr_grpo", "cispo": "cispo"}
    names |= {"sapo": "sapo", "vespo": "vespo", "luspo": "luspo"}
    if value not in names:
        raise Refused(f"expected one of {', '.join(names)}. See docs/algorithms.md for the losses that there are.")
    made: Settings = {"trainer.loss.type": names[value]}
    if value == "dr_grpo":
        made["trainer.loss.normalize_length"] = table["max_completion_length"]
    if value == "sapo":
        made["trainer.loss.normalize"] = "sequence"
    return made


def set_level(value: str, table: Table) -> Settings | str:
    if value == "token":
        return "as the loss is"
    if value != "sequence" or table["loss_type"] not in (*TOKEN_LOSSES, "luspo"):
        raise Refused(f'expected "token" or, with one of {", ".join(TOKEN_LOSSES)}, "sequence" (GSPO).')
    return {"trainer.loss.surrogate": "sequence_clip"}


def set_clip(value: float, table: Table) -> Settings | str:
    kind, high = table["loss_type"], table.get("epsilon_high")
    if kind == "cispo":
        if high is None:
            raise Refused(
                "`cispo` without `epsilon_high`: TRL then multiplies every token by this value. Set "
                "`epsilon_high = 5.0`, as ScaleRL has it."
            )
        return {"trainer.loss.clip_low": 1.0, "trainer.loss.clip_high": high - 1}
    if kind in ("sapo", "vespo"):
        return f"{kind} does not clip"
    return {"trainer.loss.clip_low": value, "trainer.loss.clip_high": value if high is None else high}


def if_loss(kind: str, ours: str) -> Rule:
    return lambda value, table: {ours: value} if table["loss_type"] == kind else f"only with loss_type = {kind}"


def set_correction(value: bool, table: Table) -> Settings | str:
    """TRL's ratio is against the trainer's own logprobs at the batch's start, and this weighs tokens by how far vLLM's
    were from them."""
    recomputed: Settings = {"trainer.loss.proximal": "recomputed"}
    if table["loss_type"] == "vespo":
        return "part of vespo"
    if not value:
        return recomputed
    mode = table.get("vllm_importance_sampling_mode", "sequence_mask")
    high = table.get("vllm_importance_sampling_cap", table.get("vllm_importance_sampling_clip_max", 3.0))
    low = table.get("vllm_importance_sampling_clip_min")
    if mode.endswith("_truncate") and low:
        raise Refused("vllm_importance_sampling_clip_min cuts weights from below. Remove it, or use a `*_mask` mode.")
    bounds: Settings = {"trainer.loss.correction": mode, "trainer.loss.correction_high": high or math.inf}
    return recomputed | bounds | ({"trainer.loss.correction_low": low or 0.0} if mode.endswith("_mask") else {})


def set_beta(value: float, table: Table) -> Settings | str:
    if not value:
        return {"trainer.loss.beta": 0.0}
    return {
        "trainer.loss.beta": value,
        "trainer.loss.kl_estimator": "k2" if table.get("use_bias_correction_kl", True) else "k3",
    }


def set_sync(value: bool, table: Table) -> Settings | str:
    if not value:
        return "the reference stays the base model"
    if table.get("ref_model_mixup_alpha", 0.6) != 1:
        raise Refused("the policy replaces the reference, and is not mixed into it. Set ref_model_mixup_alpha = 1.")
    return every("trainer.loss.reference_update_every")(table.get("ref_model_sync_steps", 512), table)


ADVANTAGES = {"group": "group_mean_std", True: "group_mean_std", "none": "group_mean", False: "group_mean"}
ADVANTAGES |= {"batch": "group_batch"}


# Sampling, evaluation and the run itself.


def sampling(key: str, off: Any = None) -> Rule:
    """Return a rule for a key of training and, if the run evaluates, of evaluation: TRL samples alike in both.

    Args:
        off: the value by which TRL switches it off.
    """

    def rule(value: Any, table: Table) -> Settings | str:
        if value is None or value == off:
            return {}
        tables = ["orchestrator.sampling", *(["orchestrator.eval.sampling"] if evaluates(table) else [])]
        return {f"{each}.{key}": value for each in tables}

    return rule


OF_SAMPLING = ("min_tokens", "stop", "presence_penalty", "frequency_penalty")


def set_generation(value: Any, table: Table) -> Settings | str:
    given = dict(value or {})
    own = {name: given.pop(name) for name in OF_SAMPLING if name in given}
    made = own | ({"extra_body": given} if given else {})
    return {f"orchestrator.sampling.{name}": each for name, each in made.items()}


def set_length(value: Any, table: Table) -> Settings | str:
    if value is None:
        return "a turn may fill the context"
    room = table.get("max_prompt_length") or ROOM
    made = sampling("max_tokens")(value, table)
    assert isinstance(made, dict), made
    return made | ({} if table.get("vllm_max_model_length") else {"seq_len": value + room})


def evaluates(table: Table) -> bool:
    return bool(table.get("eval_strategy", "no") != "no")


def set_evaluation(value: str, table: Table) -> Settings | str:
    if value == "no":
        return "no evaluation"
    rollouts = table.get("num_generations_eval") or table["num_generations"]
    interval = table.get("eval_steps") or table["logging_steps"]
    if value == "epoch":
        if (examples := table.get("num_examples")) is None:
            raise Refused("steps of an epoch depend on the data. Give --num-examples, or `eval_strategy = steps`.")
        interval = max_steps(table | {"max_steps": -1, "num_train_epochs": 1, "num_examples": examples})
    made = every("orchestrator.eval.interval")(interval, table)
    assert isinstance(made, dict), made
    return made | {
        "orchestrator.eval.rollouts_per_example": rollouts,
        "orchestrator.eval.num_examples": NONE,
        "orchestrator.eval.eval_base": bool(table.get("eval_on_start", False)),
    }


def set_save(value: str, table: Table) -> Settings | str:
    return "the last step is always saved" if value == "no" else {}


def set_name(value: str, table: Table) -> Settings | str:
    folder = PurePath(value)
    return {"name": folder.name, "output_dir": str(folder.parent)}


def set_report(value: Any, table: Table) -> Settings | str:
    wanted = [value] if isinstance(value, str) else list(value or [])
    if "wandb" not in wanted:
        return "metrics are in the run's folder, and on its dashboard"
    return {"wandb.project": table.get("project") or "huggingface", "wandb.name": table.get("run_name") or NONE}


def set_model(value: str | None, table: Table) -> Settings | str:
    if value is None:
        raise Refused("the script takes it from its command line. Give it there: `-- --model_name_or_path NAME`.")
    return {"model.name": value}


def set_model_kwargs(value: Any, table: Table) -> Settings | str:
    known = {"dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "device_map", "use_cache", "revision"}
    if unknown := sorted((value or {}).keys() - known):
        raise Refused(f"`{unknown[0]}` cannot be handed to the model here. Remove it.")
    if (revision := (value or {}).get("revision")) not in (None, "main"):
        raise Refused(f"revision {revision!r}: a model is its newest. Download that one, and give its folder.")
    kwargs = {name: each for name, each in (value or {}).items() if each is not None}
    made: Settings = {}
    if name := kwargs.get("attn_implementation"):
        made |= set_attention(name, table)
    if kwargs.get("trust_remote_code"):
        made |= trust(True, table)
    if "bfloat16" in str(kwargs.get("dtype", kwargs.get("torch_dtype"))):
        made["trainer.model.optimization_dtype"] = "bfloat16"
    return made


def set_attention(value: str | None, table: Table) -> Settings:
    if value is None:
        return {}
    plain = re.sub(r"flash-attn(\d)", r"flash_attention_\1", value.rpartition("/")[2])
    return {"trainer.model.attn": plain}


def set_dtype(value: Any, table: Table) -> Settings | str:
    if "bfloat16" in str(value):
        return {"trainer.model.optimization_dtype": "bfloat16"}
    return "parameters are always float32 here"


def lora(key: str) -> Rule:
    def rule(value: Any, table: Table) -> Settings | str:
        if not table.get("use_peft"):
            return "use_peft = false"
        if value is None:
            return {}
        listed = [value] if isinstance(value, str) and key in ("target_modules", "modules_to_save") else value
        return {f"trainer.model.lora.{key}": listed}

    return rule


VLLM_SAMPLES = "vLLM always samples here"
LOW_BITS = "weights that are trained are not quantised; train adapters in bfloat16."
NEWEST = "a model is its newest. Download that one, and give its folder."

SHARED = (
    Row("model_name_or_path", set_model),
    Row("model_revision", only(None, "main", instead=NEWEST)),
    Row("model_init_kwargs", set_model_kwargs),
    Row("trust_remote_code", trust),
    Row("attn_implementation", set_attention),
    Row("dtype", set_dtype),
    Row("torch_dtype", set_dtype),
    Row("use_peft", if_true("trainer.model.lora", {})),
    Row("lora_r", lora("rank")),
    Row("lora_alpha", lora("alpha")),
    Row("lora_dropout", lora("dropout")),
    Row("lora_target_modules", lora("target_modules")),
    Row("lora_modules_to_save", lora("modules_to_save")),
    Row("use_rslora", lora("use_rslora")),
    Row("use_dora", only(False, None, instead="adapters are LoRA's.")),
    Row("load_in_4bit", only(False, None, instead=LOW_BITS)),
    Row("load_in_8bit", only(False, None, instead=LOW_BITS)),
    Row("learning_rate", "trainer.optim.lr"),
    Row("weight_decay", "trainer.optim.weight_decay"),
    Row("adam_beta1", set_betas),
    Row("adam_beta2", set_betas),
    Row("adam_epsilon", "trainer.optim.eps"),
    Row("max_grad_norm", set_max_norm),
    Row("optim", choose("trainer.optim.type", OPTIMIZERS, "AdamW is the usual one.")),
    Row("lr_scheduler_type", choose("trainer.scheduler.type", SCHEDULES, "Take the nearest.")),
    Row("lr_scheduler_kwargs", set_schedule_kwargs),
    Row("warmup_steps", every("trainer.scheduler.warmup_steps")),
    Row("warmup_ratio", every("trainer.scheduler.warmup_steps")),
    Row("seed", "seed"),
    Row("output_dir", set_name),
    Row("report_to", set_report),
    Row("save_strategy", set_save),
    Row("save_steps", every("trainer.ckpt.interval", "save_strategy")),
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
        Row("per_device_train_batch_size", set_batch),
        Row("gradient_accumulation_steps", set_batch),
        Row("max_steps", set_steps),
        Row("num_train_epochs", set_epochs),
        Row("num_iterations", "trainer.num_iterations"),
        Row("max_completion_length", set_length, f"seq_len has room for max_prompt_length, or {ROOM} tokens"),
        Row("max_prompt_length", None, "part of seq_len; a longer prompt costs its group", since="0.9, until 0.27"),
        Row("shuffle_dataset", "orchestrator.buffer.shuffle"),
        Row("temperature", sampling("temperature")),
        Row("top_p", sampling("top_p")),
        Row("top_k", sampling("top_k", off=0)),
        Row("min_p", sampling("min_p")),
        Row("repetition_penalty", sampling("repetition_penalty")),
        Row("generation_kwargs", set_generation),
        Row("chat_template_kwargs", sampling("chat_template_kwargs")),
        Row("vllm_structured_outputs_regex", only(None, "", instead="see orchestrator.sampling.extra_body.")),
        Row("loss_type", set_loss),
        Row("importance_sampling_level", set_level),
        Row("epsilon", set_clip),
        Row("epsilon_high", lambda value, table: {} if value is None else set_clip(table["epsilon"], table)),
        Row("delta", if_given("trainer.loss.dual_clip")),
        Row("sapo_temperature_pos", if_loss("sapo", "trainer.loss.tau_pos")),
        Row("sapo_temperature_neg", if_loss("sapo", "trainer.loss.tau_neg")),
        *(Row(f"vespo_{key}", if_loss("vespo", f"trainer.loss.{key}")) for key in ("k_pos", "k_neg")),
        *(Row(f"vespo_{key}", if_loss("vespo", f"trainer.loss.{key}")) for key in ("lambda_pos", "lambda_neg")),
        Row("beta", set_beta, "with use_bias_correction_kl, k2: the same gradient in expectation"),
        Row("sync_ref_model", set_sync),
        Row("entropy_coef", "trainer.loss.entropy_bonus"),
        Row("use_adaptive_entropy", only(False, None, instead="the bonus is constant. Set entropy_coef alone.")),
        Row("top_entropy_quantile", only(1, None, instead='all tokens train. Write a loss: type = "custom".')),
        Row("off_policy_mask_threshold", only(None, instead='see trainer.loss.correction = "geometric_mask".')),
        Row("vllm_importance_sampling_correction", set_correction, "as TRL has it for vLLM, which always samples here"),
        Row("scale_rewards", choose("orchestrator.advantage.type", ADVANTAGES, ""), OF_DEVIATIONS),
        Row("multi_objective_aggregation", only("sum_then_normalize", None, instead="rewards are summed first.")),
        Row("mask_truncated_completions", if_true("orchestrator.filters.truncated", "mask")),
        Row("eval_strategy", set_evaluation),
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
        Row("per_device_train_batch_size", set_sft_batch),
        Row("gradient_accumulation_steps", set_sft_batch),
        Row("max_steps", lambda value, table: {"max_steps": value} if value > 0 else "num_train_epochs decides"),
        Row("num_train_epochs", set_sft_epochs),
        Row("max_length", "seq_len"),
        Row("max_seq_length", "seq_len", since="0.9, until 0.20"),
        Row("assistant_only_loss", lambda value, table: {"loss_on": ["assistant"] if value else EVERY_ROLE}),
        Row("completion_only_loss", only(None, True, instead="of a prompt and its completion, the latter is learned.")),
        Row("loss_type", only("nll", None, instead="the loss is the negative log-likelihood.")),
        Row("eval_strategy", lambda value, table: "no validation" if value == "no" else {}),
        Row("eval_steps", every("validation_interval", "eval_strategy")),
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
