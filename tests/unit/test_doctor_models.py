"""The doctor on model files: each is damaged in a way that happens, and the file is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from doctoring import build_case, findings, the_one
from limits import small_disk
from tiny_tokenizer import CHATML, write_tokenizer
from trireme.cli.doctor_tokenizer import tokenizer
from trireme.launch.doctor.configuration import configuration
from trireme.launch.doctor.finding import Finding
from trireme.launch.doctor.models import model, of_folder

SHIPPED = Path(__file__).parents[2] / "models" / "reverse-text-tiny"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


@pytest.fixture
def in_parts(tmp_path) -> Path:
    """A model of two files, with their index."""
    folder = tmp_path / "in-parts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    places = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"layer.{number}": np.ones((4, 4), np.float32)}, folder / name)
        places[f"layer.{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def refused(folder: Path) -> Finding:
    finding = of_folder(folder)
    assert finding.verdict == "problem"
    assert finding.fix
    return finding


def test_models_that_come_with_trireme_are_whole():
    for each in sorted(SHIPPED.parent.glob("*/config.json")):
        assert of_folder(each.parent).verdict == "ok", each


def test_parts_are_counted_together(in_parts):
    finding = of_folder(in_parts)
    assert finding.verdict == "ok"
    assert (finding.figures["tensors"], finding.found.count("2 files")) == (2, 1)


def test_a_file_that_ends_too_early_is_found_by_its_own_header(folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    found = refused(folder).found
    assert f"{file} has {len(content) - 1:,} bytes, and its header says {len(content):,}" in found


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_a_file_that_ends_in_its_header_is_found(size, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "ends within its header" in refused(folder).found


def test_a_header_that_is_no_header_is_found(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(content)
    assert "a header that cannot be read" in refused(folder).found


def test_a_pointer_of_git_lfs_is_told_from_weights(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1839360\n"
    (folder / "model.safetensors").write_text(pointer)
    assert "`git lfs pull`" in refused(folder).found


def test_a_file_that_the_index_names_and_is_not_there_is_named(in_parts):
    (in_parts / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors (1 of the 2 files" in refused(in_parts).found


def test_a_tensor_that_the_index_names_and_no_file_has_is_named(in_parts):
    save_file({"another": np.ones(3, np.float32)}, in_parts / "model-00002-of-00002.safetensors")
    assert "names layer.2" in refused(in_parts).found


def test_a_model_in_another_form_is_refused_by_what_is_there(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no *.safetensors but pytorch_model.bin" in refused(folder).found


def test_a_config_that_cannot_be_read_or_names_no_architecture_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert 'names no "architectures"' in refused(folder).found
    (folder / "config.json").write_text("{")
    assert "expected a model as Hugging Face writes it" in refused(folder).found


def test_a_model_that_was_cut_off_by_a_full_disk_is_found(tmp_path):
    """As a copy leaves it that nobody looked at."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(shutil.Error, match="No space left"):
            shutil.copytree(SHIPPED, disk / "model")
        assert refused(disk / "model")


def test_a_model_that_is_not_there_is_said_once(tmp_path):
    case = build_case(tmp_path, "--model.name", str(tmp_path / "no-such-model"))
    finding = the_one(model(case))
    assert (finding.verdict, "does not exist" in finding.found) == ("problem", True)
    assert [finding.verdict for finding in findings(configuration, case)] == ["ok"]


def test_a_model_of_a_hub_is_a_problem_where_the_hub_may_not_be_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = the_one(model(build_case(tmp_path, "--model.name", "nobody/no-such-model")))
    assert finding.verdict == "problem"
    assert "HF_HUB_OFFLINE is set" in finding.found
    assert "hf download nobody/no-such-model" in finding.fix


# tokenizers


def tokenized(folder: Path, tmp_path: Path) -> Finding:
    return the_one(tokenizer(build_case(tmp_path, "--model.name", str(folder))))


def written(folder: Path, template: str = CHATML, *, vocab_size: int = 200) -> Path:
    write_tokenizer(folder, template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


def test_a_question_goes_through_and_comes_back(tmp_path):
    assert tokenized(SHIPPED, tmp_path).verdict == "ok"
    assert tokenized(written(tmp_path / "model"), tmp_path).verdict == "ok"


def test_a_tokenizer_that_is_damaged_is_a_problem(folder, tmp_path):
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    finding = tokenized(folder, tmp_path)
    assert finding.verdict == "problem"
    assert "its tokenizer cannot be read" in finding.found
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist" in tokenized(folder, tmp_path).found


def test_a_model_without_a_chat_template_is_a_problem(folder, tmp_path):
    (folder / "chat_template.jinja").unlink()
    finding = tokenized(folder, tmp_path)
    assert finding.verdict == "problem"
    assert "has no chat template" in finding.found


@pytest.mark.parametrize(
    ("template", "vocab_size", "verdict", "words"),
    [
        (CHATML, 20, "problem", "which the model has room for"),
        ("{{ bos_token }}Hello.", 200, "problem", "leaves the question out"),
        ("{{ messages[0]['content'] }}", 200, "warning", "does not say where the assistant begins"),
        (CHATML.replace("assistant", "Ассистент"), 200, "warning", "another text"),
        ("{{ messages[0]['content'] | no_such_filter }}", 200, "problem", "no_such_filter"),
    ],
    ids=["of a larger model", "no question", "no generation prompt", "unknown characters", "does not compile"],
)
def test_a_tokenizer_or_template_that_does_not_fit_is_found(template, vocab_size, verdict, words, tmp_path):
    finding = tokenized(written(tmp_path / "model", template, vocab_size=vocab_size), tmp_path)
    assert finding.verdict == verdict
    assert words in finding.found
