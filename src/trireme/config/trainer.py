"""`[trainer]`: the model as it is trained, the optimizer, the loss, and what is kept on disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import Section

Dtype = Literal["bfloat16", "float32"]


class ActivationCheckpointing(Section):
    """`[trainer.model.ac]`: recompute activations in the backward pass instead of keeping them."""

    freq: PositiveInt = 1
    """Every how many layers one is recomputed; 1 recomputes all (least memory), 2 every other."""


class Lora(Section):
    """`[trainer.model.lora]`: train low-rank adapters instead of the whole model."""

    rank: PositiveInt = 16
    """Rank of the adapters; 16-64 is typical."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters: they are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in front of the adapters."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole beside the adapters."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""


class TrainerModel(Section):
    """`[trainer.model]`: how the model is held and run while it is trained."""

    name: str | None = None
    """Folder or hub name of the model; the run's `model.name` where not given."""
    from_scratch: bool = False
    """Read only `config.json` and start from random weights, drawn with the run's seed."""
    attn: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = "sdpa"
    """Attention implementation of transformers."""
    optimization_dtype: Dtype = "float32"
    """Precision of the forward and backward pass. Parameters and optimizer state are always float32."""
    reduce_dtype: Dtype = "float32"
    """Precision in which gradients are summed across ranks."""
    ac: ActivationCheckpointing | None = None
    """Activation checkpointing; a table: `[trainer.model.ac]` with `freq = 1`."""
    lora: Lora | None = None
    """Low-rank adapters; the whole model is trained where not given."""
    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer state in CPU memory; GPUs hold only the layer at work."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass (less memory, one more gather)."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class Tokenizer(Section):
    """`[trainer.tokenizer]`."""

    name: str | None = None
    """Folder or hub name of the tokenizer; the model's where not given."""


class Optimizer(Section):
    """`[trainer.optim]`."""

    type: Literal["adamw", "sgd"] = "adamw"
    """AdamW (decoupled weight decay), or plain SGD with momentum `betas[0]`."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate; 1e-6 to 1e-5 for whole models, ten times that for adapters."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; 0 is common for RL."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_norm: PositiveFloat = 1.0
    """Gradients with a larger global norm are scaled down to it."""


class Scheduler(Section):
    """`[trainer.scheduler]`: the learning rate over steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0 to `optim.lr`."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where `linear` and `cosine` end, at `max_steps`."""


class Loss(Section):
    """`[trainer.loss]`: see `trireme.algo.loss` for the formula and its sources."""

    type: Literal["importance"] = "importance"
    """Token-level importance-weighted policy gradient against the behaviour policy's logprobs."""
    ratio_low: Annotated[float, Field(ge=0)] = 0.125
    """Tokens whose importance ratio is below this get no gradient; 0 masks none."""
    ratio_high: PositiveFloat = 8.0
    """Tokens whose importance ratio is above this get no gradient."""
    kl_tau: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the behaviour policy; 0 leaves it out."""


class Checkpoints(Section):
    """`[trainer.ckpt]`: what is needed to go on after a stop."""

    interval: PositiveInt | None = None
    """Save every this many steps; only at the end where not given."""
    keep_last: PositiveInt | None = None
    """Keep this many of the newest; all where not given."""
    keep_interval: PositiveInt | None = None
    """Steps divisible by this are kept for good."""
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    """Go on from this step's checkpoint; -1 takes the newest complete one."""


class TrainerConfig(Section):
    """`[trainer]`."""

    model: TrainerModel = TrainerModel()
    tokenizer: Tokenizer = Tokenizer()
    optim: Optimizer = Optimizer()
    scheduler: Scheduler = Scheduler()
    loss: Loss = Loss()
    ckpt: Checkpoints = Checkpoints()
    num_ranks: PositiveInt | None = None
    """Trainer processes; one per trainer GPU, or 1 on CPU, where not given."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens of one packed micro-batch per rank; `seq_len` where not given."""
    threads: PositiveInt | None = None
    """CPU threads per rank; what the engine leaves of the cores, shared among ranks, where not given."""
    batch_timeout_s: PositiveFloat = 3600.0
    """How long the trainer waits for one batch before it gives up."""
