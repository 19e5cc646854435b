"""Rules for the keys of TRL whose values have to be computed.

Each rule gets a value and the whole table of keys, with TRL's defaults. TRL counts completions per process, and steps
of the optimizer.
"""

from __future__ import annotations

import math
import re
from typing import Any

from trireme.config.section import NONE
from trireme.config.translation import Made, Refused, Rule, Settings
from trireme.tools.formats.row_rules import Table, as_sample_deviation, choose, lora, sampling_of, trust

ROOM = 1024  # tokens for a prompt, which TRL does not limit
NEWEST = "a model is its newest. Download that one, and give its folder."

# Batches and steps.


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
    steps = table.get("steps_per_generation") or table["gradient_accumulation_steps"]
    generated = table.get("generation_batch_size") or update // table["gradient_accumulation_steps"] * steps
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
    if (examples := table.get("num_examples")) is None:
        return None
    of_batch = batch_size(table) if "num_generations" in table else completions_per_update(table)
    batches = examples * table.get("num_generations", 1) // of_batch
    return max(1, math.ceil(batches * updates_per_batch(table) * table["num_train_epochs"]))


def set_steps(value: Any, table: Table) -> Settings | str:
    steps = max_steps(table)
    if value == -1:
        return "num_train_epochs decides"
    if steps is None:
        return "not known: give --num-examples, or set max_steps"
    return {"max_steps": max(1, steps // updates_per_batch(table))}


def set_epochs(value: Any, table: Table) -> Settings | str:
    if table["max_steps"] > 0:
        return "max_steps decides"
    return set_steps(value, table) if "num_generations" in table else {"num_epochs": float(value)}


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


# The optimizer and the loss.

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **{"sgd": "sgd", "muon": "muon"},
}
SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    **{"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"},
}
TOKEN_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo")
LOSSES = {name: name for name in (*TOKEN_LOSSES, "cispo", "sapo", "vespo", "luspo")} | {"bnpo": "ppo"}
ADVANTAGES = {"group": "group_mean_std", True: "group_mean_std", "none": "group_mean", False: "group_mean"}
ADVANTAGES |= {"batch": "group_batch"}


def set_scale(value: Any, table: Table) -> Settings | str:
    made = choose("orchestrator.advantage.type", ADVANTAGES)(value, table)
    assert isinstance(made, dict), made
    return made | as_sample_deviation(made["orchestrator.advantage.type"], table["num_generations"])


def set_schedule_kwargs(value: Any, table: Table) -> Settings:
    value = value or {}
    if unknown := sorted(value.keys() - {"min_lr", "min_lr_rate", "num_decay_steps", "num_stable_steps"}):
        raise Refused(f"`{unknown[0]}` has no counterpart in `[trainer.scheduler]`. Remove it.")
    least = value.get("min_lr", table["learning_rate"] * value.get("min_lr_rate", 0))
    found = {"min_lr": least, "decay_steps": value.get("num_decay_steps")}
    return {f"trainer.scheduler.{key}": each for key, each in found.items() if each}


def set_loss(value: str, table: Table) -> Settings:
    if value not in LOSSES:
        raise Refused(f"expected one of {', '.join(LOSSES)}. See docs/algorithms.md for the losses that there are.")
    more: dict[str, Settings] = {
        "dr_grpo": {"trainer.loss.normalize_length": table["max_completion_length"]},
        "sapo": {"trainer.loss.normalize": "sequence"},
    }
    return {"trainer.loss.type": LOSSES[value]} | more.get(value, {})


def set_level(value: str, table: Table) -> Settings | str:
    kind = table["loss_type"]
    if kind == "luspo" and value == "token":
        raise Refused('expected "sequence", as LUSPO has it. Set it, or take another loss_type.')
    if value == "token" or kind == "luspo":
        return "as the loss is"
    if value != "sequence" or kind not in TOKEN_LOSSES:
        raise Refused(f'expected "token" or, with one of {", ".join(TOKEN_LOSSES)}, "sequence" (GSPO).')
    return {"trainer.loss.surrogate": "sequence_clip"}


