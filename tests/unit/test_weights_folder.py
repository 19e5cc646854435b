"""Models and adapters in files, on their way into an engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tiny import save_tiny_model
from trireme.base.errors import ConfigError
from trireme.trainer.weights_folder import ModelFiles, Transfers, open_source, require_readable, shape_difference


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By PEFT itself, with values that change something."""
    folder = tmp_path_factory.mktemp("adapters")
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


def test_adapters_are_added_as_peft_adds_them(base: Path, adapters: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, adapters).merge_and_unload().state_dict()
    source = open_source(adapters, base=None, dtype="float32")
    found = dict(source.tensors())
    assert [spec.name for spec in source.specs] == list(found)
    assert found.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
    changed = {name for name, tensor in load_file(base / "model.safetensors").items() if not tensor.equal(found[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    source = open_source(adapters, base=None, dtype="bfloat16")
    assert {spec.dtype for spec in source.specs} == {"bfloat16"}
    assert {tensor.dtype for _, tensor in source.tensors()} == {torch.bfloat16}
    other = save_tiny_model(tmp_path / "other", hidden=128)
    with pytest.raises(ConfigError, match=r"does not fit .*other: .*has shape"):
        open_source(adapters, base=str(other), dtype="float32")


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda folder: (folder / "adapter_config.json").write_text("{"), r"adapter_config\.json is damaged"),
     (lambda folder: (folder / "adapter_config.json").write_text('{"r": 4}'), "does not say lora_alpha"),
     (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), r"model\.safetensors is damaged"),
     (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors is missing")],
)  # fmt: skip
def test_damaged_adapters_are_named(adapters: Path, tmp_path: Path, damage: object, words: str) -> None:
    folder = tmp_path / "step_1"
    shutil.copytree(adapters, folder)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=words):
        require_readable(folder)


def test_a_model_in_several_files_is_the_same_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parted"
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*weight_map.values()}:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    parted = ModelFiles(folder)
    assert shape_difference(ModelFiles(base).shapes, parted.shapes) is None
    assert all(tensor.equal(tensors[name]) for name, tensor in parted.tensors())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors is missing"):
        require_readable(folder)


def test_a_receiver_reads_a_folder_itself_only_where_it_would_read_the_models_files_alone(
    base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    assert ModelFiles(folder).folder == folder.resolve()
    save_file({"consolidated": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert ModelFiles(folder).folder is None
    transfers = Transfers("filesystem", "127.0.0.1", 0, tmp_path / "passing", 1 << 20, 5)
    digests: dict[str, str] = {}
    payload = transfers.send(ModelFiles(folder), "e", 2, lambda: True, digests)
    sent = [name for file in Path(payload["folder"]).glob("*") for name in load_file(file)]
    assert sorted(sent) == sorted(digests) == sorted(load_file(base / "model.safetensors"))
    transfers.close()
    assert not (tmp_path / "passing").exists()


def test_a_head_that_is_the_embedding_may_stand_in_one_of_two_files() -> None:
    body, head = {"model.norm.weight": (4,)}, {"lm_head.weight": (8, 4)}
    assert shape_difference(body | head, body) is None
    assert shape_difference(body, body | head) is None
    assert shape_difference(body | head, body | {"lm_head.weight": (9, 4)}) is not None
    assert shape_difference(body, body | {"extra": (1,)}) == "extra is no tensor of it"
