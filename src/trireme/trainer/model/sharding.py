"""How the model is spread over ranks: FSDP2, each transformer block on its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.config.trainer import TrainerModel
from trireme.trainer.model.moe import routers_in_float32
from trireme.trainer.parallel.mesh import World


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The transformer blocks that text goes through, in order; also of a model that sees or hears as well.

    Raises:
        ConfigError: none can be found.
    """
    kinds = model._no_split_modules or ()
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(class_name(m) in kinds for m in module):
            return list(module)
    raise ConfigError(
        f"{class_name(model)}: no list of transformer blocks was found in it (of {', '.join(sorted(kinds)) or 'none'}) "
        "- expected a decoder as transformers has them. Choose another model."
    )


def class_name(module: torch.nn.Module) -> str:
    """FSDP2 puts a subclass of its own in front."""
    return type(module).__name__.removeprefix("FSDP")


def shard_model(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    """Its parameters become this rank's parts of them; on meta, they stay there.

    What is gathered at once: one block; the embedding, unless it is the head as well; and, through the whole forward
    and backward pass, the rest. Routers that are to choose in float32 are gathered in it.
    """
    options = _options(config, world)
    for block in _blocks(model):
        for router in routers_in_float32(block, config.moe) if config.optimization_dtype != "float32" else ():
            fully_shard(router, **options | {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)})
        fully_shard(block, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and head is not None and embedding.weight is not head.weight:
        fully_shard(embedding, **options)
    fully_shard(model, **options)


def reshard(model: torch.nn.Module) -> None:
    """Frees what was gathered. With `reshard_after_forward = false` a backward pass does so, and where there is none,
    parameters would stay whole, and in the precision of the forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _blocks(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Those of towers for images or sound too: they are held as well."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for blocks in lists:
        yield from (block for block in blocks if class_name(block) in (model._no_split_modules or ()))


def _options(config: TrainerModel, world: World) -> dict[str, Any]:
    return {
        "mesh": world.fsdp_mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.optimization_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        if config.fsdp_cpu_offload
        else OffloadPolicy(),
    }
