"""The doctor on the machine: each limit, disk, memory and library is made bad for real, and is found to be."""

from __future__ import annotations

import json
import resource
import subprocess

import pytest

from doctoring import build_case, findings, the_one
from limits import fill, limited, small_disk
from trireme.tools.doctor import resources, software
from trireme.tools.doctor.clocks import of_clock
from trireme.tools.doctor.disks import disk, of_disk, room_for
from trireme.tools.doctor.programs import run_program
from trireme.tools.doctor.resources import available, limits, memory, needs_of, of_shared_memory, shared_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("which", "soft", "verdict", "words"),
    [
        (resource.RLIMIT_NOFILE, 768, "ok", "768 open files"),  # 256 + 2 x 128 x 2
        (resource.RLIMIT_NOFILE, 767, "problem", "767 open files per process - expected 768 or more"),
        (resource.RLIMIT_NPROC, 50, "problem", "room for 0 more threads (`ulimit -u`)"),
        (resource.RLIMIT_FSIZE, 1 << 20, "problem", "no file may grow beyond 1,048,576 bytes"),
        (resource.RLIMIT_AS, 64 * GIB, "warning", "64.0 GiB of address space"),
    ],
    ids=["enough files", "files", "processes", "file size", "address space"],
)
def test_a_limit_that_is_too_low_is_named(which, soft, verdict, words, tmp_path):
    with limited(which, soft):
        finding = the_one(limits(build_case(tmp_path)))
    assert finding.verdict == verdict
    assert words in finding.found
    assert ("ulimit" in finding.fix) == (verdict != "ok")


def test_connections_are_counted_by_the_rollouts_under_way_and_threads_by_the_processes(tmp_path):
    """Threads: 64 + 2 of an engine, 32 + 2 of a rank, 16 of a worker of an environment, 64 of all others."""

    def needs(*words):
        found = needs_of(build_case(tmp_path, *words).config, cores=2, model_bytes=0)
        return found.files, found.threads

    assert needs("--orchestrator.batch-size", "1024", "--max-async-level", "0") == (256 + 2 * 1024, 66 + 34 + 16 + 64)
    busier = ("--orchestrator.batch-size", "4096", "--max-async-level", "3")
    assert needs(*busier)[0] == 256 + 2 * 1024  # `max_concurrent`
    assert needs("--trainer.num-ranks", "2")[1] == 66 + 2 * 34 + 16 + 64


def test_a_disk_is_measured_by_writing_to_it(tmp_path):
    finding = of_disk(tmp_path / "new" / "folder", needed=0)
    assert finding.figures["sync_s"] > 0
    assert finding.figures["bytes_per_s"] > 0
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    finding = of_disk(tmp_path / "file" / "runs", needed=0)
    assert finding.verdict == "problem"
    assert "cannot be written (Not a directory)" in finding.found


