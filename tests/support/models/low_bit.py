"""Tiny checkpoints with low-bit weights, as they are published, and the plain weights that they mean."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.models.families import save_family

BLOCK = 128
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
LOW_BIT: dict[str, dict[str, Any]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3},
    "qwen3_moe": {"hidden_size": 192, "moe_intermediate_size": 136},
}
"""Sizes with more than one group of values, and with blocks at edges that are smaller."""

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def save_low_bit(folder: Path, config: PretrainedConfig, tokenizer: Path | None = None) -> dict[str, torch.Tensor]:
    """Save MXFP4 experts for gpt-oss, else FP8 matrices. Return the bfloat16 weights, by other implementations."""
    save_family(folder, config)
    stored = load_file(folder / "model.safetensors")
    meant = {name: tensor.bfloat16() for name, tensor in stored.items()}
    numbers = torch.Generator().manual_seed(0)
    for name, tensor in list(stored.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=numbers, dtype=torch.uint8)
            scales = torch.randint(120, 125, blocks.shape[:-1], generator=numbers, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del stored[name]
            meant[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        elif "proj" in name and tensor.ndim == 2 and config.model_type != "gpt_oss":
            grid = [-(-size // BLOCK) for size in tensor.shape]
            scales = 0.01 * torch.rand(grid, generator=numbers) + 0.001
            stored[name] = (tensor / 0.005).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            spread = np.kron(scales.numpy(), np.ones((BLOCK, BLOCK), np.float32))
            whole = stored[name].float().numpy() * spread[: tensor.shape[0], : tensor.shape[1]]
            meant[name] = torch.from_numpy(whole).bfloat16()
    stored = {n: t.bfloat16() if t.dtype == torch.float32 and "_scale" not in n else t for n, t in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = MXFP4 if config.model_type == "gpt_oss" else FP8
    (folder / "config.json").write_text(json.dumps(described))
    for file in [*tokenizer.glob("*token*"), *tokenizer.glob("*.jinja")] if tokenizer else []:
        shutil.copy(file, folder)
    return meant
