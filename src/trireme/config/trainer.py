"""`[trainer]`: the model as it is trained, the optimizer, the loss, and what is kept on disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.losses import Loss
from trireme.config.section import EnvVars, Section

Dtype = Literal["bfloat16", "float32"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class ActivationCheckpointing(Section):
    """`[trainer.model.ac]`: recompute activations in the backward pass instead of keeping them."""

    freq: PositiveInt = 1
    """Distance between layers that are recomputed; 1 recomputes all (least memory), 2 every other."""
    mode: Literal["full", "selective"] = "full"
    """`selective` keeps the results of matrix products and attention. Not with `compile`, which recomputes what is
    cheap by itself."""


class Lora(Section):
    """`[trainer.model.lora]`: train low-rank adapters instead of the whole model."""

    rank: PositiveInt = 16
    """Rank of the adapters; 16-64 is typical."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: they are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in front of the adapters."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole in addition to the adapters."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    sync: Literal["merged", "adapter"] = "merged"
    """Weights that engines get: the whole model with the adapters added in, or the adapters alone."""

    @property
    def engine_rank(self) -> int:
        """The smallest rank that vLLM can be configured with and that is not below this one."""
        return min(allowed for allowed in ENGINE_RANKS if allowed >= self.rank)


ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`."""


class Experts(Section):
    """`[trainer.model.moe]`: mixture-of-experts models."""

    implementation: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    """Computation of the experts: one grouped product over all, a batched one, or one expert after the other."""
    router: Literal["trained", "frozen"] = "trained"
    """`frozen` leaves the routers as they are."""
    router_dtype: Literal["model", "float32"] = "float32"
    """Precision of the routers' scores; `model` takes `optimization_dtype`."""
    router_replay: bool = False
    """Send each token to the experts that the engine sent it to."""


TOWER = "model.visual"
"""The name of the vision encoder in models that pictures are given to."""


class Vlm(Section):
    """`[model.vlm]`: pictures in messages reach the engine and the trainer.

    Without this table only the text model of a checkpoint is trained, and its vision encoder is kept as it is.
    """

    freeze_vision_encoder: bool = True
    """Leave the vision encoder as it is; false trains it with the whole model, not beside adapters."""
    vision_encoder_attr: Literal["model.visual"] = "model.visual"
    """The name of the vision encoder in the model; others are refused."""
    language_model_attr: Literal["model.language_model"] = "model.language_model"
    """The name of the language model in the model; others are refused."""


class TrainerModel(Section):
    """`[trainer.model]`: how the model is held and run while it is trained."""

    name: str | None = None
    """Folder or hub name of the model; the run's `model.name` if not set."""
    from_scratch: bool = False
    """Read only `config.json` and start from random weights, drawn with the run's seed."""
    attn: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "sdpa"
    """Attention implementation. Both flash attentions are torch's own kernel, the others transformers'. If not set,
    eager for models that cap their attention scores (Gemma 2, VaultGemma)."""
    optimization_dtype: Dtype = "float32"
    """Precision of passes; bfloat16 on GPUs that have it, else float32, if not set. Parameters and optimizer state are
    float32."""
    reduce_dtype: Dtype = "float32"
    """Precision in which gradients are summed across ranks."""
    ac: ActivationCheckpointing | None = None
    """Activation checkpointing; a table: `[trainer.model.ac]` with `freq = 1`."""
    activation_offload: bool = False
    """Keep what the backward pass needs in CPU memory meanwhile."""
    lora: Lora | None = None
    """Low-rank adapters; the whole model is trained if not set."""
    moe: Experts = Experts()
    vlm: Vlm | None = None
    """The run's `[model.vlm]` if not set."""
    dp_replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP): groups of ranks that each shard a whole one."""
    cp: PositiveInt = 1
    """Context parallelism: this many ranks share each row, so that longer ones fit."""
    ep: PositiveInt = 1
    """Ranks that share the experts of a layer: only 1 as yet. FSDP shards experts, too."""
    head_chunk: PositiveInt = 1024
    """Tokens whose logits exist at once: the [tokens, vocabulary] tensor is never whole."""
    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer state in CPU memory; GPUs hold only the layer at work."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass (less memory, one more gather)."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def uses_flash(self) -> bool:
        return self.attn.startswith("flash")

    @property
    def trains_vision_encoder(self) -> bool:
        return self.vlm is not None and not self.vlm.freeze_vision_encoder


class Tokenizer(Section):
    """`[trainer.tokenizer]`."""

    name: str | None = None
    """Folder or hub name of the tokenizer; the model's if not set."""


class Optimizer(Section):
    """`[trainer.optim]`."""

    type: Literal["adamw", "adamw_8bit", "muon", "sgd", "sign_sgd"] = "adamw"
    """AdamW, the same with its moments in 8 bits, Muon (for the layers' matrices, with momentum 0.95; AdamW for the
    rest), SGD with momentum `betas[0]`, or SGD by the sign of the gradient alone, without state: each weight moves by
    `lr`, whatever `max_norm` is."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate; 0 trains nothing; 1e-6 to 1e-5 for whole models, ten times that for adapters."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of matrices, decoupled from the gradient (not with `sgd`). Float32 rounds it away below 3e-8 / `lr`."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """A gradient that is not finite: leave the weights as they are for this step, or end the run."""
    max_nonfinite: PositiveInt = 5
    """With `skip`: end the run after this many such steps in a row."""
    cpu_offload: bool = False
    """Keep the optimizer's state in CPU memory; a GPU holds that of the parameters at work. What is computed is the
    same. No effect on a CPU."""


STATE_CHUNK = 1 << 28
"""Bytes of parameters, on one rank, whose state is on the GPU at once with `cpu_offload`, unless one has more."""


class Scheduler(Section):
    """`[trainer.scheduler]`: the learning rate over steps."""

    type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after the warm-up; `wsd` stays, then falls over the last `decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0 to `optim.lr`."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of `linear`, `cosine` and `wsd` at `max_steps`."""
    decay_steps: PositiveInt | None = None
    """Steps of `wsd`'s fall; a tenth of `max_steps` if not set."""

    def decay_of(self, max_steps: int) -> int:
        """Steps of `wsd`'s fall in a run of so many, at least one."""
        return self.decay_steps if self.decay_steps is not None else max(1, max_steps // 10)


class Checkpoints(Section):
    """`[trainer.ckpt]`: what is needed to resume after a stop."""

    interval: PositiveInt | None = None
    """Save every this many steps; only at the end if not set."""
    keep_last: PositiveInt | None = None
    """Keep this many of the newest; all if not set."""
    keep_interval: PositiveInt | None = None
    """Steps divisible by this are kept for good."""
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    """Resume from this step's checkpoint; -1 takes the newest complete one. With `resume_from`, of the other run."""
    resume_without: tuple[Literal["optimizer", "scheduler", "data", "progress"], ...] = ()
    """Parts that a run does not take over with `resume_from`: the optimizer's state; the place in the learning rate's
    schedule, which then begins again; the place in the data, with difficulty pools, curriculum and baselines; the
    number of steps, so that this run counts from 0."""


class Training(Section):
    """Keys that `[trainer]` and a run of `sft` share."""

    model: TrainerModel = TrainerModel()
    tokenizer: Tokenizer = Tokenizer()
    optim: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    ckpt: Checkpoints = Checkpoints()
    num_ranks: PositiveInt | None = None
    """Trainer processes; one per trainer GPU, or 1 on CPU, if not set."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens of one packed micro-batch per rank; `seq_len` if not set."""
    threads: PositiveInt | None = None
    """CPU threads per rank; what an engine leaves of the cores, shared among ranks, if not set."""
    trace_path: Path | None = None
    """Folder for a trace by torch's profiler, `trace_RANK.json.gz`: of the second to the fourth step that a process
    takes."""
    memory_profiler_path: Path | None = None
    """Folder for a snapshot of the GPU's memory after each step, `step_N/rank_R.pickle`. No effect on a CPU."""


class TrainerConfig(Training):
    """`[trainer]`."""

    loss: Loss = Loss()
    num_iterations: PositiveInt = 1
    """Optimizer steps per batch, each on the whole of it; they make one version together."""
    batch_timeout_s: PositiveFloat = 3600.0
    """Longest time that the trainer waits for one batch."""
    save_logprobs: bool = True
    """Write the trainer's own logprob of each trained token (4 bytes) to `logprobs/`, for the dashboard."""
    try_step: bool | None = None
    """Before the first batch, try a step on a made-up row of full length, which finds too little memory early. On GPUs,
    if not set."""
    env_vars: EnvVars = {}
    """Environment variables of the trainer's ranks, over the run's `env_vars`."""


# Rules of these tables. Each yields one message per problem. `table` and `prefix` ("trainer.", or nothing) are names as
# the user writes them, which differ between `rl` and `sft`.


def model_problems(table: str, model: TrainerModel, ranks: int) -> Iterator[str]:
    """Yield what is wrong with `[trainer.model]` for any model."""
    # Ranks are divided into groups of equal size.
    for key, number in (("dp_replicate", model.dp_replicate), ("cp", model.cp)):
        if ranks % number:
            yield (
                f"{table}.{key} = {number} with {ranks} ranks - expected a divisor of their number: "
                f"{divisors_of(ranks)}. Set `{table}.{key}` to one of these, or change the number of ranks."
            )

    # Combinations that no kernel or compiler supports.
    if model.uses_flash and model.optimization_dtype == "float32":
        yield (
            f'{table}.attn = "{model.attn}" with optimization_dtype = "float32" - expected bfloat16, the only precision'
            f' that it and the trainer share. Set `{table}.optimization_dtype = "bfloat16"`, or `attn = "sdpa"`.'
        )
    if model.cp > 1 and model.attn == "eager":
        yield (
            f'{table}.attn = "eager" with {table}.cp = {model.cp} - expected sdpa, flex_attention or flash attention, '
            f'with which ranks can share a row. Set `{table}.attn = "sdpa"`, or `cp = 1`.'
        )
    if model.compile and model.ac is not None and model.ac.mode == "selective":
        yield (
            f'`{table}.ac.mode = "selective"` with `{table}.compile = true` - expected one of them: a compiled block'
            " hides the operations of which selective recomputation keeps some. The compiler recomputes what is cheap"
            f' by itself: remove `[{table}.ac]`, or set `mode = "full"`.'
        )

    if model.trains_vision_encoder and model.lora is not None:
        yield (
            f"`model.vlm.freeze_vision_encoder = false` with `[{table}.lora]` - expected true, as adapters leave all "
            "else as it is, the vision encoder included. Remove the line, or train the whole model without the table."
        )
    if model.ep > 1:
        yield f"{table}.ep = {model.ep} - expected 1: experts are sharded by FSDP alone. Remove the line."


def divisors_of(number: int) -> str:
    """Return all divisors, for messages."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def lora_problems(table: str, lora: Lora | None) -> Iterator[str]:
    """Yield what is wrong with the adapters for any model."""
    if lora is None:
        return
    if not lora.target_modules and not lora.modules_to_save:
        yield f'`{table}.target_modules` is empty - expected layers. Write `{table}.target_modules = ["all-linear"]`.'
    if both := sorted(set(lora.target_modules) & set(lora.modules_to_save)):
        yield (
            f"`{table}` names {', '.join(both)} in `target_modules` and in `modules_to_save` - expected each in one: "
            "a module is adapted or trained whole. Remove it from one of the two."
        )
    if "embed_tokens" in lora.target_modules:
        yield (
            f"`{table}.target_modules` names embed_tokens - expected linear layers: an embedding is trained whole or "
            f'not at all. Write `{table}.modules_to_save = ["embed_tokens"]` instead.'
        )


def optim_problems(
    prefix: str, optim: Optimizer, scheduler: Scheduler, model: TrainerModel, *, max_steps: int | None
) -> Iterator[str]:
    """Yield what is wrong with the optimizer and its schedule.

    Args:
        max_steps: None if it is not known before the data are read.
    """
    if scheduler.min_lr > optim.lr:
        yield (
            f"{prefix}scheduler.min_lr = {scheduler.min_lr:g}, {prefix}optim.lr = {optim.lr:g} - expected the rate to "
            f"fall to `min_lr`. Set it to {optim.lr / 10:g} or leave it out."
        )

    # Warm-up and decay of `wsd` must not overlap.
    table, warmup = f"{prefix}scheduler", scheduler.warmup_steps
    if scheduler.type == "wsd" and max_steps and warmup + (decay := scheduler.decay_of(max_steps)) > max_steps:
        yield (
            f"{table}.warmup_steps = {warmup} and decay_steps = {decay} of max_steps = {max_steps} - expected at most "
            f"{max_steps} steps, and they take {warmup + decay}. Lower one of them, or raise `max_steps`."
        )

    # Keys that the chosen schedule does not read.
    falls = ("linear", "cosine", "wsd")
    for key, value, types in (("min_lr", scheduler.min_lr, falls), ("decay_steps", scheduler.decay_steps, falls[-1:])):
        if value and scheduler.type not in types:
            yield (
                f'{table}.{key} = {value:g} with type = "{scheduler.type}" - expected no such key: it belongs to '
                f'{", ".join(types)}. Remove it, or set `{table}.type = "{types[-1]}"`.'
            )

    if optim.cpu_offload and model.fsdp_cpu_offload:
        yield (
            f"{prefix}optim.cpu_offload = true with {prefix}model.fsdp_cpu_offload = true - expected one of them: the "
            "second keeps the optimizer's state in CPU memory too. Remove the first, or the second for more speed."
        )
    if optim.type == "muon" and model.lora is not None:
        yield (
            f'{prefix}optim.type = "muon" with `[{prefix}model.lora]` - expected another optimizer, as Muon '
            "orthogonalises whole matrices and an adapter is the product of two. "
            f'Set `{prefix}optim.type = "adamw"`, or remove the table.'
        )


def optim_launch_problems(prefix: str, optim: Optimizer, device: str) -> Iterator[str]:
    """Yield what the optimizer lacks on this machine."""
    has_compiler = any(shutil.which(name) for name in ("gcc", "cc", "clang"))
    if optim.type == "adamw_8bit" and device == "cuda" and not has_compiler:
        yield (
            f'{prefix}optim.type = "adamw_8bit" on a GPU, and there is no C compiler - expected gcc or clang, with '
            f'which its kernels are compiled. Install one, or set `{prefix}optim.type = "adamw"`.'
        )


def allocator_problems(broadcast: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the setting of torch's allocator with which memory handles do not open.

    The receiver of an expandable segment takes the sender's file descriptors (`pidfd_getfd`, c10's
    `ExpandableSegment::fromShared`). Linux allows that only to a process that may trace the sender: not in most
    containers, nor between siblings if `kernel.yama.ptrace_scope` is 1.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if broadcast == "ipc" else ():
        if re.search(r"expandable_segments\s*:\s*True", value := variables.get(name, "")):
            yield (
                f'{name}={value} with weight_broadcast.type = "ipc" - expected ordinary segments, whose memory another '
                f"process can open by a handle. Unset {name}, or take `expandable_segments` out of it."
            )
