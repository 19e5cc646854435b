"""Tiny random models of many architectures, as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 8}
_WINDOW = {"sliding_window": 5}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA = _HEADS | _WINDOW | {"query_pre_attn_scalar": 8}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", _HEADS | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", _HEADS),
    "mistral": ("MistralConfig", _HEADS | _WINDOW),
    "gemma2": ("Gemma2Config", _GEMMA),
    "vaultgemma": ("VaultGemmaConfig", _GEMMA),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", {}),
    "glm4": ("Glm4Config", _HEADS),
    "granite": ("GraniteConfig", {}),
    "olmo3": ("Olmo3Config", _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _HEADS | _EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        _HEADS
        | _WINDOW
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _HEADS | _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
}
"""By `model_type`: transformers' class, and what is special."""

ATTENTION = {"gpt_oss": "eager", "gemma2": "eager", "vaultgemma": "eager"}
"""Where it is not sdpa: gpt-oss has sinks, two Gemmas cap their attention scores."""

NOT_FOR_PACKED_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}),
    "qwen3_next": ("Qwen3NextConfig", _HEADS | {"num_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
}


def build_config(kind: str, **changes: Any) -> PretrainedConfig:
    name, special = (CONFIGS | NOT_FOR_PACKED_ROWS)[kind]
    return getattr(transformers, name)(**_SHAPE | special | changes)


def build_vision_config() -> PretrainedConfig:
    """Gemma 3 as it is published from 4B on: a decoder within a model that sees."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    return transformers.Gemma3Config(text_config=_SHAPE | _GEMMA, vision_config=vision, mm_tokens_per_image=4)


def save_family(folder: Path, config: PretrainedConfig, **options: Any) -> Path:
    """With weights that differ in every tensor, norms and biases too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return folder


def row(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, T] tokens and positions of packed samples."""
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([torch.arange(length) for length in lengths])[None]


def logits(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits[0]


def backward(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> None:
    """Of the mean log-probability of each next token, across samples too."""
    found = logits(model, ids, positions).float().log_softmax(-1)
    found[:-1].gather(-1, ids[0, 1:, None]).mean().backward()
