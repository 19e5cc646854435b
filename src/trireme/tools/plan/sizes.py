"""From a configuration to the numbers that memory and time are worked out from. No torch, no weights, no hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.algo.activations import SHORT, Pass
from trireme.algo.architecture import Architecture, architecture_of, is_known
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import Lora, Optimizer, TrainerModel
from trireme.tools.plan.known_models import KNOWN_MODELS, known_config
from trireme.tools.plan.machine import Machine
from trireme.tools.plan.memory import Training
from trireme.tools.plan.serving import GIB, Serving

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LARGE_GPU, HUGE_GPU = 70 * GIB, 160 * GIB  # from here on vLLM takes in more tokens at once
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Sized:
    """A model, and whether its family is one whose parameters we count to the last."""

    architecture: Architecture
    name: str
    is_exact: bool


def read_sizes(name: str) -> Sized:
    """Of a folder, a model in the hub's cache on this disk, or one of the table.

    Raises:
        ConfigError: none has its `config.json`, or that lacks a size.
    """
    config = read_config(name)
    try:
        return Sized(architecture_of(config), name, is_known(config))
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"The config.json of {name!r} has no {error} - sizes as of a decoder were expected. Plan with a model that "
            "transformers loads with AutoModelForCausalLM."
        ) from error


def read_config(name: str) -> dict[str, Any]:
    file = next((file for file in (Path(name) / "config.json", *_cached(name)) if file.is_file()), None)
    if file is not None:
        config: dict[str, Any] = json.loads(file.read_text())
        return config
    known = known_config(name)
    if known is None:
        raise ConfigError(
            f"{name!r} is no folder with a config.json, nor in the hub's cache here, nor one of the models that are "
            f"known without either: {', '.join(KNOWN_MODELS)}. Set `model.name` to one of these, or copy the model's "
            "config.json into a folder and name that: a plan needs nothing else of it."
        )
    return known


def _cached(name: str) -> list[Path]:
    """Newest first."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json") if "/" in name else ()
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


def training_of(config: RunConfig, model: Architecture, *, rows: int) -> Training:
    trainer, broadcast = config.trainer, config.weight_broadcast
    row_tokens = trainer.micro_batch_tokens or config.seq_len
    return _training(
        trainer.model,
        trainer.optim,
        model,
        tokens=row_tokens,
        sample=_short_sample(config.device, trainer.model, config.seq_len),
        rows=rows,
        ranks=trainer.num_ranks or 1,
        has_reference=bool(trainer.loss.beta),
        served_bytes=4 if config.device == "cpu" else BYTES[served_dtype(config)],
        bucket_bytes=None if broadcast.type == "ipc" else broadcast.bucket_mib << 20,
    )


def served_dtype(config: RunConfig) -> str:
    """What the engine computes in; `auto` is what the model was published in, which on GPUs is bfloat16."""
    dtype = config.inference.model.dtype
    return dtype if dtype != "auto" else "float32" if config.device == "cpu" else "bfloat16"


def sft_training_of(config: SftConfig, model: Architecture, *, rows: int) -> Training:
    return _training(
        config.model,
        config.optim,
        model,
        tokens=config.micro_batch_tokens or config.seq_len,
        sample=_short_sample(config.device, config.model, config.seq_len),
        rows=rows,
        ranks=config.num_ranks or 1,
        has_reference=False,
        served_bytes=4 if config.device == "cpu" else 2,
        bucket_bytes=0,
    )


def _short_sample(device: str, settings: TrainerModel, seq_len: int) -> int:
    """Where attention may be written out, the length at which that takes most; 0 on GPUs."""
    return min(seq_len, SHORT[BYTES[settings.optimization_dtype]]) if device == "cpu" else 0


def _training(
    settings: TrainerModel,
    optim: Optimizer,
    model: Architecture,
    *,
    tokens: int,
    sample: int,
    rows: int,
    ranks: int,
    has_reference: bool,
    served_bytes: int,
    bucket_bytes: int | None,
) -> Training:
    lora = settings.lora
    return Training(
        model,
        Pass(
            tokens=tokens,
            value_bytes=BYTES[settings.optimization_dtype],
            attention=settings.attn,
            cp=settings.cp,
            targets=_targets(lora, model) if lora else None,
            rank=lora.rank if lora else 0,
            dropout=bool(lora and lora.dropout),
            sample=sample,
        ),
        shards=max(1, ranks // settings.dp_replicate),
        rows=rows,
        ep=settings.ep,
        reduce_bytes=BYTES[settings.reduce_dtype],
        frozen_bytes=BYTES[settings.optimization_dtype],
        optimizer=optim.type,
        trained_whole=_trained_whole(lora, model) if lora else 0,
        ac_freq=settings.ac.freq if settings.ac else None,
        ac_mode=settings.ac.mode if settings.ac else "full",
        offload_activations=settings.activation_offload,
        offload_parameters=settings.fsdp_cpu_offload,
        reshard=settings.reshard_after_forward,
        head_chunk=settings.head_chunk,
        has_reference=has_reference,
        served_bytes=served_bytes,
        bucket_bytes=bucket_bytes,
    )


def _targets(lora: Lora, model: Architecture) -> tuple[str, ...]:
    if ALL_LINEAR not in lora.target_modules:
        return lora.target_modules
    return tuple({matrix.name for layer in model.layers for matrix in layer.matrices})


def _trained_whole(lora: Lora, model: Architecture) -> int:
    """Of `modules_to_save`; an embedding that is the head too counts once."""
    ends = {name.rpartition(".")[2] for name in lora.modules_to_save}
    tables = ends & {"embed_tokens", "lm_head"}
    matrices = (matrix for layer in model.layers for matrix in layer.matrices if matrix.name in ends)
    count = min(1, len(tables)) if model.tied else len(tables)
    return count * model.embedding + sum(matrix.num_parameters for matrix in matrices)


def serving_of(config: RunConfig, model: Architecture, machine: Machine) -> Serving:
    inference = config.inference
    on_cpu = config.device == "cpu"
    return Serving(
        model,
        memory=machine.memory,
        utilization=float(inference.args.get("gpu_memory_utilization", inference.gpu_memory_utilization)),
        value_bytes=BYTES[served_dtype(config)],
        tp=inference.parallel.tp,
        max_model_len=inference.model.max_model_len or config.seq_len,
        max_num_seqs=inference.max_num_seqs,
        batched_tokens=int(inference.args.get("max_num_batched_tokens", _batched_tokens(config, machine))),
        eager=inference.model.enforce_eager or on_cpu,
        kv_cache_bytes=inference.cpu.kv_cache_gib * GIB if on_cpu else None,
        bucket_bytes=config.weight_broadcast.bucket_mib << 20,
    )


def _batched_tokens(config: RunConfig, machine: Machine) -> int:
    """vLLM's own default for a server."""
    if config.device == "cpu":
        return max(2048, config.inference.model.max_model_len or config.seq_len)
    if machine.memory >= HUGE_GPU:
        return 16384
    return 8192 if machine.memory >= LARGE_GPU and "A100" not in machine.chip.name else 2048
