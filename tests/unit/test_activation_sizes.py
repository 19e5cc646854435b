"""What a plan says that the backward pass keeps is what autograd keeps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from trireme.algo.activations import Pass, kept_by_layer, kept_by_matrices, layer_input
from trireme.algo.architecture import architecture_of
from trireme.trainer.activations import KEPT
from trireme.trainer.samples_apart import ARGUMENT, ApartRow, attend_apart, can_attend_apart, row_given

TOKENS = 256
SMALL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 272,
    "vocab_size": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 80}
CASES = [
    ("llama", "sdpa"),
    ("qwen2", "sdpa"),
    ("qwen3", "sdpa"),
    ("mistral", "sdpa"),
    ("gemma3_text", "sdpa"),
    ("qwen3_moe", "sdpa"),
    ("llama", "eager"),
    ("gpt_oss", "eager"),
    ("gemma2", "eager"),
]


def config_of(kind: str, layers: int) -> dict[str, Any]:
    experts = EXPERTS if kind in ("qwen3_moe", "gpt_oss") else {}
    full = {"layer_types": ["full_attention"] * layers} if kind in ("gemma2", "gemma3_text", "gpt_oss") else {}
    window = {"sliding_window": 64} if full else {"sliding_window": None}
    return {"model_type": kind, "num_hidden_layers": layers, **window, **SMALL, **experts, **full}


def kept(config: dict[str, Any], attention: str, dtype: torch.dtype, *, packed: bool, frozen: bool) -> int:
    """Bytes of everything that autograd saves in a forward pass, each piece of memory once, parameters left out."""
    values = dict(config)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention).train()
    lengths = [TOKENS // 2] * 2 if packed else [TOKENS]
    context = {}
    if can_attend_apart(model):
        attend_apart(model)
        context = {ARGUMENT: ApartRow(lengths, torch.device("cpu"))}
    if frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with (
        torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor),
        row_given() if context else nullcontext(),
    ):
        model.model(input_ids=ids, position_ids=positions, use_cache=False, **context)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("packed", [False, True], ids=["single", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "attention"), CASES, ids=["-".join(case) for case in CASES])
def test_a_layer_keeps_what_the_plan_says(
    kind: str, attention: Any, dtype: torch.dtype, packed: bool, frozen: bool
) -> None:
    """The difference of a model with two layers and one with one; to 2 %."""
    one, two = (kept(config_of(kind, layers), attention, dtype, packed=packed, frozen=frozen) for layers in (1, 2))
    model = architecture_of(config_of(kind, 1))
    targets = ("none",) if frozen else None
    row = Pass(TOKENS, dtype.itemsize, attention, packed=packed, targets=targets, sample=TOKENS // 2)
    assert kept_by_layer(model, model.layers[0], row) == pytest.approx(two - one, rel=0.02)


def test_short_samples_keep_what_the_plan_says_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.TOKENS", 96)
    test_a_layer_keeps_what_the_plan_says("qwen3", "sdpa", torch.float32, packed=True, frozen=False)


def test_flash_attention_keeps_nothing_that_grows_with_the_square_of_a_row() -> None:
    model = architecture_of(config_of("qwen3", 1))
    short, long = (
        kept_by_layer(model, model.layers[0], Pass(tokens, 2, "flash_attention_2")) for tokens in (1000, 4000)
    )
    assert long == 4 * short
    apart, masked = (kept_by_layer(model, model.layers[0], Pass(4000, 2, "sdpa", cp=cp)) for cp in (1, 2))
    assert apart < 1.1 * long
    assert masked > 2 * 4000**2


def test_ranks_that_share_a_row_share_its_activations() -> None:
    model = architecture_of(config_of("qwen3", 1))
    alone, shared = (kept_by_layer(model, model.layers[0], Pass(4096, 2, "flash_attention_2", cp=cp)) for cp in (1, 2))
    assert shared == alone / 2


class Products(TorchDispatchMode):
    """Bytes of the results of all operations that selective checkpointing keeps."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in KEPT:
            results = result if isinstance(result, tuple) else (result,)
            self.num_bytes += sum(tensor.nbytes for tensor in results)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_selective_checkpointing_keeps_what_the_plan_says(dtype: torch.dtype) -> None:
    """128 tokens of each sample: short in bfloat16, not in float32."""
    found = []
    for layers in (1, 2):
        with Products() as products:
            kept(config_of("qwen3", layers), "sdpa", dtype, packed=True, frozen=False)
        found.append(products.num_bytes)
    model = architecture_of(config_of("qwen3", 1))
    row = Pass(TOKENS, dtype.itemsize, "sdpa", sample=TOKENS // 2)
    planned = kept_by_matrices(model, model.layers[0], row) - layer_input(model, row)
    assert planned == pytest.approx(found[1] - found[0], rel=0.02)
