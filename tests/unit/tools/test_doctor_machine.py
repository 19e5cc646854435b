"""The doctor's checks: machine, models, ports and hosts are made bad for real, and are found to be."""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.models.tiny_tokenizer import CHATML, write_tokenizer
from support.processes.limits import fill, limited, small_disk
from support.runs.doctoring import build_case, expect
from trireme.base.devices import Devices
from trireme.tools.doctor import machine
from trireme.tools.doctor.configuration import check_configuration
from trireme.tools.doctor.finding import Finding
from trireme.tools.doctor.machine import bytes_left_by, disk, libraries, limits, memory
from trireme.tools.doctor.models import check_folder, model, tokenizer
from trireme.tools.doctor.rehearsal import check_gpus, check_torch

GIB = 1 << 30


@pytest.mark.parametrize(
    ("words", "needed"),
    [("", 768), ("--orchestrator.batch-size 512 --max-async-level 0", 1280)],  # 256 + 2 x rollouts in flight
)
def test_open_files_are_counted_by_the_rollouts_in_flight(words, needed, tmp_path, monkeypatch):
    case = build_case(tmp_path, words)
    with limited(resource.RLIMIT_NOFILE, 256):  # of the shell, which the orchestrator raises
        expect(limits(case), "ok")
        for files, verdict in ((needed, "ok"), (needed - 1, "problem")):
            monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (256, files))
            expect(limits(case), verdict)


def test_little_shared_memory_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "statvfs", lambda _: SimpleNamespace(f_bavail=64, f_frsize=1 << 20))
    expect(limits(build_case(tmp_path)), "warning", "--shm-size")


def test_a_disk_is_measured_by_writing_to_it(tmp_path):
    case = build_case(tmp_path)
    (finding,) = disk(case)
    assert min(finding.figures["sync_s"], finding.figures["bytes_per_s"]) > 0
    assert list(case.folder.iterdir()) == []
    (tmp_path / "file").touch()
    expect(disk(build_case(tmp_path / "file" / "runs")), "problem", "(Not a directory)")


def test_doctor_finds_a_small_full_or_read_only_disk(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as folder:
        case = build_case(folder)
        expect(disk(case), "warning", "expected 1.0 GiB")
        fill(folder)
        expect(disk(case), "problem", "(No space left on device)")
        assert [file.name for file in folder.rglob("*") if file.is_file()] == ["ballast"]
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        expect(disk(case), "problem", "(Read-only file system)")


def test_what_a_run_leaves_is_counted_by_its_checkpoints(tmp_path):
    """A model of 459,840 parameters leaves 16 bytes for each, and a GiB for the rest."""
    interval = "--max-steps 100 --trainer.ckpt.interval 10"
    for words, num_kept in (("", 1), (interval, 10), (f"{interval} --trainer.ckpt.keep-last 2", 3)):
        assert bytes_left_by(build_case(tmp_path, words).config) == GIB + num_kept * 16 * 459_840


def test_memory_is_compared_with_what_the_plan_says(tmp_path, monkeypatch):
    free = SimpleNamespace(available=16 * GIB, total=16 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: free)
    assert expect(memory(build_case(tmp_path)), "ok").figures["needed"] > GIB
    free.available = 0.5 * GIB
    expect(memory(build_case(tmp_path)), "warning", "0.5 GiB are free")


def test_missing_library_is_a_problem_but_another_version_a_warning(tmp_path, monkeypatch):
    for requirements, verdict, words in (
        (["numpy==1.0", "rich>2", "no-such-thing==1"], "problem", "no-such-thing not installed"),
        (["numpy==1.0"], "warning", "(tested: 1.0)"),
    ):
        monkeypatch.setattr(machine.metadata, "requires", lambda _, requirements=requirements: requirements)
        expect(libraries(build_case(tmp_path)), verdict, words)


def test_a_torch_that_does_not_load_is_reported_in_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    expect(check_torch(build_case(tmp_path)), "problem", "libcudart.so.13: cannot open")


GPU = {"name": "H100", "capability": "9.0", "memory": 80 * GIB, "free": 79 * GIB, "computes": True}


@pytest.mark.parametrize(
    ("gpus", "device", "verdicts"),
    [
        ([GPU, GPU | {"free": 72 * GIB}], "cuda", ["ok", "ok"]),
        ([GPU | {"free": 60 * GIB}, GPU | {"computes": False}], "cuda", ["warning", "problem"]),
        ([GPU, GPU | {"capability": "7.5"}], "cuda", ["ok", "warning"]),
        ([GPU], "cuda", ["problem", "ok"]),  # torch cannot see one
        ([], "cpu", ["warning"]),
    ],
)
def test_each_gpu_has_a_verdict(gpus, device, verdicts, tmp_path):
    case = build_case(tmp_path, f"--device {device}", Devices(gpus=("0", "1"), cores=4))
    assert [finding.verdict for finding in check_gpus({"gpus": gpus}, case)] == verdicts


def test_a_gpu_whose_memory_no_other_process_can_read_is_a_problem(tmp_path):
    case = build_case(tmp_path, "", Devices(gpus=("0",), cores=4))
    facts = {"gpus": [GPU], "share_error": "pidfd_getfd: Operation not permitted"}
    expect([*check_gpus(facts, case)][1:], "problem", "not permitted", 'weight_broadcast.type = "filesystem"')


SHIPPED = Path(__file__).parents[3] / "models" / "reverse-text-tiny"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1839360\n"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def refused(folder: Path, words: str) -> None:
    assert expect([check_folder(folder)], "problem", words).fix


def test_doctor_names_indexed_weights_missing_from_the_model_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: np.ones((4, 4), np.float32)}, tmp_path / name)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert expect([check_folder(tmp_path)], "ok", "2 files").figures["tensors"] == 2
    save_file({"another": np.ones(3, np.float32)}, tmp_path / names[1])
    refused(tmp_path, f"names {names[1]}")


def test_a_damaged_file_is_found_by_its_own_header(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:100], whole[:8] + b"\xff" * 12 + whole[20:], POINTER):
        file.write_bytes(damaged)
        refused(folder, str(file))


def test_model_folder_without_safetensors_or_architecture_is_refused(folder):
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
    tokenized(folder, "problem", "Could not load the tokenizer")
    (folder / "tokenizer.json").unlink()
    tokenized(folder, "problem", "tokenizer.json does not exist")


@pytest.mark.parametrize(
    ("template", "vocab_size", "verdict", "words"),
    [
        (CHATML, 200, "ok", ""),
        (CHATML, 20, "problem", "rows in its embedding"),
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


def verdicts(found) -> list[str]:
    return [finding.verdict for finding in found]
