"""The table of what a resumed run may change: one entry for each key of the configuration, for `rl` and `sft` alike.

The tables are data. `docs/reliability.md` shows them, and a test fails if a key of the configuration has no entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError

from trireme.base.errors import ConfigError
from trireme.config.section import AnySection, fields_of
from trireme.config.trainer import Training

When = Literal["at once", "step", "batch", "rounding", "checkpoint", "content", "fixed"]

MEANING: dict[When, str] = {
    "at once": "Holds at once. Nothing that is computed depends on it.",
    "step": "Holds from the first new step. Steps that are repeated use the value of their time.",
    "batch": "Holds from the first batch that is not in the journal yet.",
    "rounding": "Holds at once: the same function, rounded differently. Repeated steps may end in other bits.",
    "checkpoint": "Holds from the newest checkpoint. Refused where steps after it are to be repeated.",
    "content": "May be moved or renamed: what it names must have the same content.",
    "fixed": "Refused: the run would become another one.",
}
"""The moment from which a change holds."""

RUN: dict[When, str] = {
    "at once": """
        name output_dir resume resume_from log_level disk_timeout_s wandb.* dashboard console.* supervisor.*
        ports.* hosts.*
        inference_gpu_ids trainer_gpu_ids inference_gpus trainer_gpus weight_broadcast.*
        env_vars.* trainer.env_vars.* orchestrator.env_vars.* inference.env_vars.*
        trainer.ckpt.* trainer.optim.cpu_offload trainer.trace_path trainer.memory_profiler_path
        trainer.batch_timeout_s trainer.save_logprobs trainer.try_step trainer.model.trust_remote_code
        inference.server.* inference.start_timeout_s inference.drain_timeout_s
        orchestrator.server.* orchestrator.engine_timeout_s orchestrator.trainer_timeout_s
    """,
    "step": """
        max_steps seq_len trainer.micro_batch_tokens trainer.num_iterations trainer.scheduler.*
        trainer.optim.lr trainer.optim.weight_decay trainer.optim.betas trainer.optim.eps trainer.optim.max_norm
        trainer.optim.nonfinite trainer.optim.max_nonfinite
        trainer.loss.type trainer.loss.surrogate trainer.loss.proximal trainer.loss.correction
        trainer.loss.correction_low trainer.loss.correction_high trainer.loss.normalize trainer.loss.normalize_length
        trainer.loss.ratio_low trainer.loss.ratio_high trainer.loss.kl_tau trainer.loss.clip_low trainer.loss.clip_high
        trainer.loss.adv_tau trainer.loss.eps trainer.loss.mask_low trainer.loss.mask_high
        trainer.loss.max_importance_ratio trainer.loss.tau_pos trainer.loss.tau_neg
        trainer.loss.cov_ratio trainer.loss.cov_low trainer.loss.cov_high trainer.loss.cov_penalty
        trainer.loss.k_pos trainer.loss.k_neg trainer.loss.lambda_pos trainer.loss.lambda_neg
        trainer.loss.dual_clip trainer.loss.beta trainer.loss.kl_estimator trainer.loss.entropy_bonus
        trainer.loss.path trainer.loss.args.*
    """,
    "batch": """
        max_async_level trainer.loss.score_centering trainer.loss.score_centering_top_k
        inference.model.max_model_len inference.model.enforce_eager inference.model.enable_auto_tool_choice
        inference.model.tool_call_parser inference.model.reasoning_parser inference.model.trust_remote_code
        inference.parallel.* inference.cpu.* inference.gpu_memory_utilization inference.max_num_seqs inference.args.*
        inference.keep_prefix_cache
        orchestrator.batch_size orchestrator.token_batch_size orchestrator.rollouts_per_example
        orchestrator.oversampling_factor
        orchestrator.max_off_policy_steps orchestrator.trajectory_strategy orchestrator.max_concurrent
        orchestrator.max_rollout_attempts orchestrator.sampling.* orchestrator.env.* orchestrator.buffer.*
        orchestrator.curriculum.* orchestrator.filters.* orchestrator.length_penalty.* orchestrator.advantage.*
        orchestrator.teacher.* orchestrator.echo.* orchestrator.eval.*
    """,
    "rounding": """
        device trainer.num_ranks trainer.threads trainer.model.attn trainer.model.ac.* trainer.model.activation_offload
        trainer.model.dp_replicate trainer.model.cp trainer.model.ep trainer.model.head_chunk
        trainer.model.fsdp_cpu_offload trainer.model.reshard_after_forward trainer.model.compile
        trainer.model.moe.implementation
    """,
    "checkpoint": """
        trainer.optim.type trainer.model.optimization_dtype trainer.model.reduce_dtype trainer.model.moe.router_dtype
        trainer.model.lora.dropout
    """,
    "content": "model.name trainer.model.name trainer.tokenizer.name inference.model.name",
    "fixed": """
        seed inference.model.dtype model.vlm.* trainer.model.vlm.* trainer.model.from_scratch
        trainer.model.moe.router trainer.model.moe.router_replay trainer.loss.reference_update_every
        orchestrator.env.loss.reference_update_every orchestrator.teacher.samples orchestrator.env.teacher.samples
        trainer.model.lora trainer.model.lora.rank trainer.model.lora.alpha trainer.model.lora.target_modules
        trainer.model.lora.modules_to_save trainer.model.lora.use_rslora trainer.model.lora.sync
    """,
}
"""Keys of `rl`. `table.*` stands for a table with all of its keys. Names of environments are fixed as well."""

SFT: dict[When, str] = {
    "at once": "eval.* inference.*",
    "step": "num_epochs batch_size validation validation_split validation_interval",
    "content": """
        data subset split source.data source.subset source.split seq_len overlong loss_on chat_template
        chat_template_kwargs.* validation_fraction
    """,
    "fixed": "source source.repeat",
}
"""Keys of `sft` that `rl` has not, or that mean something else there. Keys of its tables `[model]`, `[optim]` and
so on are those of `[trainer]`."""

Table = Mapping[str, Any]
ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A key with another value than before."""

    key: str
    before: Any  # ABSENT if there was no such key
    now: Any
    when: When | None  # None for a key that this version does not have


