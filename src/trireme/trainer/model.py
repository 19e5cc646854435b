"""A Hugging Face causal language model, sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trireme.algo.packing import positions
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.config.trainer import TrainerModel
from trireme.messages import MicroBatch
from trireme.trainer.mesh import World

log = get_logger("model")


def load_model(config: TrainerModel, name: str, world: World) -> PreTrainedModel:
    """Loads `name` in float32 and shards it over the mesh: each layer on its own, then the rest.

    Raises:
        ConfigError: the model cannot be had, or transformers does not know its architecture.
    """
    model = _pretrained(config, name)
    model.config.use_cache = False
    model.train()
    _checkpoint_activations(model, config)
    if config.compile:
        for layer in model.model.layers:
            layer.compile()
    if not config.fsdp_cpu_offload:
        model.to(world.device)
    _shard(model, config, world)
    log.info("%s: %s parameters on %d ranks", name, f"{num_parameters(model):,}", world.size)
    return model


def _pretrained(config: TrainerModel, name: str) -> PreTrainedModel:
    try:
        if config.from_scratch:
            architecture = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            return AutoModelForCausalLM.from_config(architecture, dtype=torch.float32, attn_implementation=config.attn)
        return AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch.float32,
            attn_implementation=config.attn,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,  # else, where there are none, a pickle is read
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The model {name!r} cannot be loaded: {error}\n"
            "Expected a folder with config.json and safetensors, or a hub name that this machine can reach. "
            "Set `model.name` to one."
        ) from error


def _checkpoint_activations(model: PreTrainedModel, config: TrainerModel) -> None:
    if config.ac is None:
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = index % config.ac.freq == 0


def _shard(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    options = {
        "mesh": world.mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.optimization_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
        ),
        "offload_policy": CPUOffloadPolicy() if config.fsdp_cpu_offload else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def num_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def vocabulary_size(name: str, trust_remote_code: bool = False) -> int:
    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config().vocab_size


def full_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter whole, one at a time, in the model's order. A collective: all ranks iterate together.

    Tied parameters come once, under the name of the embedding.
    """
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield name, whole.detach().to(dtype)


def logits_at(model: PreTrainedModel, row: MicroBatch, keep: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[K, V] logits of a packed row at the positions `keep` only.

    Positions that restart, and no attention mask, are how transformers is told of packed samples: it then builds
    block-diagonal attention (or, with flash attention, cumulative lengths) by itself.
    """
    ids = torch.from_numpy(row.tokens.ids.astype("int64")).to(device)
    position_ids = torch.from_numpy(positions(row.lengths)).to(device)
    output = model(
        input_ids=ids[None], position_ids=position_ids[None], attention_mask=None, use_cache=False, logits_to_keep=keep
    )
    return output.logits[0]
