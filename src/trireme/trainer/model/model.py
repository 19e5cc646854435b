"""A Hugging Face causal language model as the trainer holds it: built without memory, sharded, then filled.

All that a model draws at random in training is switched off. The engines serve without dropout and are compared with
the trainer at every version, and a repeated step must give the same bits. Dropout of adapters is the exception: the
user asks for it by name (`lora.dropout`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.config.model.folder import SOFT_CAP, low_bit_problem, needs_eager, read_config
from trireme.config.model.vision import vision_problems
from trireme.config.trainer import TOWER, TrainerModel
from trireme.trainer.model.activations import wrap_layers
from trireme.trainer.model.forward import attach_scorer
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.loading import ModelTensors, cannot_be_loaded, find_files, find_layouts
from trireme.trainer.model.lora import fill_adapters, inject_adapters
from trireme.trainer.model.moe import prepare_experts
from trireme.trainer.model.packing.check import check_packing
from trireme.trainer.model.sharding import class_name, decoder_layers, shard_model
from trireme.trainer.model.vision import attach_vision
from trireme.trainer.parallel.mesh import World

log = get_logger("model")


def load_model(config: TrainerModel, name: str, world: World) -> PreTrainedModel:
    """Load a model in float32. Each rank holds its own part and, while loading, some MiB more.

    Raises:
        ConfigError: the model cannot be loaded, its files do not fit it, or it cannot be trained on packed rows.
    """
    # Names and places are recorded before adapters and sharding change the model.
    model = build_model(config, name)
    layers = decoder_layers(model)
    tensors = ModelTensors(model)

    prepare_experts(model, config, layers)
    if config.vlm:
        attach_vision(model, name, config.trust_remote_code, frozen=config.vlm.freeze_vision_encoder)

    # Files are matched with the whole model, under the names that it was published with.
    files = None if config.from_scratch else find_files(name)
    layouts = find_layouts(tensors, files, name) if files else {}
    hub_names(model)  # cached before adapters change the model's own names

    # Sharding comes after adapters, as they are sharded with their layer, and memory only after sharding.
    if config.lora:
        seed = torch.initial_seed()
        inject_adapters(model, config.lora, base_model=name, seed=seed, frozen=config.optimization_dtype)
    shard_model(model, config, world)
    _allocate(model, config, world)

    # Values go straight into this rank's shards.
    if files:
        tensors.read(layouts, files)
        log.info("%s: this rank read %.1f MiB", name, files.num_bytes_read / 2**20)
    else:
        tensors.draw()
    fill_adapters(model)
    tensors.require_values()

    # The check runs the model as it is, before blocks are compiled or recomputed.
    check_packing(model, world.device, getattr(torch, config.optimization_dtype))
    wrap_layers(layers, config, world.device)
    if config.trains_vision_encoder:  # not compiled: each number of patches would be compiled again
        blocks = list(model.get_submodule(f"{TOWER}.blocks").children())
        wrap_layers(blocks, config.model_copy(update={"compile": False}), world.device)

    attach_scorer(model, config, world)
    log.info("%s: %s parameters on %d ranks", name, f"{model.num_parameters():,}", world.size)
    return model


def build_model(config: TrainerModel, name: str) -> PreTrainedModel:
    """Build the model on meta: shapes without memory. Its dropout is switched off.

    Raises:
        ConfigError: the model does not exist, or transformers does not have it or its attention implementation.
    """
    architecture = _architecture(config, name)
    if problems := list(vision_problems("model", config, architecture.to_dict())):
        raise ConfigError("\n".join(problems))

    # Randomness is switched off in the configuration, for modules that read it as they are built.
    probabilities = disable_randomness(architecture)
    try:
        with torch.device("meta"):
            model = (AutoModelForImageTextToText if config.vlm else AutoModelForCausalLM).from_config(
                architecture,
                dtype=torch.float32,
                attn_implementation=_attention(config, name, architecture),
                trust_remote_code=config.trust_remote_code,
            )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f'The model {name!r} cannot be built with `model.attn = "{config.attn}"`: {error}\n'
            "Expected an architecture that transformers knows, and an attention that it has for it. "
            "Set `model.attn`, or `model.name` to another model."
        ) from error

    # Settings for exports only: the trainer never generates.
    if not config.from_scratch:
        with suppress(OSError):  # many models have none
            model.generation_config = GenerationConfig.from_pretrained(name)

    for part in (model.config, model.config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    for layer in model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0  # a probability that is written in the model's code

    # Exports restore what was published.
    model.trireme_probabilities = probabilities
    if type(architecture) is not type(model.config) and not config.from_scratch:
        model.trireme_published = architecture  # this is the text model of one that also sees
    return model.train()


def _attention(config: TrainerModel, name: str, architecture: PretrainedConfig) -> str:
    """Return the attention of transformers: `eager` instead of `sdpa` for a model that has none, or caps its scores;
    `sdpa` for flash attention, which takes its place in packed rows (`forward.py`).

    The launcher decides the same, but cannot do so for a model that is downloaded only now.

    Raises:
        ConfigError: torch's kernel of flash attention does not compute the model's attention, or not on this GPU.
    """
    is_plain = not needs_eager(architecture.to_dict())

    # What flash attention cannot compute, or not here.
    if config.uses_flash and not is_plain:
        raise ConfigError(
            f'`model.attn = "{config.attn}"` with {name!r}, whose attention has sinks, a cap ({SOFT_CAP}) or a form of '
            "its own, which torch's kernel lacks - expected flex_attention or eager. Set `model.attn`."
        )
    if config.uses_flash and torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < (8, 0):
        raise ConfigError(
            f'`model.attn = "{config.attn}"` on a GPU of compute capability {found[0]}.{found[1]} - expected 8.0 or '
            "above (Ampere and later), for which torch has its kernel. Set `model.attn` to sdpa."
        )
    if config.attn == "flash_attention_3":
        log.warning("model.attn = flash_attention_3 runs flash attention 2, the kernel that torch has")

    if is_plain or config.attn != "sdpa":
        return "sdpa" if config.uses_flash else config.attn
    log.info(
        "%s: attention is eager, as there is no sdpa for it, or none that caps its scores (%s). On GPUs `model.attn` "
        "flex_attention needs less memory.",
        name,
        SOFT_CAP,
    )
    return "eager"


def _architecture(config: TrainerModel, name: str) -> PretrainedConfig:
    try:
        architecture = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(name, error) from error

    if not config.from_scratch and (problem := low_bit_problem(read_config(name))):
        raise ConfigError(f"The weights of {name!r} {problem} Set `model.name` to such a copy of the model.")
    for part in _parts(architecture):  # weights are bfloat16 once they are read (`PublishedFiles`)
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return architecture


def _allocate(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    """Allocate memory for this rank's part. Buffers are NaN until they get values, so that a forgotten one is found."""
    model.to_empty(device=torch.device("cpu") if config.fsdp_cpu_offload else world.device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=world.device)
                if buffer.is_floating_point():
                    module._buffers[name].fill_(torch.nan)


