"""However little a block keeps for its backward pass, the gradients are the same, and the plan knows how much it is."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from support.models.families import ATTENTION, HYBRIDS, SERVED, backward, build_config, row, save_family
from support.models.tiny import are_equal, largest_difference, take_gradients
from trireme.algo.model.activations import Pass, kept_by_layer, kept_by_matrices, layer_input
from trireme.algo.model.architecture import architecture_of
from trireme.config.trainer import ActivationCheckpointing, TrainerModel
from trireme.tools.plan.sizes import count_sizes
from trireme.trainer.model import activations
from trireme.trainer.model.activations import KEPT, Offload
from trireme.trainer.model.model import load_model
from trireme.trainer.model.packing import attention as packed_attention
from trireme.trainer.parallel.mesh import World

KINDS = ("qwen3", "gpt_oss", "qwen3_moe")
FULL, SELECTIVE = {"ac": ActivationCheckpointing()}, {"ac": ActivationCheckpointing(mode="selective")}
OFFLOAD, HALF = {"activation_offload": True}, {"optimization_dtype": "bfloat16"}
EVERY_OTHER = {"ac": ActivationCheckpointing(freq=2)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("activations")
    return {kind: save_family(root / kind, build_config(kind, num_hidden_layers=3)) for kind in KINDS}


def gradients(folder: Path, world: World, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = load_model(TrainerModel(**settings), str(folder), world)
    backward(model, *row(5, 8, seed=1))
    take_gradients(model)
    backward(model, *row(9, 14))
    return take_gradients(model)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(("qwen3", each) for each in (FULL, EVERY_OTHER, SELECTIVE, OFFLOAD, FULL | OFFLOAD, SELECTIVE | OFFLOAD)),
        *((kind, each) for kind in ("gpt_oss", "qwen3_moe") for each in (FULL, SELECTIVE | OFFLOAD)),
        ("qwen3_moe", HALF | OFFLOAD),  # FSDP gathers float32 routers by themselves, after their block has begun
    ],
)
def test_gradients_are_the_same(checkpoints, kind, settings, world, monkeypatch):
    """To the bit, but for tensors that come back from CPU memory in another layout, whose products round otherwise."""
    monkeypatch.setattr(activations, "OFFLOADED_BYTES", 1)
    plain = {name: value for name, value in settings.items() if name in HALF}
    found, expected = (gradients(checkpoints[kind], world, each) for each in (settings, plain))
    if "activation_offload" in settings and not plain:
        assert largest_difference(found, expected) < 1e-5
    else:
        assert are_equal(found, expected)


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of the results of those that selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.kept_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.counts[function.name()] += 1
        if function.name() in KEPT:
            self.kept_bytes += sum(tensor.nbytes for tensor in tree_leaves(result))
        return result


def test_selective_computes_no_matrix_product_twice(checkpoints, world):
    products, norms = [], []
    for settings in ({}, SELECTIVE, EVERY_OTHER, FULL):
        model = load_model(TrainerModel(**settings), str(checkpoints["qwen3"]), world)
        backward(model, *row(23))
        with Operations() as done:
            backward(model, *row(23))
        products.append(done.counts["aten::mm"])
        norms.append(done.counts["aten::rsqrt"])
    assert products[1] == products[0] < products[2] < products[3]
    assert norms[1] == norms[3] > norms[2] > norms[0]


def test_only_activations_of_some_size_are_moved_and_each_once():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    inputs = torch.randn(8, 64, requires_grad=True)
    offload = Offload(torch.device("cpu"), smallest_bytes=8 * 64 * 4)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        twice = layer(hidden) + torch.nn.functional.linear(hidden, layer.weight)  # both save their input
        return twice * torch.ones(64)  # of which 64 numbers are saved

    moved = offload.around(forward, layer, is_first=True)(inputs)
    assert offload.num_bytes == inputs.nbytes
    assert torch.equal(*(torch.autograd.grad(each.sum(), inputs)[0] for each in (moved, forward(inputs))))
    with torch.no_grad():  # no backward pass needs them
        offload.around(forward, layer, is_first=True)(inputs)
    assert offload.num_bytes == inputs.nbytes


TOKENS = 256
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
SMALL = {"hidden_size": 128, "intermediate_size": 272, "vocab_size": 64, **HEADS}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 80}
PACKED = Pass(TOKENS, 2, sample=TOKENS // 2)  # 128 tokens of each sample: short in bfloat16, not in float32
FROZEN = Pass(TOKENS, 4, packed=False, targets=("none",))
CASES = [
    (kind, each) for kind in ("llama", "qwen2", "mistral", "gemma3_text", "qwen3_moe") for each in (PACKED, FROZEN)
]
CASES += [
    (kind, replace(each, attention="eager")) for kind in ("llama", "gpt_oss", "gemma2") for each in (PACKED, FROZEN)
]
CASES += [
    ("qwen3", replace(PACKED, value_bytes=value_bytes, packed=packed, targets=targets))
    for value_bytes, packed, targets in product((2, 4), (False, True), (None, ("none",)))
]
CASES += [("qwen3", Pass(96, 4, sample=48))]


def config_of(kind: str, layers: int) -> dict[str, Any]:
    experts = EXPERTS if kind in ("qwen3_moe", "gpt_oss") else {}
    full = {"layer_types": ["full_attention"] * layers} if kind in ("gemma2", "gemma3_text", "gpt_oss") else {}
    window = {"sliding_window": 64} if full else {"sliding_window": None}
    return {"model_type": kind, "num_hidden_layers": layers, **window, **SMALL, **experts, **full}


def kept(config: dict[str, Any], row: Pass) -> int:
    """Bytes of everything that autograd saves in a forward pass, each piece of memory once, parameters left out."""
    values = dict(config)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    dtype = {2: torch.bfloat16, 4: torch.float32}[row.value_bytes]
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=row.attention).train()
    lengths = [row.tokens // 2] * 2 if row.packed else [row.tokens]
    context = {}
    if packed_attention.supports_packed_attention(model):
        packed_attention.use_packed_attention(model)
        context = {packed_attention.ARGUMENT: packed_attention.PackedRow(lengths, torch.device("cpu"))}
    if row.frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, row.tokens, dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with (
        torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor),
        packed_attention.row_given() if context else nullcontext(),
    ):
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **context)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(("kind", "row"), CASES)
def test_a_layer_keeps_what_the_plan_says(kind, row):
    """The difference of a model with two layers and one with one; to 2 %."""
    one, two = (kept(config_of(kind, layers), row) for layers in (1, 2))
    model = architecture_of(config_of(kind, 1))
    assert kept_by_layer(model, model.layers[0], row) == pytest.approx(two - one, rel=0.02)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_with_a_state_keep_about_what_the_plan_says(kind):
    """To 20 %: a layer that is larger than it seems would be a run that does not fit."""
    config, row = (
        build_config(kind, **SERVED[kind]).to_dict(),
        Pass(TOKENS, 4, ATTENTION.get(kind, "sdpa"), packed=False),
    )
    model = count_sizes(config)
    planned = sum(kept_by_layer(model, layer, row) for layer in model.layers)
    assert planned == pytest.approx(kept(config, row), rel=0.2)


@pytest.mark.parametrize("value_bytes", [2, 4])
def test_selective_checkpointing_keeps_what_the_plan_says(value_bytes):
    found, row = [], replace(PACKED, value_bytes=value_bytes)
    for layers in (1, 2):
        with Operations() as done:
            kept(config_of("qwen3", layers), row)
        found.append(done.kept_bytes)
    model = architecture_of(config_of("qwen3", 1))
    planned = kept_by_matrices(model, model.layers[0], row) - layer_input(model, row)
    assert planned == pytest.approx(found[1] - found[0], rel=0.02)


def test_flash_attention_keeps_activations_linear_in_row_length():
    model = architecture_of(config_of("qwen3", 1))

    def planned(tokens: int, attention: Any, cp: int = 1) -> float:
        return kept_by_layer(model, model.layers[0], Pass(tokens, 2, attention, cp=cp))

    long = planned(4000, "flash_attention_2")
    assert long == 4 * planned(1000, "flash_attention_2") == 2 * planned(4000, "flash_attention_2", cp=2)
    assert planned(4000, "sdpa") < 1.1 * long
    assert planned(4000, "sdpa", cp=2) > 2 * 4000**2  # which needs a mask