def set_clip(value: Any, table: Table) -> Settings | str:
    kind, low, high = table["loss_type"], table["epsilon"], table.get("epsilon_high")
    if kind == "cispo":
        if high is None:
            raise Refused(
                "`cispo` without `epsilon_high`: TRL then multiplies every token by this value. Set "
                "`epsilon_high = 5.0`, as ScaleRL has it."
            )
        return {"trainer.loss.clip_low": 1.0, "trainer.loss.clip_high": high - 1}
    if kind in ("sapo", "vespo"):
        return f"{kind} does not clip"
    return {"trainer.loss.clip_low": low, "trainer.loss.clip_high": low if high is None else high}


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


def set_beta(value: float, table: Table) -> Settings:
    estimator = "k2" if table.get("use_bias_correction_kl", True) else "k3"
    return {"trainer.loss.beta": value or 0.0} | ({"trainer.loss.kl_estimator": estimator} if value else {})


def set_sync(value: bool, table: Table) -> Made:
    if not value:
        return "the reference stays the base model"
    if table.get("ref_model_mixup_alpha", 0.6) != 1:
        raise Refused("the policy replaces the reference, and is not mixed into it. Set ref_model_mixup_alpha = 1.")
    return every("trainer.loss.reference_update_every")(table.get("ref_model_sync_steps", 512), table)


# Sampling, evaluation and the model.

OF_SAMPLING = ("min_tokens", "stop", "presence_penalty", "frequency_penalty")


def set_generation(value: Any, table: Table) -> Settings:
    given = dict(value or {})
    own = {name: given.pop(name) for name in OF_SAMPLING if name in given}
    return {f"orchestrator.sampling.{name}": each for name, each in own.items()} | (
        {"orchestrator.sampling.extra_body": given} if given else {}
    )


def set_length(value: Any, table: Table) -> Settings | str:
    if value is None:
        return "a turn may fill the context"
    room = {} if table.get("vllm_max_model_length") else {"seq_len": value + (table.get("max_prompt_length") or ROOM)}
    return sampling_of("max_tokens", value, table, evaluates) | room


def evaluates(table: Table) -> bool:
    return bool(table.get("eval_strategy", "no") != "no")


def set_evaluation(value: str, table: Table) -> Settings | str:
    if value == "no":
        return "no evaluation"
    interval = table.get("eval_steps") or table["logging_steps"]
    if value == "epoch":
        if table.get("num_examples") is None:
            raise Refused("steps of an epoch depend on the data. Give --num-examples, or `eval_strategy = steps`.")
        interval = max_steps(table | {"max_steps": -1, "num_train_epochs": 1})
    return {
        "orchestrator.eval.interval": max(1, round(interval / updates_per_batch(table))),
        "orchestrator.eval.rollouts_per_example": table.get("num_generations_eval") or table["num_generations"],
        "orchestrator.eval.num_examples": NONE,
        "orchestrator.eval.eval_base": bool(table.get("eval_on_start", False)),
    }


def set_model(value: str | None, table: Table) -> Settings:
    if value is None:
        raise Refused("the script takes it from its command line. Give it there: `-- --model_name_or_path NAME`.")
    return {"model.name": value}


def set_model_kwargs(value: Any, table: Table) -> Settings:
    kwargs = {name: each for name, each in (value or {}).items() if each is not None}
    known = {"dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "device_map", "use_cache", "revision"}
    if unknown := sorted((value or {}).keys() - known):
        raise Refused(f"`{unknown[0]}` cannot be handed to the model here. Remove it.")
    if (revision := kwargs.get("revision", "main")) != "main":
        raise Refused(f"revision {revision!r}: {NEWEST}")
    made = set_attention(kwargs.get("attn_implementation"), table)
    if kwargs.get("trust_remote_code"):
        made |= trust(True, table)
    if "bfloat16" in str(kwargs.get("dtype", kwargs.get("torch_dtype"))):
        made["trainer.model.optimization_dtype"] = "bfloat16"
    return made


def set_attention(value: str | None, table: Table) -> Settings:
    if not value:
        return {}
    return {"trainer.model.attn": re.sub(r"flash-attn(\d)", r"flash_attention_\1", value.rpartition("/")[2])}


def set_dtype(value: Any, table: Table) -> Made:
    is_half = "bfloat16" in str(value)
    return {"trainer.model.optimization_dtype": "bfloat16"} if is_half else "parameters are always float32 here"


def set_targets(value: Any, table: Table) -> Made:
    return lora("target_modules", "use_peft")(["q_proj", "v_proj"] if value is None else value, table)
