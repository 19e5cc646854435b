"""A check that a model keeps the samples of a packed row apart, run on the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trireme.base.errors import ConfigError
from trireme.trainer.model.packing.states import keep_states_apart, state_mixers
from trireme.trainer.model.sharding import class_name, reshard

LENGTH = 8  # tokens of each of the two samples
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}  # of the largest logit


def check_packing(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Change a row's first sample and check that the logits of the second one stay the same. A collective.

    Models that carry a state from token to token get an empty state for each sample (`states.py`). Models that
    know distances by other means than positions would let one sample see the other. Some models, such as gpt-oss,
    ignore positions when they build their masks but accept masks: these are given masks.

    Raises:
        ConfigError: one sample sees the other, or the model does not run on tokens and positions alone.
    """
    name = class_name(model)
    if model._is_stateful and not state_mixers(model):
        raise _cannot(name, "it carries a state from each token to the next, in layers that we do not know")
    if "chunked_attention" in _kinds_of_layers(model):  # of thousands of tokens, which the probe's rows do not have
        raise _cannot(name, "it attends within chunks that transformers counts from the beginning of the row")
    keep_states_apart(model)
    try:
        difference = _difference(model, device)
        if difference > TOLERANCE[dtype] and _kinds_of_layers(model) <= _MASKS.keys():
            _give_masks(model, dtype)
            difference = _difference(model, device)
    except (TypeError, ValueError) as error:
        raise _cannot(name, f"it does not run on tokens and positions alone: {error}") from error
    if not difference <= TOLERANCE[dtype]:
        raise _cannot(name, f"the first sample of a row changed the second's logits by {difference:.1e} of the largest")


@torch.no_grad()
def _difference(model: PreTrainedModel, device: torch.device) -> float:
    """Return how much a row's first sample changes the second one's logits. Dropout is the same for both rows."""
    vocabulary = model.config.get_text_config().vocab_size
    token = torch.arange(LENGTH, device=device)
    positions, found = torch.cat([token, token])[None], []
    for number in (0, 1):
        ids = torch.cat([(token * 7 + 3 + number * 11) % vocabulary, (token * 5 + 1) % vocabulary])
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            output = model(input_ids=ids[None], position_ids=positions, attention_mask=None, use_cache=False)
        found.append(output.logits[0, LENGTH:])
    reshard(model)
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


def _give_masks(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the decoder, from now on, the masks that the positions ask for: one for each kind of its layers."""
    config, kinds = model.config.get_text_config(), _kinds_of_layers(model)

    def masks(decoder: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is None or kwargs.get("attention_mask") is not None:
            return args, kwargs
        embedded = torch.empty((*positions.shape, 1), dtype=dtype, device=positions.device)  # only its shape is used
        options = {"config": config, "inputs_embeds": embedded, "position_ids": positions}
        options |= {"attention_mask": None, "past_key_values": None}
        found = {kind: _MASKS[kind](**options) for kind in kinds or {FULL}}
        return args, kwargs | {"attention_mask": found if kinds else found[FULL]}

    model.get_decoder().register_forward_pre_hook(masks, with_kwargs=True)


def _kinds_of_layers(model: PreTrainedModel) -> set[str]:
    """Return the kinds of the model's layers; empty if it has one kind only."""
    text = model.config.get_text_config()
    return set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


FULL = "full_attention"
_MASKS: dict[str, Callable[..., Any]] = {
    FULL: create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "linear_attention": lambda **_: None,  # a layer that carries a state runs on each sample alone
    "conv": lambda **_: None,
}


def _cannot(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be trained on packed rows: {reason} - expected a model whose attention sees nothing but a "
        "token's own sample. Choose a transformer with rotary or learned positions, or a hybrid whose layers with a "
        "state are gated delta nets, Mamba-2 or short convolutions."
    )
