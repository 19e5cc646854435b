"""The doctor on the machine: limits, disk, memory and libraries are made bad for real, and are found to be."""

import os
import resource
import subprocess
from types import SimpleNamespace

import pytest

from doctoring import build_case, expect
from limits import fill, limited, small_disk
from trireme.base.devices import Devices
from trireme.tools.doctor import machine
from trireme.tools.doctor.machine import bytes_left_by, disk, libraries, limits, memory
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


def test_a_disk_that_is_small_full_or_read_only_is_found_below_the_runs_folder(tmp_path):
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


def test_a_library_that_is_missing_is_a_problem_and_another_version_a_warning(tmp_path, monkeypatch):
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
