"""The doctor on the machine: each limit, disk, memory and library is made bad for real, and is found to be."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from doctoring import build_case, findings, the_one
from limits import fill, small_disk
from trireme.base.devices import Devices
from trireme.launch.doctor import resources, software
from trireme.launch.doctor.clocks import clock, file_system_ahead, is_set, of_clock
from trireme.launch.doctor.disks import disk, of_disk, room_for
from trireme.launch.doctor.programs import run_program
from trireme.launch.doctor.resources import available, limits, memory, needs_of, of_shared_memory, shared_memory

GIB = 1 << 30


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    """For this process; its hard limit stays, so that it can be lifted again."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


# limits


def test_limits_that_are_enough_are_shown(tmp_path):
    finding = the_one(limits(build_case(tmp_path)))
    assert finding.verdict == "ok"
    assert "open files" in finding.found


def test_too_few_open_files_are_a_problem_with_the_number_that_is_needed(tmp_path):
    with limited(resource.RLIMIT_NOFILE, 500):
        finding = the_one(limits(build_case(tmp_path)))
    assert finding.verdict == "problem"
    assert "500 open files per process - expected 768 or more" in finding.found  # 256 + 2 x 128 x 2
    assert "ulimit -n" in finding.fix


def test_as_many_files_are_enough_as_was_said(tmp_path):
    for most, verdict in ((767, "problem"), (768, "ok")):
        with limited(resource.RLIMIT_NOFILE, most):
            assert the_one(limits(build_case(tmp_path))).verdict == verdict


def test_connections_are_counted_by_the_rollouts_under_way(tmp_path):
    config = build_case(tmp_path, "--orchestrator.batch-size", "1024", "--max-async-level", "0").config
    assert needs_of(config, cores=2, model_bytes=0).files == 256 + 2 * 1024
    busier = build_case(tmp_path, "--orchestrator.batch-size", "4096", "--max-async-level", "3").config
    assert needs_of(busier, cores=2, model_bytes=0).files == 256 + 2 * 1024  # `max_concurrent`


@pytest.mark.parametrize(
    ("which", "soft", "verdict", "words"),
    [
        (resource.RLIMIT_NPROC, 50, "problem", "room for 0 more threads (`ulimit -u`)"),
        (resource.RLIMIT_FSIZE, 1 << 20, "problem", "no file may grow beyond 1,048,576 bytes"),
        (resource.RLIMIT_AS, 64 * GIB, "warning", "64.0 GiB of address space"),
    ],
    ids=["processes", "file size", "address space"],
)
def test_a_limit_that_is_too_low_is_named(which, soft, verdict, words, tmp_path):
    with limited(which, soft):
        finding = the_one(limits(build_case(tmp_path)))
    assert finding.verdict == verdict
    assert words in finding.found
    assert "ulimit" in finding.fix


def test_threads_are_counted_by_the_processes(tmp_path):
    """64 + 2 of an engine, 32 + 2 of a rank, 16 of a worker of an environment, 64 of all others."""
    assert needs_of(build_case(tmp_path).config, cores=2, model_bytes=0).threads == 66 + 34 + 16 + 64
    ranks = build_case(tmp_path, "--trainer.num-ranks", "2").config
    assert needs_of(ranks, cores=2, model_bytes=0).threads == 66 + 2 * 34 + 16 + 64


def test_a_container_with_few_processes_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    (tmp_path / "pids.max").write_text("200\n")
    (tmp_path / "pids.current").write_text("180\n")
    finding = the_one(limits(build_case(tmp_path)))
    assert finding.verdict == "problem"
    assert "room for 20 more threads (the container's `pids.max`)" in finding.found


def test_locked_memory_matters_where_there_is_infiniband(tmp_path, monkeypatch):
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resources, "INFINIBAND", tmp_path / "infiniband")
    words = ("--device", "cuda", "--model.name", "no/such-model")
    on_gpus = build_case(tmp_path, *words, devices=Devices(gpus=("0", "1"), cores=2))
    with limited(resource.RLIMIT_MEMLOCK, 8 << 20):
        assert "8,388,608 bytes of locked memory, and this machine has InfiniBand" in the_one(limits(on_gpus)).found
        assert the_one(limits(build_case(tmp_path))).verdict == "ok"


# the disk


