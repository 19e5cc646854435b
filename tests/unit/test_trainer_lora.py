"""Adapters: what is trained, what it computes, what is saved, and that it starts and goes on the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from tiny import (
    VOCABULARY,
    are_equal,
    backward,
    batch_reply,
    content_of,
    largest_difference,
    open_exporter,
    open_store,
    random_samples,
    save_tiny_model,
    take_gradients,
    train_step,
    weights_of,
)
from trireme.base.errors import ConfigError
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.lora import is_adapter
from trireme.trainer.merging import export_merged
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer
from trireme.trainer.served import merged_tensors, served_specs, served_tensors
from trireme.trainer.state import TrainerState, tensors_of
from trireme.trainer.stepper import Stepper, base_state
from trireme.trainer.tokenizer import open_tokenizer
from trireme.trainer.weights_folder import AdaptedModel

LORA = Lora(rank=4, alpha=8)
LENGTHS = [40, 30, 18, 33]
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return saved(Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=False)), tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    return saved(
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**TINY, **EXPERTS)), tmp_path_factory.mktemp("experts")
    )


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def run_config(folder: Path, lora: Lora = LORA, **loss: object) -> RunConfig:
    return RunConfig(
        model=Model(name=str(folder)),
        max_steps=10,
        trainer=TrainerConfig(model=TrainerModel(lora=lora), optim=Optimizer(lr=1e-2), loss=Loss(**loss)),  # type: ignore[arg-type]
    )


def opened(folder: Path, world: World, lora: Lora = LORA) -> TrainerState:
    return base_state(run_config(folder, lora), world)


def trained(folder: Path, world: World, lora: Lora = LORA, steps: int = 2) -> TrainerState:
    state = opened(folder, world, lora)
    for step in range(steps):
        train_step(state, samples(step), world)
    return state


def samples(step: int) -> list:
    return random_samples(LENGTHS, seed=step)


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


def loaded_by_transformers(folder: Path, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


def test_adapters_begin_as_pefts_own_change_nothing_at_first_and_alone_are_trained(folder: Path, world: World) -> None:
    """Values of A are drawn from PEFT's range, and fill it."""
    state = opened(folder, world)
    assert torch.equal(logits(state.model), logits(load_model(TrainerModel(), str(folder), world)))
    before = weights_of(state.model)
    for name, tensor in before.items():
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
        assert ".lora_B." not in name or not tensor.any()
    train_step(state, samples(0), world)
    after = weights_of(state.model)
    adapters = {name for name in before if is_adapter(name)}
    assert len(adapters) == 2 * 7 * 2  # A and B, seven layers in each of two blocks
    assert {name for name in before if not torch.equal(before[name], after[name])} <= adapters
    assert {name for name, p in state.model.named_parameters() if p in state.optimizer.state} == adapters


