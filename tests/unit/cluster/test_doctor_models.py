"""The doctor on model files: each is damaged in a way that happens, and the file is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from doctoring import build_case, expect
from tiny_tokenizer import CHATML, write_tokenizer
from trireme.tools.doctor.configuration import check_configuration
from trireme.tools.doctor.models import check_folder, model, tokenizer
from trireme.tools.doctor.report import Finding

SHIPPED = Path(__file__).parents[3] / "models" / "reverse-text-tiny"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1839360\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def refused(folder: Path, words: str) -> None:
    assert expect([check_folder(folder)], "problem", words).fix


def test_parts_are_counted_together_and_what_the_index_names_and_is_missing_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: np.ones((4, 4), np.float32)}, tmp_path / name)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert expect([check_folder(tmp_path)], "ok", "2 files").figures["tensors"] == 2
    save_file({"another": np.ones(3, np.float32)}, tmp_path / names[1])
    refused(tmp_path, f"names {names[1]}")
    (tmp_path / names[1]).unlink()
    refused(tmp_path, names[1])


def test_a_damaged_file_is_found_by_its_own_header(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:100], whole[:8] + b"\xff" * 12 + whole[20:], POINTER):
        file.write_bytes(damaged)
        refused(folder, str(file))


def test_a_folder_without_safetensors_or_architecture_is_refused_by_what_is_there(folder):
    for each in sorted(SHIPPED.parent.glob("*/config.json")):
        expect([check_folder(each.parent)], "ok")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "has no *.safetensors")
    for content in ("{}", "{"):
        (folder / "config.json").write_text(content)
        refused(folder, "config.json cannot be read")


def test_a_model_that_is_not_there_and_may_not_be_fetched_is_said_once(tmp_path, monkeypatch):
    case = build_case(tmp_path, f"--model.name {tmp_path / 'no-such-model'}")
    expect(model(case), "problem", "does not exist")
    expect(check_configuration(case), "ok")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    absent = "nobody/no-such-model"
    words = ("HF_HUB_OFFLINE is set", f"hf download {absent}")
    expect(model(build_case(tmp_path, f"--model.name {absent}")), "problem", *words)


def tokenized(folder: Path, verdict: str, words: str = "") -> Finding:
    return expect(tokenizer(build_case(folder, f"--model.name {folder}")), verdict, words)


def test_a_tokenizer_that_is_damaged_or_has_no_chat_template_is_a_problem(folder):
    tokenized(folder, "ok")
    (folder / "chat_template.jinja").unlink()
    tokenized(folder, "problem", "has no chat template")
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    tokenized(folder, "problem", "its tokenizer cannot be read")
    (folder / "tokenizer.json").unlink()
    tokenized(folder, "problem", "tokenizer.json does not exist")


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
)
def test_a_tokenizer_or_template_that_does_not_fit_is_found(template, vocab_size, verdict, words, tmp_path):
    write_tokenizer(tmp_path / "model", template)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    tokenized(tmp_path / "model", verdict, words)
