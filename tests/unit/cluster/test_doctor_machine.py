"""The doctor on the machine: limits, disk, memory and libraries are made bad for real, and are found to be."""

import os
import resource
import subprocess
from types import SimpleNamespace

import pytest

from doctoring import build_case, the_one
from limits import fill, limited, small_disk
from trireme.base.devices import Devices
from trireme.tools.doctor import machine
from trireme.tools.doctor.machine import bytes_left_by, disk, libraries, limits, memory
from trireme.tools.doctor.rehearsal import check_gpus, check_torch

GIB = 1 << 30


@pytest.mark.parametrize(
    ("words", "files", "verdict"),
    [
        ((), 768, "ok"),  # 256 + 2 x 128 x 2
        ((), 767, "problem"),
        (("--orchestrator.batch-size", "512", "--max-async-level", "0"), 1280, "ok"),
        (("--orchestrator.batch-size", "512", "--max-async-level", "0"), 1279, "problem"),
    ],
)
def test_open_files_are_counted_by_the_rollouts_in_flight(words, files, verdict, tmp_path, monkeypatch):
    case = build_case(tmp_path, *words)
    with limited(resource.RLIMIT_NOFILE, 256):  # of the shell, which the orchestrator raises
        assert the_one(limits(case)).verdict == "ok"
        monkeypatch.setattr("resource.getrlimit", lambda _: (256, files))
        finding = the_one(limits(case))
    assert (finding.verdict, "ulimit -Hn" in finding.fix) == (verdict, verdict == "problem")


def test_little_shared_memory_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "statvfs", lambda _: SimpleNamespace(f_bavail=64, f_frsize=1 << 20))
    finding = the_one(limits(build_case(tmp_path)))
    assert (finding.verdict, "--shm-size" in finding.fix) == ("warning", True)


def test_a_disk_is_measured_by_writing_to_it(tmp_path):
    case = build_case(tmp_path)
    finding = the_one(disk(case))
    assert finding.figures["sync_s"] > 0
    assert finding.figures["bytes_per_s"] > 0
    assert list(case.folder.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    finding = the_one(disk(build_case(tmp_path / "file" / "runs")))
    assert (finding.verdict, "(Not a directory)" in finding.found) == ("problem", True)


def test_a_disk_that_is_small_full_or_read_only_is_found_below_the_runs_folder(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as folder:
        case = build_case(folder)
        finding = the_one(disk(case))
        assert (finding.verdict, "expected 1.0 GiB" in finding.found) == ("warning", True)
        fill(folder)
        finding = the_one(disk(case))
        assert (finding.verdict, "(No space left on device)" in finding.found) == ("problem", True)
        assert [file.name for file in folder.rglob("*") if file.is_file()] == ["ballast"]
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert "(Read-only file system)" in the_one(disk(case)).found


def test_what_a_run_leaves_is_counted_by_its_checkpoints(tmp_path):
    """A model of 459,776 parameters leaves 16 bytes for each, and a GiB for the rest."""
    words = ("--max-steps", "100", "--trainer.ckpt.interval", "10")
    alone = bytes_left_by(build_case(tmp_path).config) - GIB
    for more, num_kept in (((), 10), (("--trainer.ckpt.keep-last", "2"), 3)):
        assert bytes_left_by(build_case(tmp_path, *words, *more).config) == GIB + num_kept * alone


def test_memory_is_compared_with_what_the_plan_says(tmp_path, monkeypatch):
    free = SimpleNamespace(available=16 * GIB, total=16 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: free)
    finding = the_one(memory(build_case(tmp_path)))
    assert (finding.verdict, finding.figures["needed"] > GIB) == ("ok", True)
    free.available = 0.5 * GIB
    finding = the_one(memory(build_case(tmp_path)))
    assert (finding.verdict, "0.5 GiB are free" in finding.found) == ("warning", True)


def test_a_library_that_is_missing_is_a_problem_and_another_version_a_warning(tmp_path, monkeypatch):
    case = build_case(tmp_path)
    for requirements, verdict, words in (
        (["numpy==1.0", "rich>2", "no-such-thing==1"], "problem", "no-such-thing not installed"),
        (["numpy==1.0"], "warning", "(tested: 1.0)"),
    ):
        monkeypatch.setattr(machine.metadata, "requires", lambda _, requirements=requirements: requirements)
        finding = the_one(libraries(case))
        assert (finding.verdict, words in finding.found) == (verdict, True)


def test_a_torch_that_does_not_load_is_reported_in_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    finding = the_one(check_torch(build_case(tmp_path)))
    assert (finding.verdict, "libcudart.so.13: cannot open" in finding.found) == ("problem", True)


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
    devices = Devices(gpus=("0", "1"), cores=4)
    case = build_case(tmp_path, "--device", device, devices=devices)
    assert [finding.verdict for finding in check_gpus({"gpus": gpus}, case)] == verdicts
