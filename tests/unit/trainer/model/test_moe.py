"""Mixtures of experts in the trainer: any way of computing them is the same model, and tokens go where they went."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from support.models import families
from support.models.moe import CONFIGS, NUM_EXPERTS, TOP_K, build_moe, random_routes, routed, routed_of, save_moe
from support.models.tiny import are_equal, backward, random_samples, take_gradients
from trireme.algo.packing import Sample
from trireme.base.errors import ConfigError
from trireme.config.trainer import ActivationCheckpointing, Experts, TrainerModel
from trireme.trainer.model import moe as mixtures
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World

CPU = torch.device("cpu")
T = 23
REPLAY = Experts(router_replay=True)
PLAIN = random_samples([17, 9])
SAMPLES = routed(PLAIN)
IDS = torch.randint(0, 128, (1, T), generator=torch.Generator().manual_seed(3))


def prepared(kind: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    model = build_moe(kind, **changes)
    mixtures.prepare_experts(model, TrainerModel(moe=REPLAY), list(model.model.layers))
    return model


def replayed(model: PreTrainedModel, routes: np.ndarray, known: np.ndarray | None = None) -> dict[str, Any]:
    return mixtures.routes_argument(model, routed_of(routes, np.ones(len(routes)) if known is None else known), CPU)


def chosen_in(model: PreTrainedModel, **inputs: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Logits, and [T, layers, top_k] where tokens went."""
    found = np.zeros((T, len(model.model.layers), TOP_K), np.int64)
    handles = [
        block.experts.register_forward_pre_hook(lambda _, args, at=found[:, index]: np.copyto(at, args[1].numpy()))
        for index, layer in enumerate(model.model.layers)
        for block in mixtures.blocks_of(layer)
    ]
    with torch.no_grad():
        output = model(input_ids=IDS, **inputs)
    for handle in handles:
        handle.remove()
    assert output.get("aux_loss") is None  # no loss for an even load is added
    return output.logits[0], found


def gradients(model: PreTrainedModel, world: World, samples: list[Sample] = SAMPLES) -> dict[str, torch.Tensor]:
    backward(model, samples, world, capacity=64)
    return take_gradients(model)


@pytest.mark.parametrize("kind", CONFIGS)
def test_router_replay_sends_each_known_token_to_the_engines_experts(kind):
    model = prepared(kind, output_router_logits=True)
    known = ~np.isin(np.arange(T), (6, 12, T - 1))  # but for the last token of each sample
    routes = random_routes(known.sum())
    plain, own = chosen_in(model)
    torch.testing.assert_close(plain, build_moe(kind)(input_ids=IDS).logits[0], rtol=1e-5, atol=1e-5)
    _, went = chosen_in(model, **replayed(model, routes, known))
    first = 1 if kind in ("glm4_moe", "deepseek_v3") else 0  # layers without experts
    assert went[known, first:].tolist() == routes[:, first:].tolist()
    assert went[~known, first].tolist() == own[~known, first].tolist()
    _, after = chosen_in(model)
    assert after.tolist() == own.tolist()  # what was sent somewhere once leaves no trace
    anyway, _ = chosen_in(model, **replayed(model, own))
    torch.testing.assert_close(anyway, plain, rtol=1e-5, atol=1e-5)


def test_replayed_experts_are_weighed_by_the_trainers_router():
    model, routes = prepared(num_hidden_layers=1), random_routes(T, layers=1)
    block, seen = model.model.layers[0].mlp, {}
    block.register_forward_hook(lambda _, args, output: seen.update(given=args[0], made=output))
    chosen_in(model, **replayed(model, routes))
    given = seen["given"].double().view(-1, 64)
    opinion = (given @ block.gate.weight.double().T).exp()
    expected = torch.zeros_like(given)
    for token, experts in enumerate(routes[:, 0].tolist()):
        for expert in experts:
            gate, up = (block.experts.gate_up_proj[expert].double() @ given[token]).chunk(2)
            made = block.experts.down_proj[expert].double() @ (nn.functional.silu(gate) * up)
            expected[token] += made * opinion[token, expert] / opinion[token, experts].sum()
    torch.testing.assert_close(seen["made"].view(-1, 64).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_moe(tmp_path_factory.mktemp("qwen3_moe"))


def test_moe_routers_learn_unless_frozen(folder, world):
    found = {}
    for how, mode in (("trained", None), ("trained", "full"), ("trained", "selective"), ("frozen", None)):
        ac = ActivationCheckpointing(mode=mode) if mode else None
        model = load_model(TrainerModel(moe=Experts(router=how, router_replay=True), ac=ac), str(folder), world)
        found[how, mode] = each = gradients(model, world)
        assert mixtures.expert_metrics(model)["moe/rerouted_frac"] > 0.5
        routers = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]
        assert [name in each and bool(each[name].any()) for name in routers] == [how == "trained"] * 2
        assert "model.layers.0.mlp.experts.down_proj" in each
    for mode in ("full", "selective"):
        torch.testing.assert_close(found["trained", mode], found["trained", None])


