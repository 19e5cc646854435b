"""Rules for the keys of verl whose values have to be computed.

Each rule gets a value and the whole table of keys, with verl's defaults. verl counts prompts, and splits a batch into
mini-batches with a step of the optimizer for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trireme.config.rows.rules import NO_GPU, has_gpus
from trireme.config.section import NONE
from trireme.config.translation import Refused, Rule, Settings
from trireme.tools.formats.row_rules import Table, as_sample_deviation, of, set_folder, set_wandb, split_gpus

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MODE = f"{ACTOR}.policy_loss.loss_mode"
RANKS = (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank")
NO_RAY = "there is no Ray"


# Batches and steps.


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
    return {"orchestrator.advantage.type": kind} | as_sample_deviation(kind, of(table, f"{ROLLOUT}.n"))


LOSSES = {
    **{"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce", "sapo": "sapo", "geo_mean": "gmpo"},
    **{"dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "clip_cov": "clip_cov", "kl_cov": "kl_cov"},
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
    if of(table, MODE) in ("sapo", "geo_mean"):  # verl normalizes these by sample
        return {"trainer.loss.normalize": "sequence"}
    if value not in NORMALISATIONS:
        raise Refused(f"expected one of {', '.join(NORMALISATIONS)}. Take the nearest.")
    made: Settings = {"trainer.loss.normalize": NORMALISATIONS[value]}
    if value == "seq-mean-token-sum-norm":
        length = of(table, f"{ACTOR}.loss_scale_factor") or of(table, "data.max_response_length")
        made["trainer.loss.normalize_length"] = length
    return made


def set_clip(value: Any, table: Table) -> Settings | str:
    mode, both = of(table, MODE), of(table, f"{ACTOR}.clip_ratio")
    low, high = (of(table, f"{ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    bounds = ("mask_low", "mask_high") if mode in ("dppo_tv", "dppo_kl") else ("clip_low", "clip_high")
    if mode in ("gpg", "sapo", "kl_cov"):
        return f"{mode} does not clip"
    return {f"trainer.loss.{key}": each for key, each in zip(bounds, (low, high), strict=True)}


def set_dual_clip(value: float, table: Table) -> Settings | str:
    mode = of(table, MODE)
    if mode == "vanilla":
        return {"trainer.loss.dual_clip": value}
    return {"trainer.loss.max_importance_ratio": value} if mode.startswith("dppo") else f"not with {mode}"


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


def set_min_lr(value: float, table: Table) -> Settings:
    return {"trainer.scheduler.min_lr": value * of(table, f"{ACTOR}.optim.lr")} if value else {}


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
    most, own = of(table, "data.val_max_samples", -1), of(table, f"{ROLLOUT}.val_kwargs", {})
    sampling = {"temperature": 0.0}
    if own.get("do_sample", False):
        sampling = {"temperature": own.get("temperature", 0)} | {key: own[key] for key in ("top_p",) if key in own}
        sampling |= {"top_k": own["top_k"]} if own.get("top_k", -1) > 0 else {}
    return {
        "orchestrator.eval.eval_base": value,
        "orchestrator.eval.num_examples": most if most > 0 else NONE,
        "orchestrator.eval.rollouts_per_example": own.get("n", 1),
        **{f"orchestrator.eval.sampling.{key}": each for key, each in sampling.items()},
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


def set_custom(value: Any, table: Table) -> Settings | str:
    if not isinstance(value, dict | type(None)):
        raise Refused("expected a table with `path` and `name`. Write `custom_reward_function.path=FILE.py`.")
    return "in the environment"


def set_logger(value: Any, table: Table) -> Settings | str:
    project = of(table, "trainer.project_name", "verl_examples")
    return set_wandb(value, project, of(table, "trainer.experiment_name"))


def set_name(value: Any, table: Table) -> Settings:
    folder = of(table, "trainer.default_local_dir")
    return set_folder(folder, table) if folder else {"name": value}


def set_gpus(value: int, table: Table) -> Settings | str:
    """verl's GPUs take turns at sampling and training; here each has one of the two."""
    if not has_gpus():
        return NO_GPU
    if of(table, "trainer.nnodes", 1) > 1:
        return "several machines: their addresses go into [hosts]"
    return split_gpus(value, of(table, f"{ROLLOUT}.tensor_model_parallel_size", 1))
