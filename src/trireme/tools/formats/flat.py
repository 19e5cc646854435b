"""The flat files of `prime-rl` and of hosted training, which differ in how they name the model and count GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from trireme.base.devices import Devices
from trireme.config.orchestrator import Environment
from trireme.config.run import RunConfig, Wandb
from trireme.config.sampling import Sampling
from trireme.config.section import Section
from trireme.config.translation import Refused, Settings
from trireme.tools.formats.translation import Format, To, on_gpus

ADAPTER_LR, WHOLE_LR = 1e-5, 1e-6
"""Where the guide to these formats begins, with adapters and without."""
TURNS = 4  # answers of `max_tokens` that fit into a sample if the file does not say how long it may be


def name_run(name: str | None, file: Common, devices: Devices) -> Settings:
    return {"name": name or file.env[0].resolved_name}


def limit_samples(seq_len: int | None, file: Common, devices: Devices) -> Settings:
    # A sample holds all turns of a rollout, so it must be longer than one answer.
    usual, max_tokens = RunConfig.model_fields["seq_len"].default, file.sampling and file.sampling.max_tokens
    return {"seq_len": seq_len or max(usual, TURNS * (max_tokens or 0))}


def choose_rate(lr: float | None, file: Common, devices: Devices) -> Settings:
    return {"trainer.optim.lr": lr or (ADAPTER_LR if file.use_lora else WHOLE_LR)}


def add_adapters(wanted: bool, file: Common, devices: Devices) -> Settings:
    return {"trainer.model.lora": {}} if wanted else {}


def only_with(switch: str, ours: str) -> To:
    """Return the destination of a key that means something only if another one is true."""

    def rule(value: float | None, file: Common, devices: Devices) -> Settings:
        if value is not None and not getattr(file, switch):
            raise Refused(f"expected `{switch} = true` with it. Add that, or remove the key.")
        return {ours: value}

    return To(rule, like=ours)


def split_gpus(num_gpus: int | None, file: Flat, devices: Devices) -> Settings:
    # Without a number the run divides the GPUs of the machine itself.
    if num_gpus is None:
        return {}

    # Engine and trainer share a single GPU.
    if num_gpus == 1:
        return {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}

    tp = file.tensor_parallel_size or 1
    engines = max(1, num_gpus // 2 // tp) * tp  # half of the GPUs, in whole engines
    return {"inference_gpus": engines, "trainer_gpus": num_gpus - engines}


def check_pipeline(size: int, file: Flat, devices: Devices) -> Settings:
    if size > 1:
        raise Refused(
            "expected 1: engines are split by tensors, not by layers, so that each GPU can be sent its weights. "
            "Raise `tensor_parallel_size` instead."
        )
    return {}


class Saving(Section):
    """`[checkpointing]`: what is kept on disk."""

    save_every_n_steps: Annotated[PositiveInt | None, To("trainer.ckpt.interval")] = None
    keep_n_checkpoints: Annotated[PositiveInt | None, To("trainer.ckpt.keep_last")] = None


class Common(Section):
    """Keys that both formats have."""

    name: Annotated[str | None, To(name_run)] = None
    """Name of the run; the first environment's where not given."""
    output_dir: Annotated[str | None, To("output_dir")] = None
    seed: Annotated[int | None, To("seed")] = None
    max_steps: Annotated[PositiveInt | None, To("max_steps")] = None
    batch_size: Annotated[PositiveInt | None, To("orchestrator.batch_size")] = None
    rollouts_per_example: Annotated[PositiveInt | None, To("orchestrator.rollouts_per_example")] = None
    seq_len: Annotated[PositiveInt | None, To(limit_samples)] = None
    """Longest sample, in tokens."""
    learning_rate: Annotated[PositiveFloat | None, To(choose_rate)] = None
    """Peak learning rate."""
    use_lora: Annotated[bool, To(add_adapters)] = False
    """Train low-rank adapters instead of the whole model."""
    lora_rank: Annotated[PositiveInt | None, only_with("use_lora", "trainer.model.lora.rank")] = None
    lora_alpha: Annotated[PositiveFloat | None, only_with("use_lora", "trainer.model.lora.alpha")] = None
    use_difficulty_filtering: Annotated[bool, To("orchestrator.buffer.use_difficulty_filtering")] = False
    difficulty_threshold: Annotated[
        NonNegativeFloat | None, only_with("use_difficulty_filtering", "orchestrator.buffer.difficulty_threshold")
    ] = None
    max_async_level: Annotated[NonNegativeInt | None, To("max_async_level")] = None
    sampling: Annotated[Sampling | None, To("orchestrator.sampling")] = None
    env: Annotated[tuple[Environment, ...], To("orchestrator.env")]
    """`[env]` or `[[env]]`: environments."""
    checkpointing: Saving | None = None
    wandb: Annotated[Wandb | None, To("wandb")] = None
    env_file: Annotated[tuple[Path, ...], To(None, "given to the run by `prime-rl` and `trireme submit`")] = ()


class Flat(Common):
    """A flat file of `prime-rl`."""

    model_name: Annotated[str, To("model.name")]
    num_gpus: Annotated[PositiveInt | None, on_gpus(split_gpus)] = None
    """GPUs for engines and trainer together; all where not given."""
    tensor_parallel_size: Annotated[PositiveInt | None, on_gpus("inference.parallel.tp")] = None
    pipeline_parallel_size: Annotated[PositiveInt, To(check_pipeline, "always 1 here")] = 1


class Hosted(Common):
    """A file of hosted training."""

    model: Annotated[str, To("model.name")]


LONG_SAMPLES: Settings = {"trainer.model.optimization_dtype": "bfloat16", "trainer.model.ac.freq": 1}
"""What makes long samples fit on GPUs. These formats have no keys for it."""

FLAT = Format(Flat, presets_on_gpus=LONG_SAMPLES)
HOSTED = Format(Hosted, presets_on_gpus=LONG_SAMPLES)
