"""What a model draws at random in training is switched off: logprobs are to follow from weights and tokens alone.

The engines, which serve without dropout, are compared with the trainer at every version, ratios are taken between the
two, and a step that is repeated must come to the same bits. Dropout of adapters is asked for by name, and stays.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

MARKS = ("drop", "jitter")  # of `attention_dropout`, `resid_pdrop`, `layerdrop`, `router_jitter_noise`, ...

Silenced = list[dict[str, float]]
"""Probabilities as they are published, of each part of a configuration."""


def silence(config: PretrainedConfig) -> Silenced:
    """Before a model is built of it. Returns what it said."""
    said = []
    for part in _parts(config):
        noise = {name: value for name, value in vars(part).items() if _is_noise(name, value)}
        for name, value in noise.items():
            setattr(part, name, type(value)(0))
        said.append(noise)
    return said


def silence_layers(model: nn.Module) -> None:
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
