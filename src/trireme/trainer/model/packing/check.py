"""A check that a model keeps the samples of a packed row apart, run on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trireme.base.errors import ConfigError
from trireme.trainer.model.packing.states import keep_states_apart, state_mixers
from trireme.trainer.model.sharding import class_name, decoder_of, reshard

LENGTH = 8  # tokens of each of the two samples
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}  # share of the largest logit
# Rounding differs between places of a row. If it does not send a token to other experts, it changes far less.
MOVED_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}


def check_packing(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Check that a token's logits depend on the tokens before it in its own sample, and on nothing else. A collective.

    Changes the last token of a sample that is alone in its row, then the first of two samples, and compares the logits
    of the tokens before or behind; then moves the second sample to the beginning of the row. Models that carry a state
    from token to token get an empty state for each sample (`states.py`). Models that know distances by other means than
    positions would let one sample see the other. Some models, such as gpt-oss, ignore positions when they build their
    masks but accept masks: these are given masks.

    Raises:
        ConfigError: a token sees others, or the model does not run on tokens and positions alone.
    """
    name = class_name(model)

    # Layers that cannot be tried on the short rows below are refused by their kind.
    if model._is_stateful and not state_mixers(model):
        raise _cannot(name, "it carries a state from each token to the next, in layers that we do not know")
    if "chunked_attention" in _kinds_of_layers(model):  # chunks have thousands of tokens, which these rows do not have
        raise _cannot(name, "it attends within chunks that transformers counts from the beginning of the row")
    keep_states_apart(model)

    vocabulary, token = model.config.get_text_config().vocab_size, torch.arange(LENGTH, device=device)
    first, second, other = (token * 7 + 3) % vocabulary, (token * 5 + 1) % vocabulary, (token * 7 + 14) % vocabulary
    try:
        # Before masks are given: they would make a causal model of an encoder.
        ends = torch.cat([second[:-1], other[-1:]])
        later = _difference(_logits(model, second)[:-1], _logits(model, ends)[:-1])

        difference = _leak(model, first, second, other)
        if difference > TOLERANCE[dtype] and _kinds_of_layers(model) <= _MASKS.keys():
            _give_masks(model, dtype)
            difference = _leak(model, first, second, other)

        with dropout_off(model):  # it would differ between places
            moved = _difference(_logits(model, first, second)[LENGTH:], _logits(model, second, first)[:LENGTH])
    except (TypeError, ValueError) as error:
        raise _cannot(name, f"it does not run on tokens and positions alone: {error}") from error

    if not later <= TOLERANCE[dtype]:
        raise _cannot(name, f"later tokens changed a token's logits by {later:.1e} of the largest")
    if not difference <= TOLERANCE[dtype]:
        raise _cannot(name, f"the first sample of a row changed the second's logits by {difference:.1e} of the largest")
    if not moved <= MOVED_TOLERANCE[dtype]:
        raise _cannot(name, f"another place in its row changed a sample's logits by {moved:.1e} of the largest")


def _leak(model: PreTrainedModel, first: torch.Tensor, second: torch.Tensor, other: torch.Tensor) -> float:
    """Return how much a row's first sample changes the second one's logits."""
    return _difference(_logits(model, first, second)[LENGTH:], _logits(model, other, second)[LENGTH:])


@contextmanager
def dropout_off(model: PreTrainedModel) -> Iterator[None]:
    """Run a model's passes inside without dropout."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def _logits(model: PreTrainedModel, *samples: torch.Tensor) -> torch.Tensor:
    """Return [tokens, vocabulary] logits of a row of samples. Dropout is the same for each row of its length."""
    device = samples[0].device
    positions = torch.arange(LENGTH, device=device).repeat(len(samples))[None]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        output = model(input_ids=torch.cat(samples)[None], position_ids=positions, attention_mask=None, use_cache=False)
    reshard(model)
    return output.logits[0]


def _difference(logits: torch.Tensor, others: torch.Tensor) -> float:
    return float((logits - others).abs().max() / logits.abs().max())


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

    decoder_of(model).register_forward_pre_hook(masks, with_kwargs=True)


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
        f"{name} cannot be trained on packed rows: {reason} - expected a model whose attention sees nothing but the "
        "tokens of a sample up to its own. Choose a transformer with rotary or learned positions, or a hybrid whose "
        "layers with a state are gated delta nets, Mamba-2 or short convolutions."
    )
