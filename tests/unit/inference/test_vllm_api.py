"""Which layers lack weights after a reload, told by vLLM's own layers and its own count of what arrived."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from trireme.inference.vllm_api import begin_reload, incomplete_layers

EXPERTS, HIDDEN, INNER = 4, 192, 64  # vLLM pads both to blocks of 128
PARTS = {"w1": ("w13_weight", INNER, HIDDEN), "w3": ("w13_weight", INNER, HIDDEN), "w2": ("w2_weight", HIDDEN, INNER)}


@pytest.mark.parametrize(("left_out", "missing"), [(None, 0), ((1, "w1"), INNER * HIDDEN), ((3, "w2"), INNER * HIDDEN)])
def test_padding_of_experts_is_not_reported_as_missing(left_out, missing):
    model = build_padded_experts()
    (experts,) = (module for module in model.modules() if hasattr(module, "w13_weight"))
    begin_reload(model)
    for number in range(EXPERTS):
        for shard, (name, *shape) in PARTS.items():
            if (number, shard) != left_out:
                parameter = getattr(experts, name)
                parameter.weight_loader(parameter, torch.ones(shape), name, shard, number)
    whole = EXPERTS * 3 * INNER * HIDDEN
    gap = f"routed_experts ({whole - missing} of {whole} values)"
    assert incomplete_layers(model) == ([gap] if missing else [])


def build_padded_experts() -> torch.nn.Module:
    """Return experts that the engine rounds to 8 bits in blocks, as they are after vLLM's first load."""
    rounded = OnlineQuantizationConfig(resolve_quantization_config("fp8_per_block", None))
    sizes = {"tp_size": 1, "dp_size": 1, "pcp_size": 1}
    with set_current_vllm_config(VllmConfig()):
        model = FusedMoEFactory(EXPERTS, 2, HIDDEN, INNER, quant_config=rounded, prefix="experts", **sizes)
    record_metadata_for_reloading(model)
    for module in model.modules():
        get_layerwise_info(module).reset()
    return model
