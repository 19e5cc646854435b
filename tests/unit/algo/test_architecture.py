"""Parameters of a model are counted from its config.json, as they are in the model itself."""

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.models.model_configs import MODELS
from trireme.algo.model.architecture import architecture_of, is_known

PUBLISHED = {
    "Qwen/Qwen3-8B": 8_190_735_360, "Qwen/Qwen3-30B-A3B": 30_532_122_624, "Qwen/Qwen2.5-VL-7B": 8_292_166_656,
    "google/gemma-3-1b": 999_885_952, "google/gemma-3-4b": 4_300_079_472, "openai/gpt-oss-120b": 116_829_156_672,
    "microsoft/phi-4": 14_659_507_200, "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}  # fmt: skip
"""What their makers' files hold."""

SMALL = {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 160, "vocab_size": 200}
VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 20},
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}
    | {"decoder_sparse_step": 2, "num_experts_per_tok": 2},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gemma", "head_dim": 16},
    {"model_type": "gemma2", "head_dim": 16, "sliding_window": 64},
    {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64},
    {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
]


def built(config):
    values = dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


@pytest.mark.slow  # families are counted exactly below
def test_page_of_published_models_agrees_with_the_dry_run():
    """`scripts/published_models.py` writes it. Parameters that are not worked out are counted in such a model."""
    published = SimpleNamespace(**run_path(str(Path(__file__).parents[3] / "scripts/published_models.py")))
    rows = {name: published.describe(name) for name in MODELS}
    shown = published.PAGE.read_text().partition(f"{published.BEGIN}\n")[2].partition(published.END)[0]
    assert shown == published.page_of(rows.values())
    for name, row in rows.items():
        assert bool(row.parameters) != ("cuda" in row.refusals)
        assert row.parameters == PUBLISHED.get(name, row.parameters)
        if is_known(MODELS[name]):
            parameters = built(MODELS[name]).parameters()
            assert (name, sum(each.numel() for each in parameters)) == (name, row.parameters)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values()))[:40])
def test_every_family_is_counted_exactly_whatever_its_settings(variant):
    config = SMALL | variant
    model, ours = built(config), architecture_of(config)
    assert is_known(config)
    assert ours.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert architecture_of(model.config.to_dict()).num_parameters == ours.num_parameters, "a file written whole"
    windowed = [kind == "sliding_attention" for kind in getattr(model.config, "layer_types", None) or []]
    if windowed:
        assert [layer.window is not None for layer in ours.layers] == windowed


def test_of_a_mixture_of_experts_a_token_meets_those_it_is_sent_to():
    # 30.5B in all; embedding 0.31B, and of 48 layers' 128 experts of 3 * 2048 * 768 each, 8
    model = architecture_of(MODELS["Qwen/Qwen3-30B-A3B"])
    experts = 48 * 8 * 3 * 2048 * 768
    attention = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512)
    routers, head = 48 * 2048 * 128, 151936 * 2048
    assert model.active_parameters == experts + attention + routers + head
    assert 3.0e9 < model.active_parameters < 3.4e9
