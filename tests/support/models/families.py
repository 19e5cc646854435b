"""Tiny random models of many architectures, as checkpoints."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2VLImageProcessor,
)

from trireme.config.model.vision import KINDS

VOCABULARY = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEADS = {"head_dim": 8}
_WINDOW = {"sliding_window": 5}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
_LATENT |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # published, and read by vLLM alone
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_GEMMA = _HEADS | _WINDOW | {"query_pre_attn_scalar": 8}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _HEADS | {"tie_word_embeddings": True}, "qwen2": {}, "llama": _HEADS, "mistral": _HEADS | _WINDOW,
    "gemma2": _GEMMA, "vaultgemma": _GEMMA, "gemma3_text": _GEMMA | _LAYERS, "phi3": {}, "glm4": _HEADS, "granite": {},
    "olmo2": {}, "olmo3": _WINDOW | _LAYERS, "smollm3": _HEADS | {"no_rope_layers": [1, 0]}, "gpt_neox": {},
    "qwen3_moe": _HEADS | _EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _HEADS | _WINDOW | _ROPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _HEADS | _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": _EXPERTS | _LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
}  # fmt: skip
"""By `model_type`: what is special."""

ATTENTION = {"gpt_oss": "eager", "gemma2": "eager", "vaultgemma": "eager", "mamba2": "eager"}
"""Where it is not sdpa: gpt-oss has sinks, two Gemmas cap their attention scores, Mamba-2 has no attention."""

_DELTA = _HEADS | {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_DELTA_EXPERTS = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _DELTA_EXPERTS,
    "qwen3_next": _DELTA | _DELTA_EXPERTS,
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0, "shared_intermediate_size": 48},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    "falcon_h1": _MAMBA | _HEADS | {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
}  # fmt: skip
"""Some or all layers carry a state from token to token."""
CONFIGS |= HYBRIDS

_LARGE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
_LARGE_DELTA = _LARGE | {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
_LARGE_MAMBA = _LARGE | {"mamba_d_head": 64, "mamba_d_state": 16}
_LARGE_CONV = _LARGE | {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "tie_word_embeddings": True}
_ALL_EXPERTS = {"num_experts_per_tok": 4}
SERVED: dict[str, dict[str, Any]] = {
    "nemotron_h": _LARGE | {"mamba_head_dim": 64, "ssm_state_size": 16, "head_dim": 64},
    "granitemoehybrid": _LARGE_MAMBA | {"shared_intermediate_size": 128},
    "falcon_h1": _LARGE_MAMBA | {"mamba_d_ssm": 256, "head_dim": 64, "mamba_norm_before_gate": False},
    "mamba2": _LARGE | {"intermediate_size": 256, "head_dim": 64, "state_size": 16}, "lfm2": _LARGE_CONV,
    "lfm2_moe": _LARGE_CONV | _ALL_EXPERTS, "qwen3_5_text": _LARGE_DELTA,
    "qwen3_5_moe_text": _LARGE_DELTA | _ALL_EXPERTS, "qwen3_next": _LARGE_DELTA | _ALL_EXPERTS,
    "qwen3_5": _LARGE_DELTA | {"tie_word_embeddings": True},
    "qwen3_5_moe": _LARGE_DELTA | _ALL_EXPERTS | {"moe_intermediate_size": 32},
}  # fmt: skip
"""Sizes that vLLM has kernels for on a CPU. Tokens are sent to all experts, as rounding may choose others."""

_FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIBLINGS: dict[str, dict[str, Any]] = {
    "granitemoe": _FEW_EXPERTS, "granitemoeshared": _FEW_EXPERTS | {"shared_intermediate_size": 48},
    "granitemoehybrid with experts": HYBRIDS["granitemoehybrid"] | _FEW_EXPERTS,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "hy_v4": _EXPERTS | _LATENT
    | {"n_routed_experts": 4, "n_shared_experts": 1, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
    "modernbert-decoder": {"local_attention": 6}, "gptj": {"rotary_dim": 4},
}  # fmt: skip
"""Architectures that are trained like those above, of which no engine was started. Routers of some return what they
choose in an order of their own; Hy 4 initializes a part of a tensor; ModernBERT calls its head `decoder`."""

NOT_FOR_PACKED_ROWS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "bert": {},
    "bart": {"d_model": 32},
    "gemma3_text that sees later tokens": CONFIGS["gemma3_text"] | {"use_bidirectional_attention": True},
    "llama4_text": _HEADS
    | {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 16},
}

IMAGE = 90
"""The token that stands for a picture."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
_EYES = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_EYES |= {"num_position_embeddings": 16, "window_size": 56, "fullatt_block_indexes": [1]}