def test_routers_choose_in_float32_when_the_rest_is_in_bfloat16(folder, world):
    for precision, expected in (("model", torch.bfloat16), ("float32", torch.float32)):
        config = TrainerModel(optimization_dtype="bfloat16", moe=Experts(router_dtype=precision))
        model = load_model(config, str(folder), world)
        seen: dict[str, torch.Tensor] = {}
        block = model.model.layers[0].mlp
        router = mixtures.router_of(block)
        router.register_forward_hook(lambda _, args, output, seen=seen: seen.update(given=args[0], logits=output[0]))
        block.experts.register_forward_hook(lambda _, args, output, seen=seen: seen.update(made=output))
        gradients(model, world, PLAIN)
        assert (seen["logits"].dtype, seen["made"].dtype) == (expected, torch.bfloat16)
    given = seen["given"].to(torch.bfloat16)  # what the block was given, before it was cast for the router
    whole = router.weight.full_tensor()
    torch.testing.assert_close(seen["logits"], given.float().view(-1, 64) @ whole.T)
    assert not torch.equal(whole.to(torch.bfloat16).float(), whole)


def test_moe_metrics_count_expert_load_and_rerouted_tokens(world):
    model = prepared(num_hidden_layers=1)
    routes = np.array([[[0, 1]]] * 6 + [[[0, 2]]] * 6)
    with torch.no_grad():
        model(input_ids=IDS[:, :3])  # a pass without training does not count
    model(input_ids=IDS[:, :12])
    mixtures.expert_metrics(model)
    model(input_ids=IDS[:, :12], **replayed(model, routes))
    metrics = mixtures.expert_metrics(model)
    assert metrics["moe/busiest_expert"] == 12 / (24 / 8)  # expert 0 got all 12 tokens; 24 places in 8 experts
    assert metrics["moe/idle_experts_frac"] == 5 / 8
    model = prepared()
    _, went = chosen_in(model)
    went[:5, 1] = (went[:5, 1] + 1) % NUM_EXPERTS
    model(input_ids=IDS, **replayed(model, went))
    assert mixtures.expert_metrics(model)["moe/rerouted_frac"] * 2 * T == pytest.approx(5)


def test_a_model_without_experts_reports_none_and_cannot_replay_routes(tiny_model, world):
    model = load_model(TrainerModel(), str(tiny_model), world)
    assert mixtures.mixtures_of(model) == []
    assert mixtures.expert_metrics(model) == {}
    assert replayed(model, random_routes(4)) == {}
    with pytest.raises(ConfigError, match="router_replay = true` with Qwen3ForCausalLM - a model with a mixture"):
        load_model(TrainerModel(moe=REPLAY), str(tiny_model), world)


def test_finding_how_a_router_weighs_leaves_the_random_state_alone():
    class Strange(Qwen3MoeTopKRouter):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits, weights, chosen = super().forward(hidden)
            return logits, weights.tanh(), chosen

    model = build_moe()
    torch.manual_seed(5)
    mixtures.find_weighing(model.model.layers[0].mlp, model.config)
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))
    block = model.model.layers[0].mlp
    block.gate = Strange(model.config)
    with pytest.raises(ConfigError, match="how Strange weighs experts is not known"):
        mixtures.find_weighing(block, model.config)


def test_experts_are_trained_to_the_same_bits_by_several_threads(world):
    """Gradients of tokens that share an expert are added up in one order, or no replay would be exact."""
    config = families.build_config("qwen3_moe", **families._LARGE, num_experts_per_tok=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_num_threads(2)
    try:
        found = []
        for _ in range(3):
            families.backward(model, *families.row(512))
            found.append(take_gradients(model))
    finally:
        torch.set_num_threads(1)
    assert all(are_equal(found[0], again) for again in found[1:])
