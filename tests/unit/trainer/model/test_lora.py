"""Adapters: what is trained, what it computes, what is saved, and that it starts and goes on the same."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.models import tiny
from support.models.families import HYBRIDS, build_config, save_family
from trireme.base.errors import ConfigError
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.tools.export.merging import export_merged, open_merged
from trireme.trainer.checkpoint.checkpoint import load_checkpoint
from trireme.trainer.checkpoint.hf_files import describe_adapters
from trireme.trainer.checkpoint.state import TrainerState, tensors_of
from trireme.trainer.model.lora import adapters_of, is_adapter
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.served_weights import served_specs, served_tensors
from trireme.trainer.step import base_state
from trireme.trainer.tokenizer import open_tokenizer

LORA = Lora(rank=4, alpha=8)
WHOLE = ("lm_head", "model.embed_tokens")
LENGTHS = [40, 30, 18, 33]
MAMBAS = ("granitemoehybrid", "nemotron_h", "falcon_h1", "mamba2")
WITH_EXPERTS = ("gpt_oss", "qwen3_next", "lfm2_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    untied = build_config("qwen3", vocab_size=tiny.VOCABULARY, tie_word_embeddings=False)
    experts = build_config("qwen3_moe", vocab_size=tiny.VOCABULARY)
    made = {
        name: save_family(tmp_path_factory.mktemp(name), config)
        for name, config in (("untied", untied), ("experts", experts))
    }
    return {"tied": tiny_model} | made


def run_config(folder: Path, lora: Lora = LORA, **loss: object) -> RunConfig:
    trainer = TrainerConfig(model=TrainerModel(lora=lora), optim=Optimizer(lr=1e-2), loss=Loss(**loss))  # type: ignore[arg-type]
    return RunConfig(model=Model(name=str(folder)), max_steps=10, trainer=trainer)


def opened(folder: Path, world: World, lora: Lora = LORA) -> TrainerState:
    return base_state(run_config(folder, lora), world)


def samples(step: int) -> list:
    return tiny.random_samples(LENGTHS, seed=step)


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0]


def test_only_lora_adapters_are_trained(tiny_model, world):
    """Values of A are drawn from PEFT's range, and fill it."""
    state = opened(tiny_model, world)
    assert torch.equal(logits(state.model), logits(load_model(TrainerModel(), str(tiny_model), world)))
    before = tiny.weights_of(state.model)
    for name, tensor in before.items():
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
        assert ".lora_B." not in name or not tensor.any()
    tiny.train_step(state, samples(0), world)
    after = tiny.weights_of(state.model)
    adapters = {name for name in before if is_adapter(name)}
    assert len(adapters) == 2 * 7 * 2  # A and B, seven layers in each of two blocks
    assert {name for name in before if not torch.equal(before[name], after[name])} <= adapters
    assert {name for name, p in state.model.named_parameters() if p in state.optimizer.state} == adapters
    torch.manual_seed(6)
    assert not tiny.are_equal(before, tiny.weights_of(load_model(TrainerModel(lora=LORA), str(tiny_model), world)))