def build_config(kind: str, **changes: Any) -> PretrainedConfig:
    if kind in KINDS:  # as they are published: a text model within one that sees
        text = build_config(f"{kind}_text", **changes)
        parts = {"text_config": text.to_dict(), "vision_config": _EYES | {"out_hidden_size": text.hidden_size}}
        return AutoConfig.for_model(
            kind, **parts, image_token_id=IMAGE, tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False))
        )
    special = (CONFIGS | SIBLINGS | NOT_FOR_PACKED_ROWS | {"qwen2_5_vl_text": {"rope_parameters": MROPE}})[kind]
    return AutoConfig.for_model(kind.partition(" ")[0], **_SHAPE | special | changes)


def build_vision_config() -> PretrainedConfig:
    """Gemma 3 as it is published from 4B on: a decoder within a model that sees."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    return Gemma3Config(text_config=_SHAPE | _GEMMA, vision_config=vision, mm_tokens_per_image=4)


def save_family(folder: Path, config: PretrainedConfig, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    whole = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = whole.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if config.model_type in KINDS:
        sizes = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
        Qwen2VLImageProcessor(patch_size=config.vision_config.patch_size, size=sizes).save_pretrained(folder)
    if config.model_type in ("qwen3_5", "qwen3_5_moe"):
        publish(folder / "model.safetensors")
    return folder


def publish(file: Path) -> None:
    """Add a head for several next tokens, as it is published; join Qwen3.5's experts, but not those of that head."""
    tensors = load_file(file)
    for start in {name.split("0.gate_proj")[0] for name in tensors if re.search("language_model.*experts.0.g", name)}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{start}{expert}.{part}_proj.weight") for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{start}gate_up_proj": torch.cat([gate, up], dim=1), f"{start}down_proj": down}
    mtp = {"fc": (8, 16), "norm": (8,), "layers.0.mlp.experts.0.up_proj": (4, 8)}
    tensors |= {f"mtp.{name}.weight": torch.randn(shape) for name, shape in mtp.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def row(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([torch.arange(length) for length in lengths])[None]


def logits(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits[0]


def backward(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> None:
    found = logits(model, ids, positions).float().log_softmax(-1)
    found[:-1].gather(-1, ids[0, 1:, None]).mean().backward()


@contextmanager
def flash_on_cpu() -> Iterator[list[int]]:
    """Give torch's two operations of flash attention, which it has for GPUs only, a CPU kernel: the formula, sample by
    sample, on what its GPU kernels demand. Yields the tokens before a token that each call lets it see; -1: all."""
    windows: list[int] = []

    def forward(q: Any, k: Any, v: Any, *sizes: Any, scale: float, window_size_left: int, **_: Any) -> Any:
        windows.append(window_size_left)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for at, scores in samples_of(q, k, v, *sizes[:6], scale=scale, left=window_size_left):
            lse[:, at] = scores.logsumexp(-1)
            out[at] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), repeated(v[at], q))
        return out, lse, *(torch.empty(0) for _ in range(3))

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *sizes: Any, scale: float, **more: Any) -> Any:
        dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
        for at, scores in samples_of(q, k, v, *sizes[:6], scale=scale, left=more["window_size_left"]):
            weights = (scores - lse[:, at, None]).exp()
            inner = torch.einsum("ihd,jhd->hij", grad[at], repeated(v[at], q))
            inner = weights * (inner - (grad[at] * out[at]).sum(-1).T[..., None]) * scale
            dq[at] = torch.einsum("hij,jhd->ihd", inner, repeated(k[at], q))
            for found, each, factor in ((dk, inner, q), (dv, weights, grad)):
                grouped = torch.einsum("hij,ihd->jhd", each, factor[at])
                found[at] = grouped.unflatten(1, (k.shape[1], -1)).sum(2)
        return dq, dk, dv

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield windows


def samples_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, ends_k: torch.Tensor, longest: int,
    longest_k: int, dropout: float, is_causal: bool, *, scale: float, left: int,
) -> Iterator[tuple[slice, torch.Tensor]]:  # fmt: skip
    """Yield the place of each sample and its [heads, tokens, tokens] scores, masked."""
    assert ends.dtype == torch.int32
    assert torch.equal(ends, ends_k)
    assert (ends[0], ends[-1], ends.diff().max()) == (0, len(q), longest)
    assert longest == longest_k
    assert k.shape == v.shape == (len(q), k.shape[1], q.shape[2])
    assert q.shape[2] % 8 == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert (dropout, is_causal) == (0.0, left < 0)
    for begin, end in pairwise(ends.tolist()):
        at, place = slice(begin, end), torch.arange(end - begin)
        distance = place[:, None] - place
        is_seen = (distance >= 0) & (distance <= (left if left >= 0 else len(q)))
        scores = torch.einsum("ihd,jhd->hij", q[at], repeated(k[at], q)) * scale
        yield at, scores.masked_fill(~is_seen, -torch.inf)


def repeated(shared: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return shared.repeat_interleave(q.shape[1] // shared.shape[1], dim=1)


def build_attending_model() -> PreTrainedModel:
    """Return a model whose attention can be replaced."""
    torch.manual_seed(7)
    config = build_config("qwen3")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
