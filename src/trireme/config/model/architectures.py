"""Architectures of transformers that are refused before launch, each with the reason why it cannot be trained.

Most reasons are read from transformers' source, and thus hold for its next architectures too. The others were found by
training each of its causal language models tiny (docs/models.md); the trainer checks again what it can, on the model
itself (`trainer/model/packing/check.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from trireme.config.model.state_layers import source_of, text_of

Config = Mapping[str, Any]  # a config.json


class Refusal(NamedTuple):
    """Why some architectures are refused, and what was expected instead."""

    reason: str
    expected: str
    holds: Callable[[str, str, Config], bool]  # takes a model_type, the source of its architecture and a config.json


def refusal_of(config: Config) -> Refusal | None:
    """Return why a model with this config.json cannot be trained; None if no reason is known."""
    kind = str(config.get("model_type"))
    source = source_of(kind)
    return next((each for each in REFUSALS if each.holds(kind, source, config)), None) if source else None


def architecture_refusals(key: str, name: str | None, config: Config) -> Iterator[str]:
    """Yield the problem if a model with this config.json cannot be trained.

    Args:
        key: where the model is configured, such as `trainer.model`.
    """
    if refusal := refusal_of(config):
        yield (
            f'{key}.name = "{name}": {config["model_type"]} {refusal.reason} - expected {refusal.expected}. Choose '
            "another model."
        )


def offers(source: str, switch: str) -> bool:
    """Return whether the code of an architecture says that it has an attention, by the name of its attribute.

    Classes without the attribute have none but `eager`: transformers' base class sets it to False.
    """
    return not source or f"{switch} = True" in source


WITHIN = ("fuyu", "got_ocr2")
"""Architectures whose blocks are those of another one within them."""


def _attends_to_later_tokens(kind: str, source: str, config: Config) -> bool:
    text = text_of(config)
    # A class that warns of this serves as an encoder unless its config.json makes it a decoder.
    is_encoder = ENCODER.search(source) is not None and not text.get("is_decoder")
    return is_encoder or text.get("is_causal") is False or text.get("use_bidirectional_attention") in (True, "all")


ENCODER = re.compile(r"(as a standalone, add|make sure that) `is_decoder=True")
"""The warning that classes of BERT's kind give if they are loaded to generate and are encoders."""


def _is_named(*kinds: str) -> Callable[[str, str, Config], bool]:
    return lambda kind, source, config: kind in kinds


def _is_said(pattern: str) -> Callable[[str, str, Config], bool]:
    return lambda kind, source, config: re.search(pattern, source) is not None


REFUSALS = (
    Refusal(
        "attends to later tokens, as encoders do (is_decoder, is_causal or use_bidirectional_attention in its "
        "config.json)",
        "a model that generates text from left to right",
        _attends_to_later_tokens,
    ),
    Refusal(
        "is the decoder of a model with an encoder, and counts positions from the beginning of a row, which several "
        "samples share",
        "a language model without an encoder",
        _is_said(r"class \w+DecoderWrapper"),
    ),
    Refusal(
        "begins to count positions behind its padding token, not at 0",
        "positions from 0 on",
        _is_said("def create_position_ids_from_input_ids"),
    ),
    Refusal(
        "draws its experts at random in training, and other ones than in generation (sparsemixer)",
        "routers that always choose the experts with the highest scores",
        _is_said("def sparsemixer"),
    ),
    Refusal(
        "knows distances by ALiBi, which counts from the beginning of a row, which several samples share",
        "rotary or learned positions",
        lambda kind, source, config: "alibi_tensor(" in source and bool(config.get("alibi", kind != "falcon")),
    ),
    Refusal(
        "counts the blocks of its sparse attention from the beginning of a row, which several samples share",
        "layers without minimax_m3_sparse",
        lambda kind, source, config: "minimax_m3_sparse" in (text_of(config).get("layer_types") or ()),
    ),
    Refusal(
        "mixes neighbouring tokens of a row, which several samples share, in ways that Trireme does not know",
        "layers in which tokens meet by attention, gated delta nets, Mamba-2 or short convolutions",
        _is_named("blt", "inkling_text"),
    ),
    Refusal(
        "has weights whose published form Trireme cannot lay out",
        "parameters that are published tensors, or slices of them, or joined from them",
        _is_named("hrm_text"),
    ),
    Refusal(
        "writes sounds, or drafts of another model's answers",
        "a language model",
        _is_named("musicgen", "musicgen_melody", "gemma4_assistant", "gemma4_unified_assistant"),
    ),
    Refusal(
        "sees by a tower of the package timm, which is not installed",
        "its text model alone (gemma3n_text), or timm",
        lambda kind, source, config: kind == "gemma3n" and find_spec("timm") is None,
    ),
    Refusal(
        "is not divided into blocks that transformers names (_no_split_modules), which Trireme shards and recomputes",
        "an architecture that is",
        lambda kind, source, config: re.search(r"_no_split_modules = \[\s*\"", source) is None and kind not in WITHIN,
    ),
)