@pytest.mark.parametrize("kind", [*WITH_EXPERTS, *MAMBAS])
def test_other_models_are_merged_too(kind, world, tmp_path, monkeypatch):
    """Experts, norms, biases; all layers of hybrids, whose fused kernel takes a weight past its adapter."""
    targets = {"target_modules": ("all-linear",)} if kind in HYBRIDS else {}
    save_family(tmp_path, build_config(kind, vocab_size=tiny.VOCABULARY))
    torch.manual_seed(4)
    model = load_model(TrainerModel(lora=Lora(rank=2, alpha=4, **targets), attn="eager"), str(tmp_path), world)
    code = sys.modules[type(model.config).__module__.replace("configuration", "modeling")]
    monkeypatch.setattr(code, "mamba2_split_conv1d_scan_combined", None, raising=False)
    has_experts = any(".experts." in name and is_adapter(name) for name in tiny.weights_of(model))
    assert has_experts == (kind in WITH_EXPERTS)
    state = TrainerState(model, build_optimizer(model, Optimizer(lr=1e-2)))
    for step in range(2):
        tiny.train_step(state, samples(step), world)
    assert all(each.any() for name, each in tiny.weights_of(model).items() if ".lora_B." in name)
    served = dict(served_tensors(model, torch.float32))
    announced = [(spec.name, spec.dtype, spec.shape) for spec in served_specs(model, torch.float32)]
    assert announced == [(name, "float32", list(tensor.shape)) for name, tensor in served.items()]
    save_file(served, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


def test_how_activations_are_kept_changes_no_gradient_nor_what_is_dropped(tiny_model, world):
    found = []
    full, selective = (ActivationCheckpointing(mode=mode) for mode in ("full", "selective"))
    for dropout, ac in ((0.0, None), (0.2, None), (0.2, full), (0.2, selective)):
        torch.manual_seed(0)
        lora = LORA.model_copy(update={"dropout": dropout})
        model = load_model(TrainerModel(lora=lora, ac=ac), str(tiny_model), world)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data.fill_(0.01)
        tiny.backward(model, samples(0), world, capacity=64)
        found.append(tiny.take_gradients(model))
    whole, dropped, *others = found
    assert tiny.largest_difference(whole, dropped) > 1e-3
    assert all(tiny.largest_difference(other, dropped) < 1e-5 for other in others)


def test_adapters_are_served_after_their_base_model_as_the_specs_announce(tiny_model, world):
    state = opened(tiny_model, world, LORA.model_copy(update={"sync": "adapter"}))
    tiny.train_step(state, samples(0), world)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    served = dict(served_tensors(state.model, torch.float32))
    only = dict(served_tensors(state.model, torch.float32, only_adapters=True))
    assert len(only) == 28
    assert list(served)[-28:] == list(only)
    assert all(torch.equal(tensor, base[name]) for name, tensor in list(served.items())[:-28])
    announced = [(spec.name, spec.dtype, spec.shape) for spec in served_specs(state.model, torch.float32)]
    assert announced == [(name, "float32", list(tensor.shape)) for name, tensor in served.items()]


@pytest.mark.parametrize(
    ("base", "lora", "held", "dtype"),
    [
        ("tied", Lora(rank=4, alpha=8, dropout=0.5), "float32", "bfloat16"),
        ("tied", Lora(rank=2, target_modules=("all-linear",)), "bfloat16", "float32"),
        ("tied", Lora(rank=2, target_modules=("v_proj", "layers.1.self_attn.q_proj")), "float32", "float32"),
        ("untied", Lora(rank=2, target_modules=("lm_head",)), "float32", "float32"),
        ("untied", Lora(rank=2, alpha=3, modules_to_save=WHOLE, use_rslora=True), "float32", "float32"),
        ("experts", Lora(rank=2, alpha=4), "float32", "float32"),
    ],
    ids=["dropout", "all linear", "of one layer", "head", "trained whole", "experts"],
)
def test_a_checkpoint_is_loaded_by_peft_and_merged_to_the_bits_of_engines(
    base, lora, held, dtype, folders, world, tmp_path
):
    path, checkpoint, weights = folders[base], tmp_path / "checkpoints/step_2", tmp_path / "weights/step_2"
    model = load_model(TrainerModel(lora=lora, optimization_dtype=held), str(path), world)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, getattr(torch, held))}
    state = TrainerState(model=model, optimizer=build_optimizer(model, Optimizer(lr=1e-2)))
    assert all(tiny.train_step(state, samples(step), world)["grad_norm"] > 0 for step in range(2))
    tiny.save_run(tmp_path, state, folders["tied"], world)
    served = dict(served_tensors(model, getattr(torch, dtype)))
    export_merged(checkpoint, tmp_path / "merged", dtype=dtype)
    assert tiny.are_equal(load_file(tmp_path / "merged/model.safetensors"), served)
    assert tiny.are_equal(dict(open_merged(weights, base=None, dtype=dtype).tensors()), served)
    assert not (tmp_path / "merged/trained_with.json").exists()
    assert [file.name for file in weights.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert json.loads((weights / "adapter_config.json").read_text())["base_model_name_or_path"] == str(path.resolve())
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name in WHOLE if lora.modules_to_save else ():
        assert not torch.equal(served[f"{name}.weight"], plain.get_submodule(name).weight)
    others = [PeftModel.from_pretrained(plain, str(weights))] if held == "float32" else []
    if held == dtype:
        others.append(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    for other in others:
        torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-5)
    for folder in (weights, tmp_path / "merged"):
        open_tokenizer(str(folder), False)


@pytest.mark.parametrize(
    ("base", "lora", "words"),
    [
        ("tied", Lora(target_modules=("q_proj", "qproj")), ["qproj", "down_proj, gate_proj, k_proj", "all-linear"]),
        ("tied", Lora(modules_to_save=("head",)), ["modules_to_save", "head", "embed_tokens"]),
        ("tied", Lora(modules_to_save=("lm_head",)), ["lm_head", "tie_word_embeddings"]),
        ("tied", Lora(target_modules=("lm_head",)), ["lm_head", "tie_word_embeddings"]),
        ("untied", Lora(target_modules=("lm_head",), dropout=0.1), ["lora.dropout = 0.1"]),
        ("experts", Lora(dropout=0.1), ["lora.dropout = 0.1"]),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused_with_what_it_has(base, lora, words, world, folders):
    with pytest.raises(ConfigError) as refusal:
        opened(folders[base], world, lora)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_the_reference_is_the_base_model_without_a_second_copy(tiny_model, world):
    config = run_config(tiny_model, beta=0.5)
    state = base_state(config, world)
    assert state.reference is not None
    assert state.reference.model is state.model
    base = logits(load_model(TrainerModel(), str(tiny_model), world))
    metrics = tiny.train(config, state, world, until=2, lengths=LENGTHS)
    assert metrics[0]["reference_kl"] == 0.0
    assert metrics[1]["reference_kl"] > 0.0
    trained_before = tiny.weights_of(state.model)
    with state.reference.ready() as model:
        assert torch.equal(logits(model), base)
    assert tiny.are_equal(tiny.weights_of(state.model), trained_before)


def test_lora_checkpoint_resumes_to_the_bit(tiny_model, world, tmp_path):
    lora = LORA.model_copy(update={"dropout": 0.2})
    config = run_config(tiny_model, lora, beta=0.5, reference_update_every=2)
    straight, resumed = base_state(config, world), base_state(config, world)
    tiny.train(config, straight, world, until=3, lengths=LENGTHS)
    assert {name for name in tensors_of(straight) if ".lora_" not in name} <= {"progress.skipped_in_a_row"}
    tiny.save(tmp_path, straight, world)
    load_checkpoint(resumed, tmp_path / "step_3", rank=0)
    assert tiny.are_equal(tiny.content_of(resumed), tiny.content_of(straight))
    for state in (straight, resumed):
        tiny.train(config, state, world, until=5, lengths=LENGTHS)
    assert tiny.are_equal(tiny.content_of(resumed), tiny.content_of(straight))


def test_a_checkpoint_of_other_adapters_or_of_none_is_refused(tiny_model, world, tmp_path):
    """With what differs, where the tensors alone would not show it."""
    given = {"4": {}, "8": {"rank": 8}, "few": {"target_modules": ("q_proj",)}, "scaled": {"alpha": 64.0}}
    made = {name: opened(tiny_model, world, LORA.model_copy(update=keys)) for name, keys in given.items()}
    made["whole"] = tiny.open_state(tiny_model, world)
    for name, state in made.items():
        tiny.save(tmp_path / name, state, world)
    folder, adapters = tmp_path / "4/step_0/model", adapters_of(made["4"].model)
    folder.mkdir()
    assert adapters is not None
    describe_adapters(folder, adapters)
    for now, then, words in (
        ("scaled", "4", r"trained with `lora.alpha` = .*64.0 now"),
        ("8", "4", r"`lora.rank` = 4, and it is 8"),
        ("4", "8", r"lora_B.* with shape \[64, 8\], .* with shape \[64, 4\].*and `lora`"),
        ("few", "4", r"holds model\..*lora_.* no place"),
        ("4", "few", r"has model\..*lora_.* not at all"),
        ("4", "whole", "whole model, and adapters are trained"),
        ("whole", "8", "adapters only, and the whole model is trained"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_checkpoint(made[now], tmp_path / then / "step_0", rank=0)
