"""Every architecture is the model that transformers would have loaded, and stays itself in packed rows."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from support.models import families
from support.models.families import (
    ATTENTION,
    CONFIGS,
    HYBRIDS,
    SIBLINGS,
    build_config,
    build_vision_config,
    logits,
    row,
    save_family,
)
from support.models.tiny import are_equal, one_row, random_samples, take_gradients, whole
from trireme.base.errors import ConfigError
from trireme.config.trainer import ActivationCheckpointing, TrainerModel
from trireme.orchestrator.weights.update import TIMES_NOISE
from trireme.trainer.model.forward import Scorer, compute_columns, scorer_of
from trireme.trainer.model.hub_names import hub_names, sources_of
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import mixtures_of
from trireme.trainer.model.sharding import decoder_layers
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.probe import compute_noise, compute_probe

KEPT_APART = [kind for kind in CONFIGS if kind not in (*HYBRIDS, "gpt_oss")]  # by transformers itself, in one row
WINDOWS = ("mistral", "gemma2", "vaultgemma", "gemma3_text", "olmo3", "gpt_oss")

WITH_MASKS = ("mamba2", "hy_v4", "modernbert-decoder", "gptj")  # without attention, sparse, with windows, eager
FLASH = {
    **{kind: [-1, -1] for kind in ("qwen3", "qwen2", "deepseek_v3")}, "qwen3_5_text": [-1], "mistral": [4, 4],
    "gemma3_text": [4, -1], "olmo3": [4, -1],
}  # fmt: skip
"""Tokens before a token in the window of each layer that attends."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {kind: save_family(root / kind, build_config(kind)) for kind in CONFIGS | SIBLINGS}


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_the_model_that_transformers_loads(checkpoints, kind, world):
    """With eager attention where it has no other."""
    options = {"dtype": torch.float32, "attn_implementation": ATTENTION.get(kind, "sdpa")}
    expected = AutoModelForCausalLM.from_pretrained(checkpoints[kind], **options).train()
    found = load_model(TrainerModel(), str(checkpoints[kind]), world)
    held = found.state_dict()
    assert list(held) == list(expected.state_dict())
    assert all(torch.equal(whole(held[name]), tensor) for name, tensor in expected.state_dict().items())
    buffers = dict(found.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.named_buffers())
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    scorer_of(found, world.device)  # lets samples attend one by one where a row is given, and nowhere else
    with torch.no_grad():
        for lengths in ([12], *([[9, 14]] if kind in KEPT_APART else [])):
            assert torch.equal(logits(found, *row(*lengths)), logits(expected, *row(*lengths)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_published_weight_names_map_to_the_model_and_back(checkpoints, kind, world):
    torch.manual_seed(5)
    drawn = load_model(TrainerModel(from_scratch=True), str(checkpoints[kind]), world).state_dict()
    after = torch.rand(1)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoints[kind]), dtype=torch.float32)
    if kind in HYBRIDS:  # their constructors draw values too, which are replaced
        assert all(bool(whole(tensor).isfinite().all()) for tensor in drawn.values())
    else:
        assert all(torch.equal(whole(drawn[name]), tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(after, torch.rand(1))
    published = load_file(checkpoints[kind] / "model.safetensors")
    sources = sources_of(model, {name: tuple(tensor.shape) for name, tensor in published.items()})
    assert sources.unexpected == []
    names, back = hub_names(model), {}
    for name in names.layouts:
        tensor = sources.layouts[name].tensor(lambda source, region: published[source][region])
        parts = names.to_hub(name, tensor)
        assert [(key, part.shape) for key, part in parts] == names.specs(name)
        if kind == "qwen3_moe":  # experts are published one by one, and are views of what the model holds
            assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for _, part in parts)
        back |= dict(parts)
    assert are_equal(back, published)


@pytest.mark.parametrize("kind", [*CONFIGS, *SIBLINGS])
def test_samples_of_a_packed_row_are_as_each_alone(checkpoints, kind, world):
    """In logprobs and gradients, where layers are recomputed and prefixes shared."""
    scorer = compare_with_each_alone(TrainerModel(ac=ActivationCheckpointing()), checkpoints[kind], world)
    is_packed = kind not in (*WINDOWS, *WITH_MASKS)
    assert (scorer.is_packed, scorer.shares_prefixes) == (is_packed, is_packed and not mixtures_of(scorer.model))
    assert (scorer.head is None) == (kind in ("falcon_h1", "mamba2"))  # they need more of their decoder


@pytest.mark.parametrize("kind", FLASH)
def test_samples_under_flash_attention_are_as_each_alone(checkpoints, kind, world):
    """Through torch's `varlen_attn`, with windows, where attention is not recomputed."""
    config = TrainerModel(attn="flash_attention_2", ac=ActivationCheckpointing(mode="selective"))
    with families.flash_on_cpu() as windows:
        assert compare_with_each_alone(config, checkpoints[kind], world).is_packed
    assert windows == 2 * FLASH[kind]  # once to try it


def compare_with_each_alone(config: TrainerModel, folder: Path, world: World) -> Scorer:
    model = load_model(config, str(folder), world)
    samples = random_samples([70, 60, 9, 1, 14, 13])
    for sample in samples:
        sample.tokens.ids[:] %= families.VOCABULARY
    samples[5].tokens.ids[:8] = samples[4].tokens.ids[:8]
    packed = one_row(samples)
    found = compute_columns(model, packed, world.device)
    weights = torch.linspace(-1, 2, len(found.logprobs))
    (found.logprobs * weights).sum().backward()
    written_out = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if mixtures_of(model) else {})
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **written_out)
    expected, begin = [], 0
    for length, temperature in zip(packed.lengths, packed.temperatures, strict=True):
        ids = torch.from_numpy(packed.tokens.ids[begin : begin + length].astype(int))[None]
        counted = torch.from_numpy(packed.tokens.loss_mask[begin : begin + length].astype(bool))[1:]
        scores = (plain(ids, use_cache=False).logits[0, :-1].float() / temperature).log_softmax(-1)
        expected.append(scores.gather(-1, ids[0, 1:, None])[counted, 0])
        begin += length
    (torch.cat(expected) * weights).sum().backward()
    torch.testing.assert_close(found.logprobs, torch.cat(expected), rtol=1e-4, atol=1e-4)
    theirs = take_gradients(plain)
    for name, gradient in take_gradients(model).items():
        assert (gradient - theirs[name]).abs().max() <= 1e-4 * max(1.0, float(theirs[name].abs().max())), name
    return scorer_of(model, world.device)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "lfm2_moe", "mamba2"])
