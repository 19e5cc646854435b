"""The single-file format of `vf-rl`: its keys with their defaults there, and what each becomes here."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trireme.base.devices import Devices
from trireme.config.orchestrator import Environment, OrchestratorConfig
from trireme.config.run import Wandb
from trireme.config.section import Section
from trireme.config.translation import Refused, Settings
from trireme.tools.formats.translation import Format, To, ToEach, if_true, on_gpus

TARGETS = ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
CPU_ROW_TOKENS = 512
SAMPLE_STEPS = 5  # steps from one look at completions to the next
Share = Annotated[float, Field(ge=0, lt=1)]

MODEL_FLAGS = ("dtype", "max_model_len", "enforce_eager", "enable_auto_tool_choice", "tool_call_parser")
VLLM_FLAGS = {
    "model": To("model.name"),
    "host": To("inference.server.host"),
    "port": To("inference.server.port"),
    **{flag: To(f"inference.model.{flag}") for flag in (*MODEL_FLAGS, "reasoning_parser", "trust_remote_code")},
    "tensor_parallel_size": To("inference.parallel.tp"),
    "data_parallel_size": To("inference.parallel.dp"),
    "gpu_memory_utilization": To("inference.gpu_memory_utilization"),
    "max_num_seqs": To("inference.max_num_seqs"),
    "disable_log_requests": To(None, "not needed here: requests are not logged"),
    "enable_log_requests": To(None, "not needed here: the journal has every rollout"),
}
"""Flags of vLLM that have a key here, or need none."""


def name_run(name: str | None, file: VfRl, devices: Devices) -> Settings:
    # The run's folder is OUTPUT_DIR/NAME here, so the last part of their folder becomes the name.
    folder = file.trainer.args.output_dir
    return {"name": PurePath(folder).name if folder else name or file.env.resolved_name}


def place_run(folder: str | None, file: VfRl, devices: Devices) -> Settings:
    return {"output_dir": str(PurePath(folder).parent)} if folder else {}


def set_resume(place: str | None, file: VfRl, devices: Devices) -> Settings:
    if not place or place.lower() == "false":
        return {}

    # Only the folder's name counts: a run resumes from its own checkpoints.
    step = PurePath(place).name.removeprefix("checkpoint-")
    if not (place.lower() == "true" or step.isdigit()):
        raise Refused("expected true, or a folder `checkpoint-N` of this run. Write one of them.")
    return {"trainer.ckpt.resume_step": int(step)} if step.isdigit() else {"resume": True}


def set_environment(env: Environment, file: VfRl, devices: Devices) -> Settings:
    args = file.trainer.args
    # Limits in the environment's own table win over those of the trainer.
    limits = {"max_concurrent": args.max_concurrent, "rollout_timeout_s": args.generation_timeout}
    return {"orchestrator.env": [limits | env.model_dump(mode="json", exclude_unset=True)]}


def set_dtype(bf16: bool, file: VfRl, devices: Devices) -> Settings:
    """Require that a file asks for bfloat16 on a CPU: it is slower there."""
    is_wanted = bf16 and (devices.gpus or "bf16" in file.trainer.args.model_fields_set)
    return {"trainer.model.optimization_dtype": "bfloat16" if is_wanted else "float32"}


def lora(key: str) -> To:
    no_lora = "without effect: use_lora = false"
    return To(f"trainer.model.lora.{key}", no_lora, lambda file, devices: file.trainer.args.use_lora)


def saves(file: VfRl, devices: Devices) -> bool:
    return file.trainer.args.save_strategy != "no"


def set_betas(beta: float, file: VfRl, devices: Devices) -> Settings:
    return {"trainer.optim.betas": [file.trainer.args.adam_beta1, file.trainer.args.adam_beta2]}


def set_scheduler(type: str, file: VfRl, devices: Devices) -> Settings:
    return {"trainer.scheduler.type": type.removesuffix("_with_warmup")}


def check_sync(wanted: bool, file: VfRl, devices: Devices) -> Settings:
    if wanted and not file.trainer.args.ref_model_sync_steps:
        raise Refused("expected `ref_model_sync_steps` with it. Write how many steps lie between two updates.")
    return {}


def set_reference(steps: int | None, file: VfRl, devices: Devices) -> Settings:
    if steps and file.trainer.args.beta == 0:
        raise Refused("expected `beta` above 0: without it there is no reference model. Set `beta`, or remove the key.")
    return {"trainer.loss.reference_update_every": steps}


def check_mask(mask: bool, file: VfRl, devices: Devices) -> Settings:
    if not mask:
        raise Refused("expected true: tokens that the model did not write are never trained on. Remove the key.")
    return {}


def set_row_tokens(rollouts: int | None, file: VfRl, devices: Devices) -> Settings:
    """Return room for so many rollouts of full length."""
    if rollouts is None:
        return {}

    # On a CPU the cost of attention grows with the square of the row, so rows stay short.
    longest = file.trainer.args.max_seq_len
    most = rollouts * longest if devices.gpus else max(longest, CPU_ROW_TOKENS)
    return {"trainer.micro_batch_tokens": min(rollouts * longest, most)}


def multiply_batch(times: int | None, file: VfRl, devices: Devices) -> Settings:
    """Return the batch: micro-batches of each GPU, times GPUs, times rollouts in one."""
    rollouts = file.trainer.args.per_device_train_batch_size or file.trainer.args.micro_batch_size
    return {"orchestrator.batch_size": times * rollouts * file.trainer.gpus} if times else {}


def sampling(key: str) -> To:
    def rule(value: Any, file: VfRl, devices: Devices) -> Settings:
        # A table for evaluations would switch them on, so it is set only if the run evaluates.
        tables = ("orchestrator.sampling", *(["orchestrator.eval.sampling"] if evaluates(file, devices) else []))
        return {f"{table}.{key}": value for table in tables}

    return To(rule, like=f"orchestrator.sampling.{key}")


def evaluates(file: VfRl, devices: Devices) -> bool:
    """Return whether the run evaluates. `eval_steps` alone asks for it, too."""
    args = file.trainer.args
    return args.eval_strategy == "steps" or bool(args.eval_steps and "eval_strategy" not in args.model_fields_set)


def set_timeouts(seconds: float, file: VfRl, devices: Devices) -> Settings:
    """The orchestrator waits for the server, too, and never less than by default."""
    waits = max(seconds, OrchestratorConfig().engine_timeout_s)
    return {"inference.start_timeout_s": seconds, "orchestrator.engine_timeout_s": waits}


def set_project(to: str, file: VfRl, devices: Devices) -> Settings:
    return {"wandb": file.trainer.args.wandb or Wandb()} if to == "wandb" else {}


def set_wandb(table: Wandb | None, file: VfRl, devices: Devices) -> Settings:
    """The table alone asks for it, too."""
    args = file.trainer.args
    is_off = args.report_to == "none" and "report_to" in args.model_fields_set
    return {} if is_off else {"wandb": table}


class VfArgs(Section):
    """`[trainer.args]`: the recipe."""

    run_name: Annotated[str | None, To(name_run)] = None
    """Name of the run; its folder is `outputs/<run_name>`. The environment's name where not given."""
    output_dir: Annotated[str | None, To(place_run)] = None
    """Folder of the run; `outputs/<run_name>` where not given."""
    seed: Annotated[int, To("seed")] = 42
    resume_from_checkpoint: Annotated[
        str | None, To(set_resume), BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)
    ] = None
    """`true` for the newest, or the folder `checkpoint-N` to go back to."""

    use_lora: Annotated[bool, To(None, "true sets [trainer.model.lora]")] = True
    """Train low-rank adapters; `false` trains the whole model."""
    lora_rank: Annotated[PositiveInt, lora("rank")] = 16
    lora_alpha: Annotated[PositiveFloat, lora("alpha")] = 16
    lora_dropout: Annotated[Share, lora("dropout")] = 0.0
    lora_target_modules: Annotated[tuple[str, ...], lora("target_modules")] = TARGETS
    lora_modules_to_save: Annotated[tuple[str, ...] | None, lora("modules_to_save")] = None
    lora_use_rslora: Annotated[bool, lora("use_rslora")] = False

    learning_rate: Annotated[PositiveFloat, To("trainer.optim.lr")] = 1e-5
    lr_scheduler_type: Annotated[Literal["constant", "constant_with_warmup", "linear", "cosine"], To(set_scheduler)] = (
        "constant"
    )
    """Shape of the learning rate after the warm-up."""
    warmup_steps: Annotated[NonNegativeInt, To("trainer.scheduler.warmup_steps")] = 0
    max_grad_norm: Annotated[PositiveFloat, To("trainer.optim.max_norm")] = 1.0
    weight_decay: Annotated[NonNegativeFloat, To("trainer.optim.weight_decay")] = 0.0
    adam_beta1: Annotated[Share, To(set_betas)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[Share, To(set_betas)] = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: Annotated[PositiveFloat, To("trainer.optim.eps")] = 1e-8
    bf16: Annotated[bool, To(set_dtype)] = True
    """Forward and backward pass in bfloat16."""
    gradient_checkpointing: Annotated[bool, To(if_true("trainer.model.ac.freq", 1))] = False
    """Recompute activations instead of keeping them."""
    max_steps: Annotated[PositiveInt, To("max_steps")] = 500
    num_iterations: Annotated[PositiveInt, To("trainer.num_iterations")] = 1
    beta: Annotated[NonNegativeFloat, To("trainer.loss.beta")] = 0.0
    sync_ref_model: Annotated[bool, To(check_sync, "see ref_model_sync_steps")] = False
    """Make the policy the reference from time to time."""
    ref_model_sync_steps: Annotated[PositiveInt | None, To(set_reference)] = None
    """Steps from one such time to the next."""
    mask_truncated_completions: Annotated[bool, To(if_true("orchestrator.filters.truncated", "mask"))] = False
    """Train on nothing of rollouts that ran out of tokens (overlong filtering)."""
    mask_env_responses: Annotated[bool, To(check_mask, "always true here")] = True

    micro_batch_size: Annotated[PositiveInt, To(set_row_tokens)] = 8
    """Rollouts per GPU at once."""
    batch_size: Annotated[PositiveInt, To("orchestrator.batch_size")] = 512
    rollouts_per_example: Annotated[PositiveInt, To("orchestrator.rollouts_per_example")] = 16
    num_generations: Annotated[PositiveInt | None, To("orchestrator.rollouts_per_example")] = None
    """Older name of `rollouts_per_example`."""
    per_device_train_batch_size: Annotated[PositiveInt | None, To(set_row_tokens)] = None
    """Older name of `micro_batch_size`."""
    gradient_accumulation_steps: Annotated[PositiveInt | None, To(multiply_batch)] = None
    """Older way to say `batch_size`: micro-batches of each GPU per step."""
    max_seq_len: Annotated[PositiveInt, To("seq_len")] = 2048
    max_prompt_len: Annotated[PositiveInt | None, To(None, "not needed: prompt and completions share max_seq_len")] = (
        None
    )

    max_tokens: Annotated[PositiveInt | None, sampling("max_tokens")] = None
    temperature: Annotated[NonNegativeFloat, sampling("temperature")] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1), sampling("top_p")] = 1.0
    top_k: Annotated[int | None, sampling("top_k")] = None
    min_p: Annotated[float, Field(ge=0, le=1), sampling("min_p")] = 0.0
    repetition_penalty: Annotated[PositiveFloat, sampling("repetition_penalty")] = 1.0
    presence_penalty: Annotated[float, sampling("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, sampling("frequency_penalty")] = 0.0

    num_batches_ahead: Annotated[NonNegativeInt, To("max_async_level")] = 1
    generation_timeout: Annotated[PositiveFloat, To(None, "rollout_timeout_s of the environment")] = 600.0
    """Seconds that generating may take."""
    max_concurrent: Annotated[PositiveInt, To("orchestrator.max_concurrent")] = 1024
    generation_batch_size: Annotated[
        PositiveInt | None, To(None, "not needed: vLLM takes requests as they come; see max_concurrent")
    ] = None
    vllm_server_host: Annotated[str | None, To("inference.server.host")] = None
    vllm_server_port: Annotated[int, Field(ge=1, le=65535), To("inference.server.port")] = 8000
    """Port of the vLLM server."""
    vllm_server_timeout: Annotated[PositiveFloat, To(set_timeouts)] = 300.0
    """Seconds that it may take to come up."""

    eval_strategy: Annotated[Literal["no", "steps"], To(None, "see eval_steps")] = "no"
    """Evaluate on held-out examples every `eval_steps` steps; there are no epochs here."""
    eval_steps: Annotated[PositiveInt | None, To("orchestrator.eval.interval", "see eval_strategy", evaluates)] = None
    """Steps from one evaluation to the next."""
    save_strategy: Annotated[Literal["no", "steps"], To(None, "saved after the last step, and as save_steps says")] = (
        "steps"
    )
    """Save a checkpoint every `save_steps` steps; there are no epochs here."""
    save_steps: Annotated[PositiveInt, To("trainer.ckpt.interval", 'without effect: save_strategy = "no"', saves)] = 50
    save_total_limit: Annotated[PositiveInt | None, To("trainer.ckpt.keep_last")] = None

    logging_steps: Annotated[PositiveInt, To("console.every")] = 1
    log_completions: Annotated[
        bool, To(if_true("console.samples_every", SAMPLE_STEPS), "no completions are shown; all are in the journal")
    ] = True
    """Show what the model writes, from time to time."""
    num_completions_to_print: Annotated[PositiveInt, To("console.num_samples")] = 1
    report_to: Annotated[Literal["none", "wandb"], To(set_project, "see [wandb]")] = "none"
    """Where metrics go besides the run's folder."""
    wandb: Annotated[Wandb | None, To(set_wandb, 'without effect: report_to = "none"')] = None
    ds3_gather_for_generation: Annotated[bool, To(None, "not needed: weights are sent tensor by tensor")] = True


class VfInference(Section):
    """`[inference]`: vLLM."""

    gpus: Annotated[PositiveInt, on_gpus("inference_gpus")]
    """Number of GPUs for vLLM, counted from the first."""
    args: Annotated[dict[str, Any], ToEach(VLLM_FLAGS, rest="inference.args")] = {}
    """Arguments of vLLM's server, by its own names."""


class VfTrainer(Section):
    """`[trainer]`: the trainer."""

    gpus: Annotated[PositiveInt, on_gpus("trainer_gpus")]
    """Number of GPUs for training, after those of vLLM."""
    args: VfArgs = VfArgs()


class VfRl(Section):
    """The file of a run of `vf-rl`."""

    model: Annotated[str, To("model.name")]
    env: Annotated[Environment, To(set_environment)]
    """`[env]`: the environment."""
    inference: VfInference
    trainer: VfTrainer


VF_RL = Format(VfRl, presets={"console.style": "vf-rl"})