def test_the_seed_decides_how_adapters_begin(folder: Path, world: World) -> None:
    def begun(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return weights_of(load_model(TrainerModel(lora=LORA), str(folder), world))

    assert are_equal(begun(5), begun(5))
    assert not are_equal(begun(5), begun(6))


@pytest.mark.parametrize(
    ("base", "lora"),
    [
        ("folder", LORA),
        ("folder", Lora(rank=2, alpha=3, use_rslora=True)),
        ("folder", Lora(rank=2, target_modules=("all-linear",))),
        ("folder", Lora(rank=4, alpha=8, dropout=0.5)),
        ("untied", Lora(rank=2, target_modules=("lm_head",))),
        ("untied", Lora(rank=2, target_modules=("q_proj",), modules_to_save=("lm_head", "embed_tokens"))),
    ],
    ids=["plain", "rank-stabilised", "all linear layers", "dropout", "head", "modules trained whole"],
)
def test_merged_weights_compute_what_the_adapters_do(
    base: str, lora: Lora, world: World, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(base)
    state = trained(path, world, lora)
    tensors = dict(served_tensors(state.model, torch.float32))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert not lora.modules_to_save or not torch.equal(tensors[name], plain[name])
    merged = loaded_by_transformers(path, tensors)
    torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-5, atol=1e-5)


def test_adapters_train_as_pefts_own_model_does(folder: Path, world: World) -> None:
    """The gradients of PEFT's model, given the same adapters, on the same tokens."""
    state = trained(folder, world)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA.target_modules))
    theirs = get_peft_model(base, settings)
    own = {f"base_model.model.{name}": tensor for name, tensor in weights_of(state.model).items()}
    theirs.load_state_dict(own, strict=False)
    ids = torch.arange(3, 27)[None]
    for model in (state.model, theirs):
        logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        logprobs[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
    expected = {name.removeprefix("base_model.model."): grad for name, grad in take_gradients(theirs).items()}
    found = take_gradients(state.model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config", [GptOssConfig, Gemma2Config, Qwen2Config, Qwen3MoeConfig], ids=lambda config: config.model_type
)
def test_other_models_are_merged_too(config: type[PretrainedConfig], world: World, tmp_path: Path) -> None:
    """Experts, also stored the other way round, norms around each part, biases."""
    experts = {
        GptOssConfig: {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
        Qwen3MoeConfig: EXPERTS,
    }.get(config, {})
    torch.manual_seed(3)
    saved(AutoModelForCausalLM.from_config(config(**TINY, tie_word_embeddings=False, **experts)), tmp_path)
    torch.manual_seed(4)
    model = load_model(TrainerModel(lora=Lora(rank=2, alpha=4), attn="eager"), str(tmp_path), world)
    assert any(".experts." in name and is_adapter(name) for name in weights_of(model)) == bool(experts)
    state = TrainerState(model, build_optimizer(model, Optimizer(lr=1e-2)))
    for step in range(2):
        train_step(state, samples(step), world)
    save_file(dict(served_tensors(model, torch.float32)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"ac": ActivationCheckpointing()},
        {"ac": ActivationCheckpointing(mode="selective")},
        {"activation_offload": True},
        {"reshard_after_forward": False},
    ],
    ids=lambda settings: str(*settings),
)
def test_how_activations_are_kept_changes_no_gradient_nor_what_is_dropped(
    folder: Path, world: World, settings: dict
) -> None:
    lora = LORA.model_copy(update={"dropout": 0.2})

    def gradients(**changed: object) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = load_model(TrainerModel(lora=lora, **changed), str(folder), world)  # type: ignore[arg-type]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.fill_(0.01)
        backward(TrainerState(model, torch.optim.SGD([torch.zeros(1)])), samples(0), world, capacity=64)
        return take_gradients(model)

    assert largest_difference(gradients(**settings), gradients()) < 1e-5


def test_specs_announce_what_is_served(folder: Path, experts: Path, world: World) -> None:
    for base, sync in ((folder, "merged"), (folder, "adapter"), (experts, "merged")):
        model = opened(base, world, LORA.model_copy(update={"sync": sync})).model
        announced = [(spec.name, spec.dtype, spec.shape) for spec in served_specs(model, torch.bfloat16)]
        served = [(name, "bfloat16", list(tensor.shape)) for name, tensor in served_tensors(model, torch.bfloat16)]
        assert announced == served


def test_adapters_are_served_after_their_base_model_which_stays_as_it_is(folder: Path, world: World) -> None:
    state = trained(folder, world, LORA.model_copy(update={"sync": "adapter"}))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    served = dict(served_tensors(state.model, torch.float32))
    only = dict(served_tensors(state.model, torch.float32, only_adapters=True))
    assert len(only) == 28
    assert list(served)[-28:] == list(only)
    assert all(torch.equal(tensor, base[name]) for name, tensor in list(served.items())[:-28])
    merged = dict(merged_tensors(state.model, torch.float32))
    name = "model.layers.1.mlp.up_proj"
    product = only[f"base_model.model.{name}.lora_B.weight"] @ only[f"base_model.model.{name}.lora_A.weight"]
    torch.testing.assert_close(base[f"{name}.weight"] + product, merged[f"{name}.weight"])


def test_what_is_dropped_can_be_dropped_again(folder: Path, world: World) -> None:
    """A step depends on the run's seed and its own number, not on what was drawn before."""
    lora = LORA.model_copy(update={"dropout": 0.3})

    def stepped(draws_before: int) -> dict[str, torch.Tensor]:
        state = opened(folder, world, lora)
        torch.rand(draws_before)
        train_step(state, samples(0), world)
        return weights_of(state.model)

    assert are_equal(stepped(0), stepped(7))
    assert not are_equal(stepped(0), weights_of(trained(folder, world, steps=1).model))


def test_a_checkpoint_holds_adapters_only_and_training_goes_on_from_it_to_the_bit(
    folder: Path, world: World, tmp_path: Path
) -> None:
    lora = LORA.model_copy(update={"dropout": 0.2})
    straight = trained(folder, world, lora, steps=2)
    assert {name for name in tensors_of(straight) if ".lora_" not in name} <= {"progress.skipped_in_a_row"}
    store = open_store(tmp_path, world)
    store.save(straight)
    store.wait()
    resumed = opened(folder, world, lora)
    load_checkpoint(resumed, tmp_path / "step_2", rank=0)
    assert are_equal(content_of(resumed), content_of(straight))
    for state in (straight, resumed):
        train_step(state, samples(2), world)
    assert are_equal(content_of(resumed), content_of(straight))


def saved_weights(state: TrainerState, folder: Path, model: Path, world: World) -> tuple[Path, Path]:
    """Return its checkpoint, and the weights that come with it."""
    store = open_store(folder / "checkpoints", world, exporter=open_exporter(folder / "weights", model, world))
    store.save(state)
    store.wait()
    return folder / "checkpoints/step_2", folder / "weights/step_2"


@pytest.mark.parametrize(
    ("base", "lora"),
    [
        ("folder", LORA),
        ("folder", Lora(rank=2, target_modules=("v_proj", "layers.1.self_attn.q_proj"))),
        ("folder", Lora(rank=2, target_modules=("v_proj", "1.mlp.down_proj"))),
        ("folder", Lora(rank=2, target_modules=("v_proj", "q_proj"))),
        ("untied", Lora(rank=2, target_modules=("q_proj", "o_proj"), modules_to_save=("lm_head",), use_rslora=True)),
        ("experts", Lora(rank=2, alpha=4)),
    ],
    ids=["plain", "one layer", "another layer", "all layers", "head trained whole", "experts"],
)
def test_what_a_checkpoint_leaves_is_loaded_by_peft_merged_and_evaluated_as_it_was_trained(
    base: str, lora: Lora, folder: Path, world: World, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(base)
    state = trained(path, world, lora)
    checkpoint, weights = saved_weights(state, tmp_path, folder, world)
    files = {file.name for file in weights.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files - {"model.safetensors"}
    assert json.loads((weights / "adapter_config.json").read_text())["base_model_name_or_path"] == str(path.resolve())
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), str(weights))
    export_merged(checkpoint, tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (theirs, merged):
        torch.testing.assert_close(logits(model), logits(state.model), rtol=1e-4, atol=1e-5)
    evaluated = dict(AdaptedModel(weights, base=None, dtype="float32").tensors())
    assert are_equal(evaluated, dict(served_tensors(state.model, torch.float32)))
    open_tokenizer(str(tmp_path / "merged"), False)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_merged_has_the_bits_that_engines_had_whatever_the_base_was_held_in(
    held: Any, dtype: str, folder: Path, world: World, tmp_path: Path
) -> None:
    model = load_model(TrainerModel(lora=LORA, optimization_dtype=held), str(folder), world)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, getattr(torch, held))}
    state = TrainerState(model=model, optimizer=build_optimizer(model, Optimizer(lr=1e-2)))
    assert all(train_step(state, samples(step), world)["grad_norm"] > 0 for step in range(2))
    checkpoint, weights = saved_weights(state, tmp_path, folder, world)
    served = dict(served_tensors(state.model, getattr(torch, dtype)))
    export_merged(checkpoint, tmp_path / "merged", dtype=dtype)
    assert are_equal(load_file(tmp_path / "merged/model.safetensors"), served)
    assert are_equal(dict(AdaptedModel(weights, base=None, dtype=dtype).tensors()), served)
    assert not (tmp_path / "merged/trained_with.json").exists()


