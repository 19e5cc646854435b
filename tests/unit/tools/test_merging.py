"""Weights of a folder, and adapters that are merged into them."""

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.models.tiny import save_tiny_model
from trireme.base.errors import ConfigError
from trireme.tools.export import merging, weights_folder
from trireme.transport.weights.buckets import spec_of


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base):
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(base.parent / "adapters")
    return base.parent / "adapters"


def test_adapters_that_are_damaged_or_for_another_model_are_named(base, adapters, tmp_path):
    source = merging.open_merged(adapters, base=str(base), dtype="bfloat16")
    assert source.specs == [spec_of(name, torch.bfloat16, tensor.shape) for name, tensor in source.tensors()]
    other = save_tiny_model(tmp_path / "other", hidden=128)
    with pytest.raises(ConfigError, match=r"does not fit .*other: .*has shape"):
        merging.open_merged(adapters, base=str(other), dtype="float32")
    for file, content, words in (
        ("adapter_config.json", b"{", r"adapter_config\.json is damaged"),
        ("adapter_config.json", b'{"r": 4}', "does not say lora_alpha"),
        ("adapter_model.safetensors", b"x", r"model\.safetensors is damaged"),
        ("adapter_model.safetensors", None, r"adapter_model\.safetensors is missing"),
    ):
        whole = (adapters / file).read_bytes()
        (adapters / file).unlink()
        if content is not None:
            (adapters / file).write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            weights_folder.require_readable(adapters)
        (adapters / file).write_bytes(whole)


def test_model_in_several_files_has_the_tensors_of_a_single_file(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "parted")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*weight_map.values()}:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    parted = weights_folder.open_model(folder)
    assert weights_folder.shape_difference(weights_folder.open_model(base).shapes, parted.shapes) is None
    assert all(tensor.equal(tensors[name]) for name, tensor in parted.tensors())
    assert parted.folder == folder.resolve()
    save_file({"consolidated": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert weights_folder.open_model(folder).folder is None
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is missing"):
        weights_folder.require_readable(folder)


def test_a_head_that_is_the_embedding_may_stand_in_one_of_two_files():
    body, head = {"model.norm.weight": (4,)}, {"lm_head.weight": (8, 4)}
    assert weights_folder.shape_difference(body | head, body) is None
    assert weights_folder.shape_difference(body, body | head) is None
    assert weights_folder.shape_difference(body | head, body | {"lm_head.weight": (9, 4)}) is not None
    assert weights_folder.shape_difference(body, body | {"extra": (1,)}) == "extra is no tensor of it"
