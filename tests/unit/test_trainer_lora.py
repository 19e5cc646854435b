"""Adapters: what is trained, what it computes, what is saved, and that it starts and goes on the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    whole,
)
from trireme.base.errors import ConfigError
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.checkpoint import load_checkpoint
from trireme.trainer.lora import is_adapter
from trireme.trainer.merging import export_merged
from trireme.trainer.mesh import World, open_world
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer
from trireme.trainer.served import merged_tensors, served_specs, served_tensors
from trireme.trainer.state import TrainerState, tensors_of
from trireme.trainer.stepper import Stepper, base_state
from trireme.trainer.tokenizer import open_tokenizer
from trireme.trainer.weights_folder import AdaptedModel

LORA = Lora(rank=4, alpha=8)
LENGTHS = [40, 30, 18, 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = Qwen3Config(**TINY, tie_word_embeddings=False)
    return saved(Qwen3ForCausalLM(config), tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return saved(AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("experts"))


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


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world("cpu", threads=1, timeout_s=60) as world:
        yield world


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


# what is trained


def test_only_adapters_have_gradients_and_optimizer_state(folder: Path, world: World) -> None:
    state = opened(folder, world)
    before = weights_of(state.model)
    train_step(state, samples(0), world)
    after = weights_of(state.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapters = {name for name in before if is_adapter(name)}
    assert len(adapters) == 2 * 7 * 2  # A and B, seven layers in each of two blocks
    assert changed <= adapters
    assert {name for name, p in state.model.named_parameters() if p in state.optimizer.state} == adapters


def test_at_first_adapters_change_nothing(folder: Path, world: World) -> None:
    plain = load_model(TrainerModel(), str(folder), world)
    assert torch.equal(logits(opened(folder, world).model), logits(plain))


def test_the_seed_decides_how_adapters_begin(folder: Path, world: World) -> None:
    def begun(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return weights_of(load_model(TrainerModel(lora=LORA), str(folder), world))

    assert are_equal(begun(5), begun(5))
    assert not are_equal(begun(5), begun(6))


def test_an_adapter_begins_as_pefts_own(folder: Path, world: World) -> None:
    """Values are drawn from the same range, and fill it."""
    state = opened(folder, world)
    for name, parameter in state.model.named_parameters():
        if ".lora_A." in name:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < float(whole(parameter).abs().max()) <= bound
        if ".lora_B." in name:
            assert not whole(parameter).any()


# what it computes


@pytest.mark.parametrize(
    "lora",
    [LORA, Lora(rank=2, alpha=3, use_rslora=True), Lora(rank=2, target_modules=("all-linear",))],
    ids=["plain", "rank-stabilised", "all linear layers"],
)
def test_merged_weights_compute_what_the_adapters_do(folder: Path, world: World, lora: Lora) -> None:
    state = trained(folder, world, lora)
    merged = loaded_by_transformers(folder, dict(served_tensors(state.model, torch.float32)))
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


def test_a_module_that_is_trained_whole_is_merged_as_it_is(untied: Path, world: World) -> None:
    lora = Lora(rank=2, target_modules=("q_proj",), modules_to_save=("lm_head", "embed_tokens"))
    state = trained(untied, world, lora)
    base = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    tensors = dict(served_tensors(state.model, torch.float32))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert not torch.equal(tensors[name], base.state_dict()[name])
    merged = loaded_by_transformers(untied, tensors)
    torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-5, atol=1e-5)


def test_adapters_on_fused_experts_are_merged(experts: Path, world: World) -> None:
    state = trained(experts, world, Lora(rank=2, alpha=4))
    assert {name.split(".")[-3] for name in weights_of(state.model) if ".experts." in name and is_adapter(name)}
    tensors = dict(served_tensors(state.model, torch.float32))
    assert tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (16, 32)
    saved_as = experts.parent / "merged_experts"
    AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32).save_pretrained(saved_as)
    save_file(tensors, saved_as / "model.safetensors", metadata={"format": "pt"})
    merged = AutoModelForCausalLM.from_pretrained(saved_as, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [GptOssConfig, Gemma2Config, Qwen2Config], ids=lambda config: config.model_type)
def test_other_models_are_merged_too(config: type[PretrainedConfig], world: World, tmp_path: Path) -> None:
    """Experts that are stored the other way round, norms around each part, biases."""
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    torch.manual_seed(3)
    sizes = TINY | {"tie_word_embeddings": False} | (more if config is GptOssConfig else {})
    saved(AutoModelForCausalLM.from_config(config(**sizes)), tmp_path)
    torch.manual_seed(4)
    model = load_model(TrainerModel(lora=Lora(rank=2, alpha=4), attn="eager"), str(tmp_path), world)
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


# dropout


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


def test_nothing_is_dropped_outside_of_training(folder: Path, world: World) -> None:
    state = trained(folder, world, LORA.model_copy(update={"dropout": 0.5}))
    assert torch.equal(logits(state.model), logits(state.model))
    merged = loaded_by_transformers(folder, dict(served_tensors(state.model, torch.float32)))
    torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-5, atol=1e-5)


# checkpoints and files


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


def test_peft_loads_what_a_checkpoint_leaves(folder: Path, untied: Path, world: World, tmp_path: Path) -> None:
    """Of two models: one with a head that is trained whole. Merged, it is a model like any other."""
    whole_head = Lora(rank=2, target_modules=("q_proj", "o_proj"), modules_to_save=("lm_head",), use_rslora=True)
    for number, (base, lora) in enumerate(((folder, LORA), (untied, whole_head))):
        state = trained(base, world, lora)
        weights = tmp_path / f"weights_{number}"
        exporter = open_exporter(weights, folder, world)
        store = open_store(tmp_path / f"checkpoints_{number}", world, exporter=exporter)
        store.save(state)
        store.wait()
        step = weights / "step_2"
        files = {path.name for path in step.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
        assert "model.safetensors" not in files
        assert json.loads((step / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base.resolve())
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(step))
        torch.testing.assert_close(logits(theirs), logits(state.model), rtol=1e-5, atol=1e-5)
        export_merged(tmp_path / f"checkpoints_{number}/step_2", tmp_path / f"merged_{number}", dtype="float32")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged_{number}", dtype=torch.float32)
        torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-5, atol=1e-5)
        open_tokenizer(str(tmp_path / f"merged_{number}"), False)


def saved_weights(state: TrainerState, folder: Path, model: Path, world: World) -> tuple[Path, Path]:
    """Its checkpoint, and the weights that come with it."""
    store = open_store(folder / "checkpoints", world, exporter=open_exporter(folder / "weights", model, world))
    store.save(state)
    store.wait()
    return folder / "checkpoints/step_2", folder / "weights/step_2"


@pytest.mark.parametrize("target", ["layers.1.self_attn.q_proj", "1.mlp.down_proj", "q_proj"])
def test_adapters_of_some_layers_are_loaded_merged_and_evaluated_as_they_were_trained(
    target: str, folder: Path, world: World, tmp_path: Path
) -> None:
    """Where a layer of the same name has none."""
    state = trained(folder, world, Lora(rank=2, target_modules=("v_proj", target)))
    checkpoint, weights = saved_weights(state, tmp_path, folder, world)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), str(weights))
    torch.testing.assert_close(logits(theirs), logits(state.model), rtol=1e-5, atol=1e-5)
    export_merged(checkpoint, tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-5, atol=1e-5)
    evaluated = dict(AdaptedModel(weights, base=None, dtype="float32").tensors())
    assert are_equal(evaluated, dict(served_tensors(state.model, torch.float32)))


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_merged_has_the_bits_that_engines_had_whatever_the_base_was_held_in(
    held: Any, dtype: str, folder: Path, world: World, tmp_path: Path
) -> None:
    model = load_model(TrainerModel(lora=LORA, optimization_dtype=held), str(folder), world)
    state = TrainerState(model=model, optimizer=build_optimizer(model, Optimizer(lr=1e-2)))
    for step in range(2):
        train_step(state, samples(step), world)
    checkpoint, weights = saved_weights(state, tmp_path, folder, world)
    served = dict(served_tensors(state.model, getattr(torch, dtype)))
    export_merged(checkpoint, tmp_path / "merged", dtype=dtype)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert are_equal(merged, served)
    assert are_equal(dict(AdaptedModel(weights, base=None, dtype=dtype).tensors()), served)
    assert not (tmp_path / "merged/trained_with.json").exists()


def test_peft_loads_adapters_of_experts(experts: Path, folder: Path, world: World, tmp_path: Path) -> None:
    state = trained(experts, world, Lora(rank=2, alpha=4))
    store = open_store(tmp_path / "checkpoints", world, exporter=open_exporter(tmp_path / "weights", folder, world))
    store.save(state)
    store.wait()
    base = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "weights/step_2"))
    torch.testing.assert_close(logits(theirs), logits(state.model), rtol=1e-4, atol=1e-5)


# the reference model


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


# refusals


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (Lora(target_modules=("q_proj", "qproj")), ["qproj", "down_proj, gate_proj, k_proj", "all-linear"]),
        (Lora(modules_to_save=("head",)), ["modules_to_save", "head", "embed_tokens"]),
        (Lora(modules_to_save=("lm_head",)), ["lm_head", "tie_word_embeddings"]),
        (Lora(target_modules=("lm_head",)), ["lm_head", "tie_word_embeddings"]),
    ],
)
def test_what_the_model_does_not_have_is_refused_with_what_it_has(
    folder: Path, world: World, lora: Lora, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        opened(folder, world, lora)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_dropout_is_refused_where_it_cannot_be_repeated(untied: Path, experts: Path, world: World) -> None:
    for base, lora in ((untied, Lora(target_modules=("lm_head",), dropout=0.1)), (experts, Lora(dropout=0.1))):
        with pytest.raises(ConfigError, match=r"lora\.dropout = 0\.1"):
            opened(base, world, lora)


def test_a_head_may_have_an_adapter_where_it_is_not_tied(untied: Path, world: World) -> None:
    state = trained(untied, world, Lora(rank=2, target_modules=("lm_head",)))
    merged = loaded_by_transformers(untied, dict(served_tensors(state.model, torch.float32)))
    torch.testing.assert_close(logits(merged), logits(state.model), rtol=1e-5, atol=1e-5)


def test_frozen_weights_may_be_held_in_the_precision_of_the_passes(folder: Path, world: World) -> None:
    model = load_model(TrainerModel(lora=LORA, optimization_dtype="bfloat16"), str(folder), world)
    held = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert held == {(True, torch.float32), (False, torch.bfloat16)}
    state = TrainerState(model, build_optimizer(model, Optimizer(lr=1e-2)))
    metrics = train_step(state, samples(0), world)
    assert metrics["grad_norm"] > 0
