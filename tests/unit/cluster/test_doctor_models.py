"""The doctor on model files: each is damaged in a way that happens, and the file is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from doctoring import build_case, the_one
from tiny_tokenizer import CHATML, write_tokenizer
from trireme.tools.doctor.configuration import check_configuration
from trireme.tools.doctor.models import check_folder, model, tokenizer
from trireme.tools.doctor.report import Finding

SHIPPED = Path(__file__).parents[3] / "models" / "reverse-text-tiny"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1839360\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def refused(folder: Path) -> str:
    finding = check_folder(folder)
    assert finding.verdict == "problem"
    assert finding.fix
    return finding.found


def test_models_that_come_with_trireme_are_whole():
    for each in sorted(SHIPPED.parent.glob("*/config.json")):
        assert check_folder(each.parent).verdict == "ok", each


def test_parts_are_counted_together_and_what_the_index_names_and_is_missing_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: np.ones((4, 4), np.float32)}, tmp_path / name)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    finding = check_folder(tmp_path)
    assert (finding.verdict, finding.figures["tensors"], "2 files" in finding.found) == ("ok", 2, True)
    save_file({"another": np.ones(3, np.float32)}, tmp_path / names[1])
    assert f"names {names[1]}" in refused(tmp_path)
    (tmp_path / names[1]).unlink()
    assert names[1] in refused(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[:8] + b"\xff" * 12 + content[20:],
        lambda content: POINTER,
    ],
    ids=["one byte short", "empty", "100 bytes", "no header", "a pointer of git lfs"],
)
def test_a_damaged_file_is_found_by_its_own_header(damage, folder):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert str(file) in refused(folder)


def test_a_folder_without_safetensors_or_architecture_is_refused_by_what_is_there(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no *.safetensors" in refused(folder)
    for content in ("{}", "{"):
        (folder / "config.json").write_text(content)
        assert "config.json cannot be read" in refused(folder)


def test_a_model_that_is_not_there_and_may_not_be_fetched_is_said_once(tmp_path, monkeypatch):
    case = build_case(tmp_path, "--model.name", str(tmp_path / "no-such-model"))
    finding = the_one(model(case))
    assert (finding.verdict, "does not exist" in finding.found) == ("problem", True)
    assert [finding.verdict for finding in check_configuration(case)] == ["ok"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = the_one(model(build_case(tmp_path, "--model.name", "nobody/no-such-model")))
    assert (finding.verdict, "HF_HUB_OFFLINE is set" in finding.found) == ("problem", True)
    assert "hf download nobody/no-such-model" in finding.fix


def tokenized(folder: Path, tmp_path: Path) -> Finding:
    return the_one(tokenizer(build_case(tmp_path, "--model.name", str(folder))))


def test_a_tokenizer_that_is_damaged_or_has_no_chat_template_is_a_problem(folder, tmp_path):
    assert tokenized(folder, tmp_path).verdict == "ok"
    file = folder / "tokenizer.json"
    for change, words in (
        ((folder / "chat_template.jinja").unlink, "has no chat template"),
        (lambda: file.write_text('{"version": "1.0"'), "its tokenizer cannot be read"),
        (file.unlink, "tokenizer.json does not exist"),
    ):
        change()
        finding = tokenized(folder, tmp_path)
        assert (finding.verdict, words in finding.found) == ("problem", True)


@pytest.mark.parametrize(
    ("template", "vocab_size", "verdict", "words"),
    [
        (CHATML, 200, "ok", ""),
        (CHATML, 20, "problem", "which the model has room for"),
        ("{{ bos_token }}Hello.", 200, "problem", "leaves the question out"),
        ("{{ messages[0]['content'] }}", 200, "warning", "does not say where the assistant begins"),
        (CHATML.replace("assistant", "Ассистент"), 200, "warning", "another text"),
        ("{{ messages[0]['content'] | no_such_filter }}", 200, "problem", "no_such_filter"),
    ],
    ids=["fits", "of a larger model", "no question", "no generation prompt", "unknown characters", "does not compile"],
)
def test_a_tokenizer_or_template_that_does_not_fit_is_found(template, vocab_size, verdict, words, tmp_path):
    write_tokenizer(tmp_path / "model", template)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    finding = tokenized(tmp_path / "model", tmp_path)
    assert finding.verdict == verdict
    assert words in finding.found
