"""The single file of `vf-rl`: its keys, with their defaults there. `vf_rl.translate` makes a run of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trireme.config.section import Section

TARGETS = ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
Share = Annotated[float, Field(ge=0, lt=1)]


class VfWandb(Section):
    """`[trainer.args.wandb]`: where metrics go with `report_to = "wandb"`."""

    project: str = "trireme"
    """Project."""
    name: str | None = None
    """Name of the run there; `run_name` where not given."""


class VfArgs(Section):
    """`[trainer.args]`: the recipe."""

    run_name: str | None = None
    """Name of the run; its folder is `outputs/<run_name>`. The environment's name where not given."""
    output_dir: str | None = None
    """Folder of the run; `outputs/<run_name>` where not given."""
    seed: int = 42
    """Seed of everything random."""
    resume_from_checkpoint: str | None = None
    """`true` for the newest, or the folder `checkpoint-N` to go back to."""

    use_lora: bool = True
    """Train low-rank adapters; `false` trains the whole model."""
    lora_rank: PositiveInt = 16
    """Rank of the adapters."""
    lora_alpha: PositiveFloat = 16
    """Scale of the adapters: they are multiplied by alpha / rank."""
    lora_dropout: Share = 0.0
    """Dropout in front of the adapters."""
    lora_target_modules: tuple[str, ...] = TARGETS
    """Names of the layers that get an adapter."""
    lora_modules_to_save: tuple[str, ...] | None = None
    """Names of modules that are trained whole."""
    lora_use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""

    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to it."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    adam_beta1: Share = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Share = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    bf16: bool = True
    """Forward and backward pass in bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them."""
    max_steps: PositiveInt = 500
    """Training steps."""
    num_iterations: PositiveInt = 1
    """Optimizer steps per batch."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference model."""
    sync_ref_model: bool = False
    """Make the policy the reference from time to time."""
    ref_model_sync_steps: PositiveInt | None = None
    """Steps from one such time to the next."""
    mask_truncated_completions: bool = False
    """Train on nothing of rollouts that ran out of tokens (overlong filtering)."""
    mask_env_responses: bool = True
    """Train on what the model wrote only, not on what tools and users answered."""

    micro_batch_size: PositiveInt = 8
    """Rollouts per GPU at once."""
    batch_size: PositiveInt = 512
    """Rollouts per step."""
    rollouts_per_example: PositiveInt = 16
    """Rollouts per example: the group."""
    num_generations: PositiveInt | None = None
    """Older name of `rollouts_per_example`."""
    per_device_train_batch_size: PositiveInt | None = None
    """Older name of `micro_batch_size`."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Older way to say `batch_size`: micro-batches of each GPU per step."""
    max_seq_len: PositiveInt = 2048
    """Longest sample, in tokens."""
    max_prompt_len: PositiveInt | None = None
    """Longest prompt, in tokens."""

    max_tokens: PositiveInt | None = None
    """Most tokens per model turn."""
    temperature: NonNegativeFloat = 0.7
    """Softmax temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: int | None = None
    """Sample from this many most likely tokens only."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens less likely than this times the most likely one."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 makes tokens that occurred less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occurred."""
    frequency_penalty: float = 0.0
    """Subtracted from logits for each occurrence."""

    num_batches_ahead: NonNegativeInt = 1
    """Steps that generation may run ahead of training."""
    generation_timeout: PositiveFloat = 600.0
    """Seconds that generating may take."""
    max_concurrent: PositiveInt = 1024
    """Requests under way at once."""
    generation_batch_size: PositiveInt | None = None
    """Completions generated at once."""
    vllm_server_host: str | None = None
    """Address of the vLLM server."""
    vllm_server_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port of the vLLM server."""
    vllm_server_timeout: PositiveFloat = 300.0
    """Seconds that it may take to come up."""

    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    """Evaluate on held-out examples every `eval_steps` steps."""
    eval_steps: PositiveInt | None = None
    """Steps from one evaluation to the next."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """Save a checkpoint every `save_steps` steps."""
    save_steps: PositiveInt = 50
    """Steps from one checkpoint to the next."""
    save_total_limit: PositiveInt | None = None
    """Keep this many of the newest checkpoints; all where not given."""

    logging_steps: PositiveInt = 1
    """Steps from one line of metrics to the next."""
    log_completions: bool = True
    """Show what the model writes, from time to time."""
    num_completions_to_print: PositiveInt = 1
    """Completions shown each time."""
    report_to: Literal["none", "wandb"] = "none"
    """Where metrics go besides the run's folder."""
    wandb: VfWandb | None = None
    ds3_gather_for_generation: bool = True
    """Of DeepSpeed: gather the weights to generate."""


class VfEnv(Section):
    """`[env]`: the environment."""

    id: str
    """Its name."""
    args: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`."""


class VfInference(Section):
    """`[inference]`: vLLM."""

    gpus: PositiveInt
    """Number of GPUs for vLLM, counted from the first."""
    args: dict[str, Any] = {}
    """Arguments of vLLM's server, by its own names."""


class VfTrainer(Section):
    """`[trainer]`: the trainer."""

    gpus: PositiveInt
    """Number of GPUs for training, after those of vLLM."""
    args: VfArgs = VfArgs()


class VfRl(Section):
    """The file of a run of `vf-rl`."""

    model: str
    """The model that the run starts from."""
    env: VfEnv
    inference: VfInference
    trainer: VfTrainer