RANDOM_KEYS = ("drop", "jitter")
"""Parts of the keys of a configuration that are probabilities: `attention_dropout`, `resid_pdrop`, `layerdrop`,
`router_jitter_noise`, ..."""


def disable_randomness(config: PretrainedConfig) -> list[dict[str, float]]:
    """Set all probabilities in a configuration to 0; return the published ones of each of its parts."""
    published = []
    for part in _parts(config):
        probabilities = {
            name: value
            for name, value in vars(part).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and value
            if any(key in name for key in RANDOM_KEYS)
        }
        for name, value in probabilities.items():
            setattr(part, name, type(value)(0))
        published.append(probabilities)
    return published


def published_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return a copy of the model's configuration with its published probabilities."""
    config = copy.deepcopy(getattr(model, "trireme_published", model.config))
    for part, probabilities in zip(_parts(config), getattr(model, "trireme_probabilities", []), strict=False):
        for name, value in probabilities.items():
            setattr(part, name, value)
    return config


def published_class(model: PreTrainedModel) -> str:
    """Return the class of the checkpoint, which contains the model or is the same."""
    names = getattr(getattr(model, "trireme_published", None), "architectures", None)
    return names[0] if names else class_name(model)


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    if (text := config.get_text_config()) is not config:
        yield text
