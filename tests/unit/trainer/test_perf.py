"""The rates that a trainer reports are of the work that a model needs, no more."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trireme.algo.model.architecture import architecture_of
from trireme.algo.model.chips import CHIPS, chip_called
from trireme.algo.model.flops import flops_per_token as by_hand
from trireme.algo.model.flops import model_flops
from trireme.tools.plan.sizes import count_sizes
from trireme.trainer.perf import flops_per_token, matrix_parameters, peak_memory

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 128, **HEADS}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def built(kind: str, **more: object) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))


def test_flops_count_only_matrices_that_a_token_meets(tiny_model):
    """An embedding is only looked up; of the experts a token meets 2; a frozen parameter costs 4 instead of 6."""
    attention = 2 * (2 * 64 * 128 + 2 * 64 * 64)
    head = 128 * 64
    assert matrix_parameters(built("qwen3")) == (attention + 2 * 3 * 64 * 96 + head,) * 2
    routed = 2 * 2 * 3 * 64 * 16 + 2 * 64 * 8
    assert matrix_parameters(built("qwen3_moe", **EXPERTS)) == (attention + routed + head,) * 2
    assert matrix_parameters(built("qwen3").requires_grad_(False))[1] == 0
    assert [by_hand(1000, trained, attention=0) for trained in (0, 1000)] == [4000, 6000]
    # 6 per matrix parameter; attention 12 * layers 2 * (heads * size) * (mean length 100) / 2
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)  # its embedding is its head
    width = model.config.num_attention_heads * model.config.head_dim
    assert flops_per_token(model, mean_length=100.0) == 6 * matrices + 6 * 2 * width * 100


WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("length", [24.0, 300.0])
def test_a_window_bounds_the_attention_that_is_counted(length):
    """One of two layers looks at 16 tokens at most, where a token has half of its sample before it on average."""
    whole, windowed = (
        flops_per_token(built("gemma3_text", **WINDOWED | more), length)
        for more in (
            {"layer_types": ["full_attention"] * 2},
            {},
        )
    )
    assert whole - windowed == 3 * 4 * 4 * 32 * max(0.0, length / 2 - 16)


@pytest.mark.parametrize(
    ("kind", "more"), [("qwen3", {}), ("qwen3_moe", EXPERTS), ("gemma3_text", WINDOWED), ("mistral", WINDOWED)]
)
def test_the_plan_and_the_trainer_count_the_same_work(kind, more):
    planned = model_flops(architecture_of({"model_type": kind, **SIZES, **more}), 300.0)
    assert planned == flops_per_token(built(kind, **more), 300.0)
    assert peak_memory(torch.device("cpu"))["perf/peak_memory_gib"] > 0


def test_used_experts_are_counted_under_the_option_name_of_a_family():
    """Gemma 4, with 2 layers and experts of 3 matrices here."""
    more = {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 16, "global_head_dim": 32}
    more |= {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]}
    two, three = (matrix_parameters(built("gemma4_text", top_k_experts=count, **more))[0] for count in (2, 3))
    assert three - two == 2 * 3 * 64 * 16
    planned = count_sizes({"model_type": "gemma4_text", "top_k_experts": 3, **SIZES, **more})
    assert planned is not None
    assert [layer.experts.used for layer in planned.layers if layer.experts] == [3, 3]


def test_a_gpu_is_known_by_whole_words_of_its_name():
    names = ("NVIDIA L40", "NVIDIA L40S", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB")
    found = [chip_called(name) for name in (*names, "NVIDIA GeForce RTX 4090")]
    assert found == [CHIPS[key] for key in ("l40", "l40s", "h100", "h100-pcie", "a100-40", "4090")]
    assert chip_called("NVIDIA GH200 480GB") is None
