"""The `config.json` of well-known models, as far as a plan reads it, in a cache of the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


SUFFIXES = ("-Instruct", "-Instruct-2507", "-Thinking-2507")


def _config(model_type: str, vocabulary: int, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    return {"model_type": model_type, "vocab_size": vocabulary} | dict(zip(SIZES, sizes, strict=True)) | others


MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _config(
        "qwen3", 151936, (1024, 28, 16, 8, 3072), head_dim=128, tie_word_embeddings=True, use_sliding_window=False
    ),
    "Qwen/Qwen3-4B": _config(
        "qwen3", 151936, (2560, 36, 32, 8, 9728), head_dim=128, tie_word_embeddings=True, use_sliding_window=False
    ),
    "Qwen/Qwen3-8B": _config("qwen3", 151936, (4096, 36, 32, 8, 12288), head_dim=128, use_sliding_window=False),
    "Qwen/Qwen3-30B-A3B": _config(
        "qwen3_moe",
        151936,
        (2048, 48, 32, 4, 6144),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    ),
    "Qwen/Qwen2.5-7B": _config("qwen2", 152064, (3584, 28, 28, 4, 18944), use_sliding_window=False),
    "meta-llama/Llama-3.1-70B": _config("llama", 128256, (8192, 80, 64, 8, 28672), head_dim=128),
    "google/gemma-3-1b": _config(
        "gemma3_text", 262144, (1152, 26, 4, 1, 6912), head_dim=256, sliding_window=512, tie_word_embeddings=True
    ),
    "openai/gpt-oss-120b": _config(
        "gpt_oss",
        201088,
        (2880, 36, 64, 8, 2880),
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
    ),
}
for _name, _sizes in MODELS.items():
    _sizes.setdefault("tie_word_embeddings", False)


def cache_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them into a cache of the hub, with their fine-tuned siblings, and go offline."""
    siblings = {f"{name}{suffix}": config for name, config in MODELS.items() for suffix in ("", *SUFFIXES)}
    for name, config in siblings.items():
        model = folder / f"models--{name.replace('/', '--')}"
        for file, text in (("refs/main", "0"), ("snapshots/0/config.json", json.dumps(config))):
            (model / file).parent.mkdir(parents=True)
            (model / file).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
