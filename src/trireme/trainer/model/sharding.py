"""Sharding of the model over ranks with FSDP2, one transformer block at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.config.trainer import TOWER, TrainerModel
from trireme.trainer.model.moe import blocks_of, router_of
from trireme.trainer.parallel.mesh import World


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the transformer blocks that text passes through, in order; also of models with images or sound.

    Raises:
        ConfigError: no blocks are found.
    """
    kinds = model._no_split_modules or ()
    for module in decoder_of(model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(class_name(m) in kinds for m in module):
            return list(module)
    raise ConfigError(
        f"{class_name(model)}: no list of transformer blocks was found in it (of {', '.join(sorted(kinds)) or 'none'}) "
        "- expected a decoder as transformers has them. Choose another model."
    )


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that text passes through, without the head.

    transformers finds it by its name, which in ModernBERT's decoder is that of the head.
    """
    decoder = model.get_decoder()
    return model.base_model if decoder is model.get_output_embeddings() else decoder


def class_name(module: torch.nn.Module) -> str:
    """Return the name of a module's class, without the prefix of the subclass that FSDP2 makes of it."""
    return type(module).__name__.removeprefix("FSDP")


def shard_model(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    """Replace the model's parameters by this rank's parts of them. Parameters on meta stay there.

    FSDP gathers one block at a time, the embedding unless it is also the head, and the rest for the whole forward and
    backward pass. With `[model.vlm]` the vision encoder belongs to the rest: ranks whose rows have no picture do not
    run it, so it must not have collectives of its own. If it is trained, these ranks reduce zeros for it: FSDP would
    leave parameters without a gradient out. Routers with `router_dtype = "float32"` are gathered in float32.
    """
    reduce_dtype, dtype = getattr(torch, config.reduce_dtype), getattr(torch, config.optimization_dtype)
    in_cpu_memory = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": world.fsdp_mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        "offload_policy": in_cpu_memory if config.fsdp_cpu_offload else OffloadPolicy(),
    }

    tower = set(model.get_submodule(TOWER).modules()) if config.vlm else set()
    # Blocks of towers for images or sound that no row runs are sharded too.
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and module not in tower]
    kinds = model._no_split_modules or ()
    for block in [block for blocks in lists for block in blocks if class_name(block) in kinds]:
        if config.moe.router_dtype == "float32" and config.optimization_dtype != "float32":
            for mixture in blocks_of(block):
                in_float32 = MixedPrecisionPolicy(param_dtype=torch.float32)
                fully_shard(router_of(mixture), **options | {"mp_policy": in_float32})
        fully_shard(block, **options)

    # A tied embedding is the head too, which the root keeps gathered.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and head is not None and embedding.weight is not head.weight:
        fully_shard(embedding, **options)
    fully_shard(model, **options)

    if config.trains_vision_encoder:
        model.set_reduce_scatter_unused_params(True, recurse=False)


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters after a forward pass without a backward pass.

    With `reshard_after_forward = false` only the backward pass frees them. Without it, parameters would stay whole and
    in the precision of the forward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
