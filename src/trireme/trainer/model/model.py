"""A Hugging Face causal language model as the trainer holds it: built without memory, sharded, then filled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.config.model_folder import SOFT_CAP
from trireme.config.trainer import TrainerModel
from trireme.trainer.model.activations import wrap_layers
from trireme.trainer.model.forward import attach_scorer
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.loading import ModelTensors, cannot_be_loaded, find_files, find_layouts
from trireme.trainer.model.lora import fill_adapters, inject_adapters
from trireme.trainer.model.moe import prepare_experts
from trireme.trainer.model.packing_check import check_packing
from trireme.trainer.model.sharding import decoder_layers, shard_model
from trireme.trainer.parallel.mesh import World

log = get_logger("model")


def load_model(config: TrainerModel, name: str, world: World) -> PreTrainedModel:
    """`name` in float32, each rank with its own part: no rank ever holds more than that, and some MiB.

    Raises:
        ConfigError: the model cannot be had, its files are not its own, or it cannot be trained on packed rows.
    """
    model = build_model(config, name)
    layers = decoder_layers(model)
    hub_names(model)  # of the model as it is published
    places = ModelTensors(model)
    prepare_experts(model, config, layers)
    files = None if config.from_scratch else find_files(name)
    layouts = find_layouts(places, files, name) if files else {}
    if config.lora:
        seed = torch.initial_seed()
        inject_adapters(model, config.lora, base_model=name, seed=seed, frozen=config.optimization_dtype)
    shard_model(model, config, world)
    _allocate(model, config, world)
    if files:
        places.read(layouts, files)
        log.info("%s: this rank read %.1f MiB", name, files.num_bytes_read / 2**20)
    else:
        places.draw()
    fill_adapters(model)
    places.require_values()
    check_packing(model, world.device, getattr(torch, config.optimization_dtype))
    wrap_layers(layers, config, world.device)
    attach_scorer(model, config, world)
    log.info("%s: %s parameters on %d ranks", name, f"{num_parameters(model):,}", world.size)
    return model


def build_model(config: TrainerModel, name: str) -> PreTrainedModel:
    """On meta: shapes without memory. Nothing that it draws at random in training is left (`noise`).

    Raises:
        ConfigError: there is no such model, transformers does not know it, or not with such an attention.
    """
    architecture = _architecture(config, name)
    silenced = disable_randomness(architecture)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
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
    if not config.from_scratch:
        model.generation_config = _generation_config(name, model)
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False
    disable_dropout_layers(model)
    remember(model, silenced)
    return model.train()


def _attention(config: TrainerModel, name: str, architecture: PretrainedConfig) -> str:
    """Return the implementation to build with: `eager` instead of `sdpa` where the model caps its attention scores,
    which the launcher could not see of a model that was downloaded since."""
    cap = getattr(architecture.get_text_config(), SOFT_CAP, None)
    if not cap or config.attn not in ("sdpa", "eager"):
        return config.attn
    log.info(
        "%s caps its attention scores (%s = %g), which sdpa leaves out: attention is eager. On GPUs `model.attn` "
        "flex_attention or flash_attention_2 needs less memory.",
        name,
        SOFT_CAP,
        cap,
    )
    return "eager"


def _architecture(config: TrainerModel, name: str) -> PretrainedConfig:
    try:
        architecture = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(name, error) from error
    quantized = getattr(architecture, "quantization_config", None)
    if quantized and not config.from_scratch:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise ConfigError(
            f"The weights of {name!r} are quantized ({method}) - expected weights in float32, bfloat16 or float16, as "
            "only those can be trained. Set `model.name` to such a copy of the model."
        )
    return architecture


def _generation_config(name: str, model: PreTrainedModel) -> GenerationConfig:
    """It is exported with the weights; what ends an answer, for example, is written in it."""
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:  # many models have none
        return model.generation_config


def _allocate(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    """Memory for this rank's parts, without values yet; for numbers, "not a number", so that none is forgotten."""
    model.to_empty(device=torch.device("cpu") if config.fsdp_cpu_offload else world.device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=world.device)
                if buffer.is_floating_point():
                    module._buffers[name].fill_(torch.nan)


def num_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def vocabulary_size(name: str, trust_remote_code: bool = False) -> int:
    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config().vocab_size


MARKS = ("drop", "jitter")  # of `attention_dropout`, `resid_pdrop`, `layerdrop`, `router_jitter_noise`, ...

Silenced = list[dict[str, float]]
"""Probabilities as they are published, of each part of a configuration."""


def disable_randomness(config: PretrainedConfig) -> Silenced:
    """Before a model is built of it. Returns what it said."""
    said = []
    for part in _parts(config):
        noise = {name: value for name, value in vars(part).items() if _is_noise(name, value)}
        for name, value in noise.items():
            setattr(part, name, type(value)(0))
        said.append(noise)
    return said


def disable_dropout_layers(model: nn.Module) -> None:
    """Those whose probability is written in the code."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0


def remember(model: PreTrainedModel, said: Silenced) -> None:
    model.trireme_silenced = said


def published_config(model: PreTrainedModel) -> PretrainedConfig:
    """A copy, with what was silenced."""
    config = copy.deepcopy(model.config)
    for part, noise in zip(_parts(config), getattr(model, "trireme_silenced", []), strict=False):
        for name, value in noise.items():
            setattr(part, name, value)
    return config


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    if (text := config.get_text_config()) is not config:
        yield text


def _is_noise(name: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and bool(value) and any(mark in name for mark in MARKS)


def open_tokenizer(name: str, trust_remote_code: bool, *, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """
    Args:
        chat_template: a file with another one than its own.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The tokenizer {name!r} cannot be loaded: {error}. Set `tokenizer.name`.") from error
    if chat_template:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer
