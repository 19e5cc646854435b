"""Models with layers that carry a state from token to token: what a run must respect, read from `config.json`.

State spaces (Mamba-2), linear attention (gated delta nets) and short convolutions. The trainer runs such layers sample
by sample (`trainer/model/packing/states.py`). vLLM on a CPU has its own conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trireme.config.trainer import TrainerModel

DELTA, MAMBA, CONV = ("GatedDeltaNet",), ("Mamba2Mixer", "MambaLayer", "FalconH1Mixer"), ("ShortConv",)
MIXERS = (*DELTA, *MAMBA, *CONV)
"""Ends of the names of transformers' classes that carry a state."""

WITHOUT_ATTENTION = ("mamba2",)
"""Architectures without attention, for which transformers accepts no implementation but `eager`."""

SERVED_ON_CPU = (
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "nemotron_h"),
    *("lfm2", "lfm2_moe", "falcon_h1", "mamba2"),
)
"""Architectures whose weight updates were compared with a fresh engine on a CPU, difference 0."""

EXPERTS_WITHOUT_CPU_KERNEL = ("minimax_m2",)
"""Architectures that score experts by a sigmoid, without groups of experts: vLLM's CPU engine dies when it starts. Not
listed: Nemotron-H, whose config.json says whether it has experts."""

LATENT_ON_CPU = 576
"""Width of the latents of DeepSeek-V3 and its kin."""

Config = Mapping[str, Any]  # a config.json


def state_layer_problems(table: str, model: TrainerModel, config: Config) -> Iterator[str]:
    """Yield why the trainer cannot train a model because of its layers with a state."""
    kind, mixers = config.get("model_type"), mixers_of(config)

    # Packed samples share a row: without a way to reset a state at their borders, they would see one another.
    if not mixers:
        source = source_of(str(kind)) or ""
        if "create_chunked_causal_mask" in source:
            yield (
                f'{table}.name = "{model.name}": {kind} attends within chunks that transformers counts from the '
                "beginning of a row, which several samples share - expected attention to all tokens, or a window. "
                "Choose another model."
            )
        elif "_is_stateful = True" in source or "LightningAttention" in source:
            yield (
                f'{table}.name = "{model.name}": {kind} carries a state from each token to the next in layers that '
                "Trireme does not know, so that samples which are packed into one row would see each other - expected "
                "attention, gated delta nets, Mamba-2 or short convolutions. Choose another model."
            )
        return

    # Layers that are known, with settings that they do not allow.
    if model.cp > 1:
        yield f"{table}.cp = {model.cp} with {kind}, whose layers carry a state - expected 1. Set `{table}.cp = 1`."
    if model.moe.router_replay:
        yield f"{table}.moe.router_replay = true with {kind} - expected false: its routes are inexact. Remove it."


def serving_problems(
    table: str, config: Config, arguments: Mapping[str, Any], device: str, dtype: str
) -> Iterator[str]:
    """Yield why the engine cannot serve a model, or would serve it wrongly, because of its layers.

    Args:
        arguments: `inference.args`, with underscores in their names.
        dtype: the precision of the engine.
    """
    kind, text, mixers = str(config.get("model_type")), text_of(config), mixers_of(config)

    # Latent attention and experts, which vLLM computes by kernels that not every device has.
    if device == "cpu" and latent_width(config) not in (0, LATENT_ON_CPU):
        yield (
            f"{table}: kv_lora_rank + qk_rope_head_dim = {latent_width(config)} in its config.json - expected "
            f"{LATENT_ON_CPU} on a CPU, the only width that vLLM has a kernel for there. Use GPUs, or another model."
        )
    if device != "cpu" and latent_width(config) and dtype == "float32":
        yield (
            f'inference.model.dtype = "float32" with {kind} - expected bfloat16 or float16, as vLLM has no kernel for '
            "latent attention in float32 on a GPU. Leave it out."
        )

    of_nemotron = "moe" in (text.get("layers_block_type") or ()) or "E" in (text.get("hybrid_override_pattern") or "")
    if device == "cpu" and (of_nemotron or kind in EXPERTS_WITHOUT_CPU_KERNEL):
        yield f"{table}: vLLM has no kernel on a CPU for the experts of {kind} - expected one without experts, or GPUs."

    # Layers with a state, on any device.
    if not mixers:
        return
    if leaves_out_vision(config) and not arguments.get("language_model_only", True):
        yield f"inference.args.language_model_only = false with {kind} - expected true: no tower is trained. Remove it."
    if kind.startswith("qwen3_5") and find_spec("torchvision") is None:
        yield f"{table}: vLLM serves {kind} with torchvision only, which is not installed - expected it. Run `uv sync`."
    if text.get("mamba_rms_norm") and text.get("mamba_norm_before_gate", True) and kind == "falcon_h1":
        yield (
            f"{table}: its config.json has mamba_norm_before_gate = true, which vLLM ignores, so that its logprobs are "
            "wrong by nats - expected false, as in the published models. Choose another model."
        )

    # Layers with a state on a CPU, of which only some were tried.
    if device != "cpu":
        return
    if kind not in SERVED_ON_CPU:
        yield f"{table}: vLLM does not serve {kind} on a CPU - expected one of {', '.join(SERVED_ON_CPU)}. Use GPUs."
    if mixers & {*DELTA} and dtype != "bfloat16":
        yield f'inference.model.dtype = "{dtype}" with {kind} on a CPU - expected bfloat16, as vLLM has. Leave it out.'
    if mixers & {*MAMBA} and arguments.get("enable_prefix_caching"):
        yield f"inference.args.enable_prefix_caching with {kind} on a CPU - expected false, or vLLM dies. Remove it."


def mixers_of(config: Config) -> set[str]:
    """Return which of `MIXERS` a model with this config.json has."""
    source = source_of(str(config.get("model_type"))) or ""
    layers = text_of(config).get("layer_types")
    # An architecture may offer such layers, and a model of it have none of them.
    if layers and all(layer.endswith("attention") and layer != "linear_attention" for layer in layers):
        return set()
    return set(re.findall(rf"^class \w*?({'|'.join(MIXERS)})\b", source, re.MULTILINE))


def dtype_on_cpu(config: Config) -> str:
    """Return the precision in which vLLM serves a model on a CPU if none is configured."""
    return "bfloat16" if mixers_of(config) & {*DELTA} else "float32"


def caches_prefixes_on_cpu(config: Config) -> bool:
    """Return whether vLLM's prefix cache works for a model on a CPU."""
    return not mixers_of(config) & {*MAMBA}


def leaves_out_vision(config: Config) -> bool:
    """Return whether only the text model is trained of a model that also sees, by transformers' `AutoModelForCausalLM`.

    The vision tower is then neither in the trainer nor in engines, and exports contain it as it was.
    """
    return bool(mixers_of(config)) and "vision_config" in config


def rotates_in_three_dimensions(config: Config) -> bool:
    """Return whether vLLM's kernel for rotary positions on a CPU is wrong for a model.

    LFM2, and models with latent attention (DeepSeek-V3), hand it queries as [tokens, heads, size]; it then turns one
    head of each token alone.
    """
    return bool(mixers_of(config) & {*CONV} or latent_width(config))


def latent_width(config: Config) -> int:
    """Return the values per token that stand for the keys and values of all heads, as in DeepSeek-V3; 0 elsewhere."""
    text = text_of(config)
    return text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0) if text.get("kv_lora_rank") else 0


def text_of(config: Config) -> Config:
    """Return the part of a config.json that describes the text model."""
    return config.get("text_config") or config


@cache
def source_of(model_type: str) -> str | None:
    """Return the code of transformers for an architecture; None if it has none, empty if it cannot be found."""
    transformers = find_spec("transformers")
    if transformers is None or transformers.origin is None:
        return ""
    models = Path(transformers.origin).parent / "models"
    wanted = re.compile(rf"""model_type(: [\w\[\]]+)? = ["']{re.escape(model_type)}["']""")

    # Most architectures are in a folder of their own name. Parts of others, such as text models, are searched for.
    likely = models / model_type.replace("-", "_")
    for folder in (likely, *sorted(models.iterdir())):
        for file in folder.glob("configuration_*.py"):
            if wanted.search(file.read_text(encoding="utf-8")):
                code = file.with_name(file.name.replace("configuration_", "modeling_", 1))
                return code.read_text(encoding="utf-8") if code.exists() else ""
    return None