def test_a_disk_is_measured_by_writing_to_it(tmp_path):
    finding = of_disk(tmp_path / "new" / "folder", needed=0)
    assert finding.figures["sync_s"] > 0
    assert finding.figures["bytes_per_s"] > 0
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_full_disk_is_a_problem(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as folder:
        fill(folder)
        finding = of_disk(folder, needed=0)
        assert [file.name for file in folder.iterdir()] == ["ballast"]
    assert finding.verdict == "problem"
    assert "is full" in finding.found
    assert "Make room" in finding.fix


def test_a_disk_that_is_too_small_for_the_run_is_a_warning(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as folder:
        finding = of_disk(folder, needed=3 * GIB)
    assert finding.verdict == "warning"
    assert "expected 3.0 GiB" in finding.found


def test_what_a_run_leaves_is_counted_by_its_checkpoints(tmp_path):
    """Qwen3-8B: 8,190,735,360 parameters of 16 bytes, and a GiB for the rest."""
    words = ("--model.name", "Qwen/Qwen3-8B", "--max-steps", "100", "--trainer.ckpt.interval", "10")
    assert room_for(build_case(tmp_path, *words).config) == GIB + 10 * 16 * 8_190_735_360
    kept = build_case(tmp_path, *words, "--trainer.ckpt.keep-last", "2").config
    assert room_for(kept) == GIB + 3 * 16 * 8_190_735_360


def test_a_place_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("in the way")
    finding = of_disk(tmp_path / "file" / "runs", needed=0)
    assert finding.verdict == "problem"
    assert "cannot be written (Not a directory)" in finding.found


def test_a_disk_that_is_read_only_is_a_problem(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert "cannot be written (Read-only file system)" in of_disk(folder / "runs", needed=0).found


def test_the_disk_is_the_one_of_the_runs_folder(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as folder:
        fill(folder)
        assert the_one(disk(build_case(folder))).verdict == "problem"


# memory


def test_shared_memory_as_a_container_has_it_is_too_little_for_several_ranks(tmp_path):
    with small_disk(tmp_path / "shm", "65m") as folder:
        alone, several = (of_shared_memory(folder, is_shared=is_shared) for is_shared in (False, True))
        assert list(folder.iterdir()) == []
    assert (alone.verdict, several.verdict) == ("warning", "problem")
    assert "--shm-size" in several.fix


def test_next_to_no_shared_memory_is_a_problem_for_everybody(tmp_path):
    with small_disk(tmp_path / "shm", "2m") as folder:
        assert of_shared_memory(folder, is_shared=False).verdict == "problem"
        fill(folder)
        assert "cannot be written (No space left on device)" in of_shared_memory(folder, is_shared=False).found


def test_the_machines_own_shared_memory_is_looked_at(tmp_path):
    assert "/dev/shm has" in the_one(shared_memory(build_case(tmp_path))).found


def test_memory_is_compared_with_what_the_plan_says(tmp_path):
    finding = the_one(memory(build_case(tmp_path)))
    assert finding.figures["needed"] > GIB
    large = the_one(memory(build_case(tmp_path, "--model.name", "Qwen/Qwen2.5-32B")))
    assert large.verdict == "problem"
    assert "trireme plan" in large.fix


def test_a_containers_limit_counts_where_it_is_less_than_what_is_free(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    assert available(tmp_path) == 600_000_000
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert available(tmp_path) > 0


def test_memory_that_others_hold_now_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "available", lambda: 0.5 * GIB)
    finding = the_one(memory(build_case(tmp_path)))
    assert finding.verdict == "warning"
    assert "0.5 GiB are free now" in finding.found


# clocks


def test_this_machines_clock_runs_evenly(tmp_path):
    (tmp_path / "doctor").mkdir()
    assert the_one(clock(build_case(tmp_path))).verdict == "ok"
    assert is_set() in (True, False)
    ahead = file_system_ahead(tmp_path)
    assert ahead is not None
    assert abs(ahead) < 1
    assert file_system_ahead(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("facts", "alone", "verdict"),
    [
        ((0.0, 0.0, False), True, "ok"),
        ((0.0, 0.0, False), False, "warning"),  # nobody sets it, and others are to agree with it
        ((0.0, 0.0, True), False, "ok"),
        ((0.0, None, None), False, "ok"),
        ((0.5, 0.0, True), True, "warning"),
        ((0.0, -90.0, True), True, "warning"),
    ],
)
def test_a_clock_is_trusted_or_not_by_what_was_seen(facts, alone, verdict):
    finding = of_clock(*facts, alone=alone)
    assert finding.verdict == verdict
    assert bool(finding.fix) == (verdict == "warning")


# software


@pytest.mark.parametrize(
    ("version", "allowed"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False), ((4, 0), False)]
)
def test_bounds_of_python_are_those_of_the_package(version, allowed):
    assert software.allows(">=3.11,<3.14", version) is allowed
    assert software.allows("<3.14,>=3.11", version) is allowed


def test_this_python_and_these_libraries_are_known(tmp_path):
    case = build_case(tmp_path)
    assert the_one(software.python(case)).verdict == "ok"
    assert the_one(software.libraries(case)).verdict in ("ok", "warning")


def test_a_library_that_is_missing_is_a_problem_and_another_version_a_warning(tmp_path, monkeypatch):
    case = build_case(tmp_path)
    monkeypatch.setattr(software.metadata, "requires", lambda _: ["numpy==1.0", "rich>2", "no-such-thing==1"])
    finding = the_one(software.libraries(case))
    assert (finding.verdict, "no-such-thing not installed" in finding.found) == ("problem", True)
    monkeypatch.setattr(software.metadata, "requires", lambda _: ["numpy==1.0"])
    finding = the_one(software.libraries(case))
    assert finding.verdict == "warning"
    assert "(tested: 1.0)" in finding.found


@pytest.fixture
def packages(tmp_path) -> dict[str, Path]:
    for number, place in enumerate(software.STARTED_WITH):
        (tmp_path / place).mkdir(parents=True)
        for name in "abcd":
            (tmp_path / place / f"{name}{number}.py").write_text("x = 1\n")
    return {"torch": tmp_path / "torch", "vllm": tmp_path / "vllm"}


def test_missing_byte_code_is_noticed_and_the_advice_makes_it(packages):
    finding = software.of_byte_code(packages)
    assert finding.verdict == "warning"
    assert finding.found.startswith("0 of 16 modules")
    command = finding.fix.partition("`")[2].partition("`")[0]
    subprocess.run(command.split(), check=True)
    after = software.of_byte_code(packages)
    assert (after.verdict, after.figures["compiled"]) == ("ok", 16)


def test_torch_that_does_not_load_is_told_of_with_its_own_words(tmp_path, monkeypatch):
    broken(tmp_path, "torch", "libcudart.so.13: cannot open shared object file")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(software, "about_torch", lambda: run_program("trireme.trainer.about", limit_s=60))
    finding = the_one(software.torch(build_case(tmp_path)))
    assert finding.verdict == "problem"
    assert "libcudart.so.13: cannot open shared object file" in finding.found


def test_vllm_that_does_not_load_is_told_of_with_its_own_words(tmp_path, monkeypatch):
    broken(tmp_path, "vllm", "undefined symbol: _ZN3c105ErrorE")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = the_one(software.vllm(build_case(tmp_path)))
    assert finding.verdict == "problem"
    assert "undefined symbol: _ZN3c105ErrorE" in finding.found


def broken(folder: Path, package: str, words: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(f"raise ImportError({words!r})\n")


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"platform": "cpu", "plugin": True}, "ok", "with our weight engine"),
        ({"platform": "cuda", "plugin": True}, "problem", "expected one for cpu"),
        ({"platform": "cpu", "plugin": False}, "problem", "no new weights would arrive"),
    ],
)
def test_a_vllm_for_another_device_or_without_our_part_is_a_problem(facts, verdict, words, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = tmp_path / "trireme_says.py"
    package.write_text(f"print({json.dumps(json.dumps({'vllm': '1', 'seconds': 1.0} | facts))})\n")
    said = run_program("trireme_says", limit_s=60)
    monkeypatch.setattr(software, "run_program", lambda *_, **__: said)
    finding = the_one(software.vllm(build_case(tmp_path)))
    assert finding.verdict == verdict
    assert words in finding.found


# GPUs


def gpu(**facts: Any) -> dict[str, Any]:
    usual = {"name": "H100", "capability": "9.0", "memory": 80 * GIB, "free": 79 * GIB}
    return usual | {"computes": True, "bfloat16": True} | facts


def of_gpus(visible: int, *gpus: dict[str, Any], cuda: str | None = "13.0", wanted: bool = True) -> list[str]:
    found = software.of_gpus(visible, {"gpus": list(gpus), "cuda": cuda}, wanted=wanted)
    return [finding.verdict for finding in found]


def test_each_gpu_has_a_verdict():
    assert of_gpus(2, gpu(), gpu()) == ["ok", "ok"]
    assert of_gpus(3, gpu(free=60 * GIB), gpu(computes=False), gpu(bfloat16=False)) == ["warning", "problem", "warning"]


def test_gpus_that_torch_cannot_see_are_a_problem_where_they_are_wanted():
    assert of_gpus(2, gpu()) == ["problem", "ok"]
    assert of_gpus(1, cuda=None) == ["problem"]
    assert of_gpus(1, cuda=None, wanted=False) == ["warning"]


def test_a_machine_without_gpus_is_no_problem(tmp_path):
    assert [finding.verdict for finding in findings(software.gpus, build_case(tmp_path))] == ["skipped"]


def test_the_interpreter_that_is_asked_is_this_one():
    said = run_program("platform", limit_s=60)
    assert said.code == 0
    assert sys.platform in said.output.lower()
