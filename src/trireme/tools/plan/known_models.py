"""The `config.json` of models that many train, as far as a plan needs it: so that one can be made where no hub is.

Names are the hub's; a fine-tuned sibling (`-Instruct`, `-Base`, …) counts as its base. A test holds each against the
number of parameters that its makers publish, and against the model as transformers builds it.
"""

from __future__ import annotations

from typing import Any


def _config(model_type: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    """Sizes: hidden, layers, heads, key-value heads, width of the MLP, vocabulary."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **others}


def _qwen3(*sizes: int, tied: bool) -> dict[str, Any]:
    return _config("qwen3", (*sizes, 151936), head_dim=128, tie_word_embeddings=tied, use_sliding_window=False)


def _qwen2(*sizes: int, tied: bool) -> dict[str, Any]:
    return _config("qwen2", sizes, tie_word_embeddings=tied, use_sliding_window=False)


def _llama(*sizes: int, tied: bool, head_dim: int = 128) -> dict[str, Any]:
    return _config("llama", (*sizes, 128256), head_dim=head_dim, tie_word_embeddings=tied)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _config(
        "gpt_oss",
        (2880, layers, 64, 8, 2880, 201088),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
        tie_word_embeddings=False,
    )


def _qwen3_moe(*sizes: int, width: int) -> dict[str, Any]:
    return _config(
        "qwen3_moe",
        (*sizes, 151936),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        use_sliding_window=False,
    )


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600, tied=False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 4, 6144, width=768),
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, 152064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, 152064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, 152064, tied=False),
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 32, 8, 8192, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B": _llama(3072, 28, 24, 8, 8192, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(4096, 32, 32, 8, 14336, tied=False),
    "meta-llama/Llama-3.1-70B": _llama(8192, 80, 64, 8, 28672, tied=False),
    "mistralai/Mistral-7B-v0.3": _config(
        "mistral", (4096, 32, 32, 8, 14336, 32768), sliding_window=None, tie_word_embeddings=False
    ),
    "google/gemma-3-1b": _config(
        "gemma3_text",
        (1152, 26, 4, 1, 6912, 262144),
        head_dim=256,
        sliding_window=512,
        tie_word_embeddings=True,
    ),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
}

_SIBLINGS = ("-Instruct", "-Base", "-it", "-pt", "-Instruct-2507", "-Thinking-2507", "-Chat")


def known_config(name: str) -> dict[str, Any] | None:
    """Of a model by its hub name, or of the one that it was made from."""
    bases = [name, *(name.removesuffix(sibling) for sibling in _SIBLINGS)]
    return next((KNOWN_MODELS[base] for base in bases if base in KNOWN_MODELS), None)
