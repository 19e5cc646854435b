"""`trireme export`: any checkpoint becomes the model that its run had exported, from disk alone."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.models.tiny import are_equal, open_state, random_samples, save_run, train_step, weights_of
from support.processes.limits import small_disk
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.config.trainer import Lora, Optimizer, TrainerModel
from trireme.tools.export.export import command as export
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.publish.served_weights import served_tensors


@pytest.fixture(scope="module")
def run(tiny_model, world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    state = open_state(tiny_model, world)
    for step in range(2):
        train_step(state, random_samples([20, 30], seed=step), world)
        save_run(folder, state, tiny_model, world)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_exported_is_what_the_run_had_exported_to_the_bit(run, tmp_path):
    assert export([str(run), "--to", str(tmp_path / "newest")]) == 0
    assert export([str(run), "--step", "1", "--to", str(tmp_path / "first")]) == 0
    assert content(tmp_path / "newest") == content(run / "weights" / "step_2")
    assert content(tmp_path / "first") == content(run / "weights" / "step_1") != content(tmp_path / "newest")
    alone = Path(shutil.copytree(run / "checkpoints" / "step_1", tmp_path / "mine"))
    with pytest.raises(ConfigError, match=r"lies in no run's folder .*Set `--to`"):
        export([str(alone)])
    (alone / "model" / "notes.txt").symlink_to(__file__)  # not in the manifest: not a file of the checkpoint
    assert export([str(alone), "--to", str(tmp_path / "model")]) == 0
    assert content(tmp_path / "model") == content(tmp_path / "first")
    deleted = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(deleted / "weights")
    assert export([str(deleted)]) == 0
    assert content(deleted / "weights" / "step_2") == content(tmp_path / "newest")


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(run, tmp_path, monkeypatch):
    here, full, cut, new = (tmp_path / name for name in ("here", "full", "cut", "new"))
    for folder in (here, full, cut / "checkpoints" / "step_7"):
        folder.mkdir(parents=True)
    (full / "thesis.txt").touch()
    monkeypatch.chdir(here)
    for source, to, flags, said in (
        (run, full, [], r"is not empty.*Set `--to`"),
        (run, ".", [], "is the folder that this command runs in"),
        (run, new, ["--step", "7"], r"step 7 in .*it has \[1, 2\]"),
        (cut, new, [], "holds no complete checkpoint -"),
        (run, new, ["--merge"], r"no adapters - expected some, to merge them\. Leave `--merge` out"),
    ):
        with pytest.raises(ConfigError, match=said):
            export([str(source), "--to", str(to), *flags])
    assert not new.exists()


def test_transformers_loads_it_in_the_numbers_that_were_asked_for(run, tmp_path):
    assert export([str(run), "--to", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    whole = AutoModelForCausalLM.from_pretrained(run / "weights" / "step_2")
    expected = {name: tensor.bfloat16() for name, tensor in weights_of(whole).items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(model).items())
    assert AutoTokenizer.from_pretrained(tmp_path / "half").chat_template


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "checkpoints" / "step_2" / "model" / "config.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(JournalCorrupt, match=r"step_2 is damaged: .*model/config\.json"):
        export([str(copy), "--to", str(tmp_path / "out" / "model")])
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_is_said_and_left_as_it_was(run, tmp_path):
    with small_disk(tmp_path / "disk", "256k") as disk:
        with pytest.raises(OSError, match="No space left on device"):
            export([str(run), "--to", str(disk / "model")])
        assert list(disk.iterdir()) == []


@pytest.fixture
def adapted(tiny_model, world, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    model = load_model(TrainerModel(lora=Lora(rank=2, alpha=8)), str(base), world)
    state = TrainerState(model, build_optimizer(model, Optimizer(lr=1e-2)))
    train_step(state, random_samples([20, 30]), world)
    save_run(tmp_path / "run", state, base, world)
    return tmp_path / "run", dict(served_tensors(model, torch.bfloat16))


def test_exported_adapters_merge_into_the_weights_engines_served(adapted, tmp_path):
    run, served = adapted
    (run / "checkpoints" / "step_1" / "model" / "notes.txt").symlink_to(__file__)
    assert export([str(run), "--merge", "--to", str(tmp_path / "merged")]) == 0
    assert are_equal(load_file(tmp_path / "merged" / "model.safetensors"), served)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16
    assert not {"adapter_config.json", "notes.txt"} & set(os.listdir(tmp_path / "merged"))
    assert export([str(run), "--to", str(tmp_path / "adapters")]) == 0
    assert content(tmp_path / "adapters") == content(run / "weights" / "step_1")
    base = (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=str(tmp_path / "base")):
        export([str(run), "--merge", "--to", str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()
    assert export([str(run), "--merge", "--base", str(base), "--to", str(tmp_path / "again")]) == 0
