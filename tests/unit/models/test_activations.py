"""However little a block keeps for its backward pass, the gradients are the same."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from families import ATTENTION, HYBRIDS, SERVED, backward, build_config, row, save_family
from tiny import are_equal, largest_difference, take_gradients
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
WAYS = {
    "full": {"ac": ActivationCheckpointing()}, "every other": {"ac": ActivationCheckpointing(freq=2)},
    "selective": {"ac": ActivationCheckpointing(mode="selective")}, "offload": {"activation_offload": True},
    "offload of what full keeps": {"ac": ActivationCheckpointing(), "activation_offload": True},
    "offload of what selective keeps": {"ac": ActivationCheckpointing(mode="selective"), "activation_offload": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("activations")
    return {kind: save_family(root / kind, build_config(kind, num_hidden_layers=3)) for kind in KINDS}


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "OFFLOADED_BYTES", 1)


def gradients(folder: Path, kind: str, world: World, **settings: object) -> dict[str, torch.Tensor]:
    config = TrainerModel(attn=ATTENTION.get(kind, "sdpa")).model_copy(update=settings)
    model = load_model(config, str(folder), world)
    backward(model, *row(5, 8, seed=1))
    take_gradients(model)
    backward(model, *row(9, 14))
    return take_gradients(model)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("qwen3", way) for way in WAYS),
        *((kind, way) for kind in ("gpt_oss", "qwen3_moe") for way in ("full", "offload of what selective keeps")),
    ],
)
def test_gradients_are_the_same(checkpoints, kind, way, world):
    """To the bit, but for tensors that come back from CPU memory in another layout, whose products round otherwise."""
    expected = gradients(checkpoints[kind], kind, world)
    found = gradients(checkpoints[kind], kind, world, **WAYS[way])
    assert are_equal(found, expected) or ("offload" in way and largest_difference(found, expected) < 1e-5)


def test_mixtures_in_bfloat16_can_be_offloaded(checkpoints, world):
    """FSDP gathers their float32 routers by themselves, after their block has begun."""
    settings = {"optimization_dtype": "bfloat16"}
    found, expected = (
        gradients(checkpoints["qwen3_moe"], "qwen3_moe", world, **settings, activation_offload=offloads)
        for offloads in (True, False)
    )
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
    mm, rsqrt = {}, {}
    for name in ("plain", "selective", "every other", "full"):
        model = load_model(TrainerModel().model_copy(update=WAYS.get(name, {})), str(checkpoints["qwen3"]), world)
        backward(model, *row(23))
        with Operations() as done:
            backward(model, *row(23))
        mm[name], rsqrt[name] = done.counts["aten::mm"], done.counts["aten::rsqrt"]
    assert mm["selective"] == mm["plain"] < mm["every other"] < mm["full"]
    assert rsqrt["selective"] == rsqrt["full"] > rsqrt["every other"] > rsqrt["plain"]


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
KEPT_BY = [(kind, "sdpa") for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "qwen3_moe")]
KEPT_BY += [("llama", "eager"), ("gpt_oss", "eager"), ("gemma2", "eager")]
CASES = [
    (*case, dtype, TOKENS, packed, frozen)
    for case in KEPT_BY
    for dtype in (torch.float32, torch.bfloat16)
    for packed in (False, True)
    for frozen in (False, True)
    if case == ("qwen3", "sdpa") or packed != frozen == (dtype == torch.float32)
]
CASES += [("qwen3", "sdpa", torch.float32, 96, True, False)]  # short samples


def config_of(kind: str, layers: int) -> dict[str, Any]:
    experts = EXPERTS if kind in ("qwen3_moe", "gpt_oss") else {}
    full = {"layer_types": ["full_attention"] * layers} if kind in ("gemma2", "gemma3_text", "gpt_oss") else {}
    window = {"sliding_window": 64} if full else {"sliding_window": None}
    return {"model_type": kind, "num_hidden_layers": layers, **window, **SMALL, **experts, **full}


def kept(
    config: dict[str, Any], attention: str, dtype: torch.dtype, *, packed: bool, frozen: bool, tokens: int = TOKENS
) -> int:
    """Bytes of everything that autograd saves in a forward pass, each piece of memory once, parameters left out."""
    values = dict(config)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention).train()
    lengths = [tokens // 2] * 2 if packed else [tokens]
    context = {}
    if packed_attention.supports_packed_attention(model):
        packed_attention.use_packed_attention(model)
        context = {packed_attention.ARGUMENT: packed_attention.PackedRow(lengths, torch.device("cpu"))}
    if frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with (
        torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor),
        packed_attention.row_given() if context else nullcontext(),
    ):
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **context)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(("kind", "attention", "dtype", "tokens", "packed", "frozen"), CASES)
def test_a_layer_keeps_what_the_plan_says(kind, attention, dtype, tokens, packed, frozen):
    """The difference of a model with two layers and one with one; to 2 %."""
    options = {"packed": packed, "frozen": frozen, "tokens": tokens}
    one, two = (kept(config_of(kind, layers), attention, dtype, **options) for layers in (1, 2))
    model = architecture_of(config_of(kind, 1))
    targets = ("none",) if frozen else None
    row = Pass(tokens, dtype.itemsize, attention, packed=packed, targets=targets, sample=tokens // 2)
    assert kept_by_layer(model, model.layers[0], row) == pytest.approx(two - one, rel=0.02)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_with_a_state_keep_about_what_the_plan_says(kind):
    """To 20 %: a layer that is larger than it seems would be a run that does not fit."""
    config = build_config(kind, **SERVED[kind]).to_dict()
    measured = kept(config, ATTENTION.get(kind, "sdpa"), torch.float32, packed=False, frozen=False)
    model = count_sizes(config)
    planned = sum(kept_by_layer(model, layer, Pass(TOKENS, 4, packed=False)) for layer in model.layers)
    assert planned == pytest.approx(measured, rel=0.2)


def test_flash_attention_keeps_nothing_that_grows_with_the_square_of_a_row_and_ranks_share_it():
    model = architecture_of(config_of("qwen3", 1))

    def planned(tokens: int, attention: Any, cp: int = 1) -> float:
        return kept_by_layer(model, model.layers[0], Pass(tokens, 2, attention, cp=cp))

    long = planned(4000, "flash_attention_2")
    assert long == 4 * planned(1000, "flash_attention_2") == 2 * planned(4000, "flash_attention_2", cp=2)
    assert planned(4000, "sdpa") < 1.1 * long
    assert planned(4000, "sdpa", cp=2) > 2 * 4000**2  # which needs a mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_selective_checkpointing_keeps_what_the_plan_says(dtype):
    """128 tokens of each sample: short in bfloat16, not in float32."""
    found = []
    for layers in (1, 2):
        with Operations() as done:
            kept(config_of("qwen3", layers), "sdpa", dtype, packed=True, frozen=False)
        found.append(done.kept_bytes)
    model = architecture_of(config_of("qwen3", 1))
    row = Pass(TOKENS, dtype.itemsize, "sdpa", sample=TOKENS // 2)
    planned = kept_by_matrices(model, model.layers[0], row) - layer_input(model, row)
    assert planned == pytest.approx(found[1] - found[0], rel=0.02)
