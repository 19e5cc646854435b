"""Checkpoints are complete or ignored, a trainer resumes from the right one, and exports are what was trained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from support.models import tiny
from trireme.base.errors import ConfigError
from trireme.config.trainer import Checkpoints, Optimizer
from trireme.journal.manifest import MANIFEST, complete_steps, read_manifest
from trireme.trainer.checkpoint.checkpoint import load_checkpoint
from trireme.trainer.checkpoint.hf_files import layout_of
from trireme.trainer.checkpoint.resume import version_to_resume
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.served_weights import served_tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


def save_steps(folder: Path, steps: list[int], model: Path, world: World, **config: int) -> TrainerState:
    state = tiny.open_state(model, world)
    for step in steps:
        state.version = step
        tiny.save(folder, state, world, Checkpoints(**config))
    return state


@pytest.fixture(scope="module")
def saved_1_and_2(tmp_path_factory, model, world):
    folder = tmp_path_factory.mktemp("checkpoints")
    state = tiny.open_state(model, world)
    for version in (1, 2):
        tiny.save(folder, tiny.train_until(state, world, until=version), world)
    return folder


@pytest.fixture
def copy(saved_1_and_2, tmp_path):
    return Path(shutil.copytree(saved_1_and_2, tmp_path / "checkpoints"))


def chosen(folder: Path) -> int:
    return version_to_resume(folder, Checkpoints(), resume=True)


def test_checkpoint_saved_again_replaces_the_earlier_one(copy, model, world):
    torch.manual_seed(5)
    state = save_steps(copy, [2], model, world)
    expected = torch.rand(4)
    again = tiny.train_until(tiny.open_state(model, world), world, until=1)
    torch.manual_seed(6)
    load_checkpoint(again, copy / "step_2", rank=0)
    assert torch.equal(torch.rand(4), expected)
    assert tiny.are_equal(tiny.content_of(again), tiny.content_of(state))
    assert sorted(path.name for path in copy.iterdir()) == ["step_1", "step_2"]


def test_no_changed_bit_of_a_manifest_makes_another_state_of_a_checkpoint(copy):
    path = copy / "step_2" / MANIFEST
    whole, content = path.read_bytes(), read_manifest(copy / "step_2")
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        if chosen(copy) == 2:
            found = read_manifest(copy / "step_2")
            assert (found.version, found.files) == (content.version, content.files)
    for malformed in ("", "{", "[]", "{}", "null", '{"files": 3}'):
        path.write_text(malformed)
        assert chosen(copy) == 1


def test_resuming_sets_a_damaged_checkpoint_aside(copy, model, world):
    shutil.copytree(copy / "step_1", copy / ".step_0.removed")
    state = tiny.open_state(model, world)
    tiny.open_store(copy, world).resume(state, resume=True)
    assert state.version == 2
    assert sorted(path.name for path in copy.iterdir()) == ["step_1", "step_2"]
    path = copy / "step_2" / "rank_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert complete_steps(copy) == [1, 2]  # by names and sizes
    tiny.open_store(copy, world).resume(state, resume=True)
    assert state.version == 1
    assert complete_steps(copy) == [1]
    (aside,) = copy.glob("set_aside_*")  # nothing was deleted
    assert [path.name for path in aside.iterdir()] == ["step_2"]


def test_files_that_the_manifest_does_not_list_are_not_read(copy, model, world):
    folder, manifest, state = copy / "step_2", read_manifest(copy / "step_2"), tiny.open_state(model, world)
    assert (manifest.version, manifest.world_size) == (2, 1)
    files = {path.name for path in folder.iterdir()} - {MANIFEST}
    assert files == set(manifest.files) == {"rank_0.safetensors", "random_0.safetensors"}
    load_checkpoint(state, folder, rank=0)
    clean = tiny.content_of(state)
    shutil.copy(copy / "step_1" / "rank_0.safetensors", folder / "rank_1.safetensors")
    load_checkpoint(state, folder, rank=0)
    assert tiny.are_equal(tiny.content_of(state), clean)


def test_missing_or_damaged_resume_step_is_refused(copy, model, world, tmp_path):
    for folder, words in ((copy, r"step 7 .*\(complete: \[1, 2\]\)"), (tmp_path / "none", "complete: none")):
        with pytest.raises(ConfigError, match=words):
            version_to_resume(folder, Checkpoints(resume_step=7), resume=False)
    path = copy / "step_1" / "random_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store = tiny.open_store(copy, world, Checkpoints(resume_step=1))
    with pytest.raises(ConfigError, match=r"step 1 cannot be used: .*random_0\.safetensors"):
        store.resume(tiny.open_state(model, world), resume=False)
    assert complete_steps(copy) == [1, 2]  # it is kept


@pytest.mark.parametrize(
    ("config", "resume", "expected"),
    [
        (Checkpoints(), True, 2),
        (Checkpoints(resume_step=-1), False, 2),
        (Checkpoints(resume_step=1), False, 1),
        (Checkpoints(), False, 0),
        (Checkpoints(resume_step=0), True, 0),
    ],
)
def test_a_run_resumes_the_newest_complete_step_or_the_named_one(copy, tmp_path, config, resume, expected):
    shutil.copytree(copy / "step_2", copy / "step_10")
    (copy / "step_10" / MANIFEST).unlink()
    assert version_to_resume(copy, config, resume=resume) == expected
    assert expected == 1 or version_to_resume(tmp_path / "none", config, resume=resume) == 0


@pytest.mark.parametrize("back_to", [0, 2])
def test_after_going_back_checkpoints_of_later_steps_are_never_chosen(tmp_path, model, world, back_to):
    checkpoints, weights = tmp_path / "c", tmp_path / "w"
    state = save_steps(checkpoints, [2, 6, 8], model, world)
    for step in (2, 6, 8):
        (weights / f"step_{step}").mkdir(parents=True)
    state.version = 0
    exporter = tiny.open_exporter(weights, model, state.model, world)
    store = tiny.open_store(checkpoints, world, Checkpoints(resume_step=back_to, keep_last=1), exporter=exporter)
    store.resume(state, resume=True)
    assert state.version == back_to
    assert [path.name for path in weights.glob("step_*")] == [f"step_{step}" for step in [2] if step <= back_to]
    state.version = 3
    store.save(state)
    store.wait()
    assert chosen(checkpoints) == 3
    (aside,) = checkpoints.glob("set_aside_*")  # nothing was deleted
    assert complete_steps(aside) == [step for step in [2, 6, 8] if step > back_to]
    assert len(list(weights.glob("set_aside_*/*"))) == len(complete_steps(aside))


def test_the_newest_checkpoints_and_those_of_the_interval_are_kept(tmp_path, model, world):
    save_steps(tmp_path / "a", [1, 2, 3, 4, 5, 6, 7], model, world, keep_last=2, keep_interval=4)
    assert complete_steps(tmp_path / "a") == [4, 6, 7]
    save_steps(tmp_path / "b", [5, 3], model, world, keep_last=1)
    assert complete_steps(tmp_path / "b") == [3, 5]  # the one just saved stays


@pytest.mark.parametrize(("interval", "due"), [(None, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7])])
def test_checkpoints_are_due_at_the_interval_and_at_the_end(tmp_path, world, interval, due):
    store = tiny.open_store(tmp_path, world, Checkpoints(interval=interval))
    assert [version for version in range(1, 8) if store.is_due(version, last=7)] == due


def export(trained: PreTrainedModel, folder: Path, world: World, *, tokenizer: Path, dtype: torch.dtype) -> Path:
    exporter = tiny.open_exporter(folder / "weights", tokenizer, trained, world, dtype)
    store = tiny.open_store(folder / "checkpoints", world, exporter=exporter)
    store.save(TrainerState(trained, build_optimizer(trained, Optimizer()), version=1))
    store.wait()
    return folder / "weights/step_1"


@pytest.fixture(scope="module")
def trained(model, world):
    state = tiny.open_state(model, world)
    tiny.train_step(state, tiny.random_samples([20, 30]), world)
    return state.model


@pytest.fixture(scope="module")
def exported(trained, model, world, tmp_path_factory):
    return export(trained, tmp_path_factory.mktemp("exported"), world, tokenizer=model, dtype=torch.float32)


def test_transformers_loads_an_export_as_the_model_that_was_trained(trained, exported, model):
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    ids = torch.arange(20)[None] * 5 % tiny.VOCABULARY
    with torch.no_grad():
        assert torch.equal(*(each(input_ids=ids, use_cache=False).logits for each in (loaded, trained)))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    found, served = load_file(exported / "model.safetensors"), dict(served_tensors(trained, torch.float32))
    assert "lm_head.weight" not in found  # tied embeddings are written once
    assert tiny.are_equal(found, served)
    assert list(served) == [spec.name for spec in layout_of(trained, torch.float32)]
    messages = [{"role": "user", "content": "Reverse abc."}]
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
        for folder in (exported, model)
    )
    assert list(ours["input_ids"]) == list(theirs["input_ids"])


def test_an_export_replaces_the_last_and_its_configuration_describes_it(trained, model, tmp_path, world):
    (tmp_path / "weights/step_1").mkdir(parents=True)
    (tmp_path / "weights/step_1/left_over").touch()
    (tmp_path / "weights/.step_1.partial").mkdir()
    trained.generation_config.temperature, trained.generation_config.do_sample = 0.6, False  # transformers rejects this
    folder = export(trained, tmp_path, world, tokenizer=model, dtype=torch.bfloat16)
    assert [path.name for path in folder.parent.iterdir()] == ["step_1"]
    assert not (folder / "left_over").exists()
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.6
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["use_cache"], config["architectures"]) == ("bfloat16", True, ["Qwen3ForCausalLM"])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    expected = {name: parameter.full_tensor().bfloat16() for name, parameter in trained.named_parameters()}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