def test_a_disk_that_is_small_full_or_read_only_is_found_below_the_runs_folder(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as folder:
        finding = of_disk(folder, needed=3 * GIB)
        assert (finding.verdict, "expected 3.0 GiB" in finding.found) == ("warning", True)
        fill(folder)
        finding = the_one(disk(build_case(folder)))
        assert (finding.verdict, "is full" in finding.found) == ("problem", True)
        assert "Make room" in finding.fix
        assert [file.name for file in folder.rglob("*") if file.is_file()] == ["ballast"]
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert "cannot be written (Read-only file system)" in of_disk(folder / "runs", needed=0).found


def test_what_a_run_leaves_is_counted_by_its_checkpoints(tmp_path):
    """Qwen3-8B: 8,190,735,360 parameters of 16 bytes, and a GiB for the rest."""
    words = ("--model.name", "Qwen/Qwen3-8B", "--max-steps", "100", "--trainer.ckpt.interval", "10")
    for more, num_kept in (((), 10), (("--trainer.ckpt.keep-last", "2"), 3)):
        assert room_for(build_case(tmp_path, *words, *more).config) == GIB + num_kept * 16 * 8_190_735_360


@pytest.mark.parametrize(
    ("size", "is_shared", "verdict"),
    [("65m", False, "warning"), ("65m", True, "problem"), ("32m", False, "warning"), ("31m", False, "problem")],
)
def test_shared_memory_as_a_container_has_it_is_too_little_for_several_ranks(size, is_shared, verdict, tmp_path):
    with small_disk(tmp_path / "shm", size) as folder:
        finding = of_shared_memory(folder, is_shared=is_shared)
        assert list(folder.iterdir()) == []
        fill(folder)
        assert "cannot be written (No space left on device)" in of_shared_memory(folder, is_shared=False).found
    assert (finding.verdict, "--shm-size" in finding.fix) == (verdict, True)
    assert "/dev/shm has" in the_one(shared_memory(build_case(tmp_path))).found


def test_memory_is_compared_with_what_the_plan_says(tmp_path, monkeypatch):
    assert the_one(memory(build_case(tmp_path))).figures["needed"] > GIB
    large = the_one(memory(build_case(tmp_path, "--model.name", "Qwen/Qwen2.5-32B")))
    assert (large.verdict, "trireme plan" in large.fix) == ("problem", True)
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    assert available(tmp_path) == 600_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available(tmp_path) > 0
    monkeypatch.setattr(resources, "available", lambda: 0.5 * GIB)
    finding = the_one(memory(build_case(tmp_path)))
    assert (finding.verdict, "0.5 GiB are free now" in finding.found) == ("warning", True)


@pytest.mark.parametrize(
    ("facts", "alone", "verdict"),
    [
        ((0.0, 0.0, False), True, "ok"),
        ((0.0, 0.0, False), False, "warning"),  # nothing sets it, and others are to agree with it
        ((0.0, 0.0, True), False, "ok"),
        ((0.0, None, None), False, "ok"),
        ((0.5, 0.0, True), True, "warning"),
        ((0.0, -90.0, True), True, "warning"),
    ],
)
def test_a_clock_is_trusted_or_not_by_what_was_seen(facts, alone, verdict):
    finding = of_clock(*facts, alone=alone)
    assert (finding.verdict, bool(finding.fix)) == (verdict, verdict == "warning")


def test_a_library_that_is_missing_is_a_problem_and_another_version_a_warning(tmp_path, monkeypatch):
    case = build_case(tmp_path)
    assert the_one(software.libraries(case)).verdict in ("ok", "warning")
    for requirements, verdict, words in (
        (["numpy==1.0", "rich>2", "no-such-thing==1"], "problem", "no-such-thing not installed"),
        (["numpy==1.0"], "warning", "(tested: 1.0)"),
    ):
        monkeypatch.setattr(software.metadata, "requires", lambda _, requirements=requirements: requirements)
        finding = the_one(software.libraries(case))
        assert (finding.verdict, words in finding.found) == (verdict, True)


@pytest.mark.parametrize(
    ("package", "words"),
    [("torch", "libcudart.so.13: cannot open shared object file"), ("vllm", "undefined symbol: _ZN3c105ErrorE")],
)
def test_what_does_not_load_is_told_of_with_its_own_words(package, words, tmp_path, monkeypatch):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ImportError({words!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(software, "about_torch", lambda: run_program("trireme.tools.replay.about", limit_s=60))
    finding = the_one(getattr(software, package)(build_case(tmp_path)))
    assert (finding.verdict, words in finding.found) == ("problem", True)


@pytest.mark.parametrize(
    ("platform", "plugin", "verdict", "words"),
    [
        ("cpu", True, "ok", "with our weight engine"),
        ("cuda", True, "problem", "expected one for cpu"),
        ("cpu", False, "problem", "no new weights would arrive"),
    ],
)
def test_a_vllm_for_another_device_or_without_our_part_is_a_problem(
    platform, plugin, verdict, words, tmp_path, monkeypatch
):
    facts = {"vllm": "1", "seconds": 1.0, "platform": platform, "plugin": plugin}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "trireme_says.py").write_text(f"print({json.dumps(json.dumps(facts))})\n")
    said = run_program("trireme_says", limit_s=60)
    monkeypatch.setattr(software, "run_program", lambda *_, **__: said)
    finding = the_one(software.vllm(build_case(tmp_path)))
    assert (finding.verdict, words in finding.found) == (verdict, True)


GPU = {"name": "H100", "capability": "9.0", "memory": 80 * GIB, "free": 79 * GIB, "computes": True, "bfloat16": True}
SICK = [GPU | {"free": 60 * GIB}, GPU | {"computes": False}, GPU | {"bfloat16": False}]


@pytest.mark.parametrize(
    ("visible", "gpus", "cuda", "wanted", "verdicts"),
    [
        (2, [GPU, GPU | {"free": 72 * GIB}], "13.0", True, ["ok", "ok"]),
        (3, SICK, "13.0", True, ["warning", "problem", "warning"]),
        (2, [GPU], "13.0", True, ["problem", "ok"]),  # torch cannot see one
        (1, [], None, True, ["problem"]),
        (1, [], None, False, ["warning"]),
    ],
)
def test_each_gpu_has_a_verdict(visible, gpus, cuda, wanted, verdicts, tmp_path):
    found = software.of_gpus(visible, {"gpus": gpus, "cuda": cuda}, wanted=wanted)
    assert [finding.verdict for finding in found] == verdicts
    assert [finding.verdict for finding in findings(software.gpus, build_case(tmp_path))] == ["skipped"]
