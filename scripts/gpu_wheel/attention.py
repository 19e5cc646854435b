"""An attention backend of vLLM for the heads of each published model that the project plans with.

Prints rows for the compute capability in PRETENDED_CAPABILITY, in each precision that vLLM serves there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rows import Row, failure
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend

from trireme.config.model.state_layers import latent_width, serving_problems, text_of

CAPABILITY = os.environ["PRETENDED_CAPABILITY"]
MODELS: dict[str, dict[str, Any]] = json.loads(Path("tests/data/published_models.json").read_text())


class Head(NamedTuple):
    """What vLLM chooses a backend by; the names are those of `get_attn_backend`."""

    head_size: int
    use_mla: bool
    has_sink: bool
    has_sliding_window: bool


def main() -> None:
    kinds = {head_of(config): config for config in MODELS.values() if "num_attention_heads" in text_of(config)}
    with set_current_vllm_config(VllmConfig()):
        for dtype in (str(each).removeprefix("torch.") for each in current_platform.supported_dtypes):
            for head, config in kinds.items():
                row_of(dtype, head, config).print()


def row_of(dtype: str, head: Head, config: dict[str, Any]) -> Row:
    extras = {"latent": head.use_mla, "with sinks": head.has_sink, "with a window": head.has_sliding_window}
    words = [f"attention in {dtype}, {head.head_size} numbers per head", *(name for name, has in extras.items() if has)]
    row = Row("ok", ", ".join(words), capability=CAPABILITY)
    for refusal in serving_problems("model", config, {}, "cuda", dtype):
        return row._replace(state="refused", why=refusal)
    try:
        backend = get_attn_backend(dtype=getattr(torch, dtype), kv_cache_dtype="auto", **head._asdict())
    except Exception as error:
        return failure(row, error)
    return row._replace(why=backend.get_name())


def head_of(config: dict[str, Any]) -> Head:
    text, latent = text_of(config), latent_width(config)
    size = latent or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    has_window = bool(text.get("sliding_window")) and text.get("use_sliding_window", True)
    return Head(size, bool(latent), text["model_type"] == "gpt_oss", has_window)


if __name__ == "__main__":
    main()