@pytest.mark.parametrize(
    ("base", "lora", "words"),
    [
        ("folder", Lora(target_modules=("q_proj", "qproj")), ["qproj", "down_proj, gate_proj, k_proj", "all-linear"]),
        ("folder", Lora(modules_to_save=("head",)), ["modules_to_save", "head", "embed_tokens"]),
        ("folder", Lora(modules_to_save=("lm_head",)), ["lm_head", "tie_word_embeddings"]),
        ("folder", Lora(target_modules=("lm_head",)), ["lm_head", "tie_word_embeddings"]),
        ("untied", Lora(target_modules=("lm_head",), dropout=0.1), ["lora.dropout = 0.1"]),
        ("experts", Lora(dropout=0.1), ["lora.dropout = 0.1"]),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused_with_what_it_has(
    base: str, lora: Lora, words: list[str], world: World, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError) as refusal:
        opened(request.getfixturevalue(base), world, lora)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_the_reference_is_the_base_model_without_a_second_copy(folder: Path, world: World) -> None:
    config = run_config(folder, beta=0.5)
    state = base_state(config, world)
    assert state.reference is not None
    assert state.reference.model is state.model
    base = logits(load_model(TrainerModel(), str(folder), world))
    metrics = step_all(config, state, world, steps=2)
    assert metrics[0]["reference_kl"] == 0.0
    assert metrics[1]["reference_kl"] > 0.0
    trained_before = weights_of(state.model)
    with state.reference.ready() as model:
        assert torch.equal(logits(model), base)
    assert are_equal(weights_of(state.model), trained_before)


def test_a_reference_that_moves_comes_back_from_a_checkpoint(folder: Path, world: World, tmp_path: Path) -> None:
    config = run_config(folder, beta=0.5, reference_update_every=2)
    straight = base_state(config, world)
    step_all(config, straight, world, steps=3)
    store = open_store(tmp_path, world)
    store.save(straight)
    store.wait()
    resumed = base_state(config, world)
    load_checkpoint(resumed, tmp_path / "step_3", rank=0)
    for state in (straight, resumed):
        step_all(config, state, world, steps=1)
    assert are_equal(content_of(resumed), content_of(straight))


def step_all(config: RunConfig, state: TrainerState, world: World, steps: int) -> list[dict[str, float]]:
    stepper = Stepper(config, state, world)
    return [
        stepper.step(batch_reply(samples(state.version), world, capacity=64, step=state.version)) for _ in range(steps)
    ]