def test_a_probe_admits_the_same_weights_in_bfloat16_and_no_others(checkpoints, kind, world):
    """Others: another cap of attention scores, or a convolution that stayed as it was, both off by a little."""
    half = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.bfloat16, attn_implementation="eager")
    model = load_model(TrainerModel(attn="eager"), str(checkpoints[kind]), world)
    assert len(compute_probe(model, world.device, context=16).ids) == 15
    probe = compute_probe(model, world.device)
    noise = compute_noise(model, world.device, probe, (torch.bfloat16,))
    ids = torch.tensor([probe.ids])

    def difference() -> float:
        with torch.no_grad():
            logprobs = half(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return float((logprobs.gather(-1, ids[0, 1:, None])[:, 0] - torch.tensor(probe.logprobs)).abs().mean())

    assert difference() <= TIMES_NOISE * noise
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in half.named_parameters():
            if "conv" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for layer in half.model.layers if kind == "gemma2" else []:
        layer.self_attn.attn_logit_softcapping = 0.5
    assert (difference() > TIMES_NOISE * noise) == (kind != "qwen3")


def test_page_of_models_agrees_with_what_was_measured_on_each_family():
    """`benchmarks/models/families.py` measures, and docs/models.md has a row for families that are alike."""
    from benchmarks.models import families as measuring  # it sets the number of threads

    stored, page = measuring.read_stored(), (measuring.ROOT / "docs/models.md").read_text()
    measured = stored["families"]
    assert measured.keys() == {*CONFIGS, *families.SERVED}
    assert [kind for kind, result in measured.items() if result["versions"] != measuring.installed()] == []

    rows = re.findall(r"^\| (`.*`) \| (yes|no) \| (yes|refused .*) \|$", page, re.MULTILINE)
    told = {kind: (shared, lora) for kinds, shared, lora in rows for kind in re.findall("`([^`]*)`", kinds)}
    assert {kind: (shared == "yes", lora == "yes") for kind, (shared, lora) in told.items()} == {
        kind: (result["shares_prefixes"], not isinstance(result["lora_adapter"], str))
        for kind, result in measured.items()
    }

    assert stored["refused"] == measuring.refused_families()
    assert {"mamba", "jamba", "nemotron_h with experts"} <= stored["refused"].keys()
    assert [kind for kind in stored["refused"] if f"`{kind.split()[0]}`" not in page] == []


def test_a_decoder_within_a_model_that_sees_is_found_and_trained(tmp_path, world):
    folder = str(save_family(tmp_path, build_vision_config()))
    model = load_model(TrainerModel(), folder, world)
    assert decoder_layers(model) == list(model.model.language_model.layers)
    families.backward(model, *row(9, 14))
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {"language_model"}


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | {name: tensor}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def quantize(folder: Path, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))


UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"
REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    ("llama", lambda it: change(it, "model.norm.weight", None), "1 missing: model.norm.weight"),
    ("llama", lambda it: change(it, "model.x", torch.zeros(1)), "1 without a place in the model: model.x"),
    ("llama", lambda it: change(it, UP, torch.full((48, 32), torch.nan)), f"{UP} .* not finite"),
    ("llama", lambda it: change(it, UP, torch.zeros(3, 32)), f"1 of another shape: {UP}"),
    ("qwen3_moe", lambda it: change(it, DOWN, None), r"down_proj \(\[3, 32, 16\] for \[4, 32, 16\]"),
    (
        "qwen3",
        lambda it: change(it, "lm_head.weight", torch.zeros(96, 32)),
        r"lm_head.weight and model.*, which differ",
    ),
    ("llama", lambda it: (it / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0 garbage"), "cannot be read"),
    ("llama", lambda it: quantize(it, "fp8"), r"quantized \(fp8, weight_block_size = None\)"),
    ("llama", shutil.rmtree, r"cannot be loaded(.|\n)*Set `model.name`"),
]


@pytest.mark.parametrize(("kind", "spoil", "words"), REFUSED)
def test_damaged_missing_and_other_weights_are_refused_by_name(checkpoints, kind, spoil, words, tmp_path, world):
    folder = shutil.copytree(checkpoints[kind], tmp_path / "model")
    spoil(folder)
    for from_scratch in {False, spoil is shutil.rmtree}:
        with pytest.raises(ConfigError, match=words):
            load_model(TrainerModel(from_scratch=from_scratch), str(folder), world)


@pytest.mark.parametrize("kind", families.NOT_FOR_PACKED_ROWS)
def test_models_that_cannot_keep_samples_of_a_row_apart_are_refused(kind, tmp_path, world):
    build_config(kind).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be trained on packed rows"):
        load_model(TrainerModel(from_scratch=True, attn="eager"), str(tmp_path), world)


def test_a_head_that_is_tied_may_be_in_the_files_if_it_agrees(checkpoints, tmp_path, world):
    folder = shutil.copytree(checkpoints["qwen3"], tmp_path / "model")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, "lm_head.weight", embedding.clone())
    model = load_model(TrainerModel(), str(folder), world)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_files_in_parts_and_in_half_precision_are_read(tmp_path, world):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(build_config("qwen3_moe"), dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    held = load_model(TrainerModel(), str(tmp_path), world).state_dict()
    assert all(torch.equal(whole(held[name]), tensor.float()) for name, tensor in plain.state_dict().items())


def test_a_pass_without_gradients_leaves_each_rank_its_float32_parts(tiny_model, world):
    """What is gathered, in bfloat16, would otherwise be saved or sent as the model."""
    config = TrainerModel(reshard_after_forward=False, optimization_dtype="bfloat16")
    model = load_model(config, str(tiny_model), world)
    with torch.no_grad():
        compute_columns(model, one_row(random_samples([9, 14])), world.device)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
