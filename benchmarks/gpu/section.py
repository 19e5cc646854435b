"""One section of the GPU benchmark: what it needs, and how it reports what it found, part by part."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")  # torch is imported once for all processes, and CUDA never before a fork
MARK = "PART "  # begins the line of a finished part
FOLDER = "TRIREME_GPU_BENCHMARK"  # environment variable: the folder that sections share

Figures = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A function that gets the device, and runs in a process of its own.

    Example:
        Section(trainer.attention, cuda_s=40, cpu_s=10)
    """

    function: Callable[[str], None]
    cuda_s: float  # usual time on one GPU; an estimate
    cpu_s: float | None  # usual time on 2 cores, measured; None: it needs a GPU
    deadline_s: float = 120.0  # on a GPU; a CPU that is busy with other work gets twice that
    gpus: int = 1  # needed if it runs on GPUs
    engine: bool = False  # it uses the engine that stays for several sections
    stays: bool = False  # it is that engine

    @property
    def name(self) -> str:
        return self.function.__name__

    def usual_s(self, device: str) -> float:
        return self.cuda_s if device == "cuda" else self.cpu_s or 0.0

    def longest_s(self, device: str) -> float:
        return self.deadline_s * (1 if device == "cuda" else 2)


@dataclass
class Result:
    """The end of a section."""

    verdict: str = "ok"  # or "failed", "skipped"
    reason: str = ""
    seconds: float = 0.0
    parts: dict[str, Figures] = field(default_factory=dict)  # each with its own verdict


class Skipped(Exception):
    """Something that a part needs is not here."""


@contextmanager
def part(name: str) -> Iterator[Figures]:
    """Yield the dictionary for a part's figures, and print it with a verdict when the part ends. An error ends that
    part alone: the others of the section are still tried."""
    figures: Figures = {}
    try:
        yield figures
        figures["verdict"] = "ok"
    except Skipped as reason:
        figures |= {"verdict": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        figures |= {"verdict": "failed", "reason": f"{type(error).__name__}: {str(error).strip()[-1500:]}"}
    os.write(1, f"\n{MARK}{json.dumps({'name': name} | figures)}\n".encode())  # past buffers, which a kill would lose


def read_parts(log: Path) -> dict[str, Figures]:
    """Return the parts that a section has printed so far, by their names."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.removeprefix(MARK) for line in text.split("\n")[:-1] if line.startswith(MARK)]
    return {found.pop("name"): found for found in map(json.loads, lines)}


def verdict_of(parts: dict[str, Figures]) -> tuple[str, str]:
    """Return the verdict of a section that ran to its end, and the reason: it failed if any of its parts did."""
    verdicts = {name: each["verdict"] for name, each in parts.items()}
    failed = [name for name, verdict in verdicts.items() if verdict == "failed"]
    if failed or not parts:
        return "failed", ", ".join(failed) or "it reported nothing"
    if set(verdicts.values()) == {"skipped"}:
        return "skipped", "; ".join(dict.fromkeys(each["reason"] for each in parts.values()))
    return "ok", ""


def folder() -> Path:
    """The folder of this run of the benchmark."""
    return Path(os.environ[FOLDER])


def peak_gib(work: Callable[[], object], device: str) -> float:
    """Return the most GiB of tensors while this runs; 0 on a CPU, whose allocator does not count."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
