"""Small random mixture-of-experts models, with the tokenizer of the tiny ones."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from support.models.tiny import load_script
from trireme.algo.packing import Sample
from trireme.messages import COLUMNS, Routed, build_tokens

NUM_EXPERTS = 8
TOP_K = 2

_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096, "num_experts_per_tok": TOP_K,
    "initializer_range": 0.05, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_FEW = {"moe_intermediate_size": 64, "norm_topk_prob": True}
_GROUPED = _FEW | {"n_routed_experts": NUM_EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
_SIZES = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_LATENT = _SIZES | {"num_key_value_heads": 2, "head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _FEW | {"num_experts": NUM_EXPERTS},
    "qwen2_moe": _FEW | {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 64},
    "olmoe": {"num_experts": NUM_EXPERTS, "norm_topk_prob": True}, "mixtral": {"num_local_experts": NUM_EXPERTS},
    "gpt_oss": {"num_local_experts": NUM_EXPERTS}, "glm4_moe": _GROUPED | {"first_k_dense_replace": 1},
    "deepseek_v3": _GROUPED | _LATENT | {"first_k_dense_replace": 1},
    "granitemoe": {"num_local_experts": NUM_EXPERTS},
    "granitemoeshared": {"num_local_experts": NUM_EXPERTS, "shared_intermediate_size": 64},
    "granitemoe_swa": {"num_local_experts": NUM_EXPERTS, "shared_intermediate_size": 64},
    "aria_text": {"moe_num_experts": NUM_EXPERTS, "moe_topk": TOP_K}, "minimax_m2": {"num_local_experts": NUM_EXPERTS},
}  # fmt: skip
"""By `model_type`: how it is made small."""


def build_config(kind: str = "qwen3_moe", *, vocab_size: int = 128, **changes: Any) -> PretrainedConfig:
    sizes = _SHAPE | {"vocab_size": vocab_size, "pad_token_id": 0} | CONFIGS[kind]
    return AutoConfig.for_model(kind, **sizes | changes)


def build_moe(kind: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    """In float32, with routers that choose: as they are drawn by some models, all experts score the same."""
    torch.manual_seed(0)
    written_out = {"experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(build_config(kind, **changes), dtype=torch.float32, **written_out)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name or "bias" in name:
                parameter.normal_(0.0, 0.3)
    return model


def save_moe(folder: Path, kind: str = "qwen3_moe", **changes: Any) -> Path:
    tokenizer = load_script("make_tiny_model").build_tokenizer()
    config = {
        "vocab_size": -(-len(tokenizer) // 64) * 64, "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    build_moe(kind, **(config | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_routes(count: int, layers: int = 2, seed: int = 0) -> np.ndarray:
    """[count, layers, top_k] experts: the trainer's own routers would hardly ever choose so."""
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(count * layers)]
    return np.stack(chosen).reshape(count, layers, TOP_K)


def routed_of(routes: np.ndarray, known: np.ndarray) -> Routed:
    """Routes of the tokens that are known, as a column of a row."""
    return Routed(known.astype(np.uint8), routes.astype(np.uint8).reshape(-1), *routes.shape[1:])


def routed(samples: list[Sample]) -> list[Sample]:
    found = []
    for seed, sample in enumerate(samples):
        columns = {name: getattr(sample.tokens, name) for name in COLUMNS}
        length = sample.tokens.length
        routes = routed_of(random_routes(length - 1, seed=seed), np.arange(length) < length - 1)
        found.append(Sample(build_tokens(**columns, routed=routes), sample.temperature))
    return found