def when_of(key: str, *, is_sft: bool = False) -> When | None:
    """Return from when on a change of a key holds; None if it has no entry.

    Example:
        when_of("orchestrator.env.0.args.length"), when_of("optim.lr", is_sft=True)  # "batch", "step"
    """
    parts = [part for part in key.split(".") if not part.isdigit()]
    tables = (_entries("sft"), _entries("rl")) if is_sft else (_entries("rl"),)
    # `sft` has the trainer's tables at the top.
    if is_sft and parts[0] in fields_of(Training):
        parts = ["trainer", *parts]

    # The key itself, then the tables around it from the inside out: the nearest entry decides.
    for table in tables:
        ends = [".".join(parts), *(f"{'.'.join(parts[:length])}.*" for length in range(len(parts), 0, -1))]
        if found := next((table[end] for end in ends if end in table), None):
            return found
    return None


@cache
def _entries(command: Literal["rl", "sft"]) -> dict[str, When]:
    return {key: when for when, keys in (RUN if command == "rl" else SFT).items() for key in keys.split()}


def changes(before: Table, now: Table, *, is_sft: bool) -> list[Change]:
    """Return the keys that differ between two resolved configurations, as their files have them."""
    one, other = dict(flatten(before)), dict(flatten(now))
    return [
        Change(key, one.get(key, ABSENT), other.get(key, ABSENT), when_of(key, is_sft=is_sft))
        for key in dict.fromkeys([*other, *one])
        if one.get(key, ABSENT) != other.get(key, ABSENT)
    ]


def flatten(table: Table, above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tables into dotted keys. Items of a list of tables are numbered from 0."""
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from flatten({str(number): item for number, item in enumerate(value)}, f"{key}.")
        elif value != {} and value != []:
            yield key, value


def with_settings_of(now: AnySection, then: Table, whens: Collection[When], *, is_sft: bool) -> AnySection:
    """Return a configuration with the values that the keys of these kinds had in another resolved configuration.

    Keys that the other one has not, since an earlier version wrote it, keep their values.

    Raises: ConfigError if this version refuses a value of the other one.
    """
    table = now.model_dump(mode="json")
    _take_over(table, then, "", whens, is_sft)
    try:
        return type(now).model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the settings of earlier steps ({first['msg']} at {first['loc']}) are not those of this version - "
            "expected a file that it can read. Resume with the version that wrote it up to a checkpoint, or go back to "
            "one: `ckpt.resume_step`."
        ) from None


def _take_over(into: dict[str, Any], then: Table, above: str, whens: Collection[When], is_sft: bool) -> None:
    for name in into.keys() & then.keys():
        if when_of(f"{above}{name}", is_sft=is_sft) in whens:
            into[name] = then[name]
        elif isinstance(into[name], dict) and isinstance(then[name], dict):
            _take_over(into[name], then[name], f"{above}{name}.", whens, is_sft)
