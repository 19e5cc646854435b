"""Runs the sections of the GPU benchmark within a budget of time, and says what became of each."""

from __future__ import annotations

import os
import platform
import signal
import time
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from benchmarks.gpu.section import FORK, Figures, Result, Section, read_parts, verdict_of
from trireme.base.devices import detect_devices
from trireme.base.processes import last_lines

LEAVE_S = 25.0  # between SIGTERM and SIGKILL
POLL_S = 0.05
LONGEST_REASON = 300  # characters of a part's reason in the table


class Sections:
    """Runs sections in turn, in processes of their own, and keeps the engine that some of them share."""

    def __init__(self, device: str, folder: Path, budget_s: float) -> None:
        self.results: dict[str, Result] = {}
        self._device = device
        self._num_gpus = detect_devices().num_gpus
        self._folder = folder
        self._ends_at = time.monotonic() + budget_s
        self._engine: ForkProcess | None = None

    def run(self, section: Section) -> Result:
        began = time.monotonic()
        result = self._lacking(section) or self._started(section)
        result.seconds = round(time.monotonic() - began, 1)
        self.results[section.name] = result
        return result

    def _lacking(self, section: Section) -> Result | None:
        """Return why a section is skipped, or None."""
        if self._device == "cpu" and section.cpu_s is None:
            return Result("skipped", "needs a GPU")
        if self._device == "cuda" and self._num_gpus < section.gpus:
            return Result("skipped", f"needs {section.gpus} GPUs, and {self._num_gpus} are visible")
        left_s, usual_s = self._ends_at - time.monotonic(), section.usual_s(self._device)
        if left_s < usual_s:
            return Result("skipped", f"needs about {usual_s:.0f} s, and {max(0.0, left_s):.0f} s are left")
        if section.engine and not (self._engine and self._engine.is_alive()):
            return Result("skipped", "needs the section `engine`, which did not start or was ended")
        return None

    def _started(self, section: Section) -> Result:
        if not section.engine:
            self.close()  # its memory is for others now
        limit_s = min(section.longest_s(self._device), self._ends_at - time.monotonic())
        log = self._folder / f"{section.name}.log"
        process = FORK.Process(target=run_section, args=(section, self._device, log))
        process.start()
        parts = self._await(process, log, limit_s, stays=section.stays)
        verdict, reason = verdict_of(parts)

        if process.exitcode is None and not (section.stays and parts):
            was_cut = limit_s < section.longest_s(self._device)
            reason = f"was cut off after {limit_s:.0f} s, " + ("when the time was spent" if was_cut else "its deadline")
            has_failed = any(each["verdict"] == "failed" for each in parts.values())
            verdict = "skipped" if was_cut and not has_failed else "failed"
        elif process.exitcode:
            verdict, reason = "failed", f"ended with exit code {process.exitcode}: {' '.join(last_lines(log, 5))}"
        if section.stays and verdict == "ok":
            self._engine = process
            return Result(verdict, reason, parts=parts)
        end(process)
        if verdict != "ok" and section.engine:
            self.close()  # it may be paused, or wait for a peer
        return Result(verdict, reason, parts=parts)

    def _await(self, process: ForkProcess, log: Path, limit_s: float, *, stays: bool) -> dict[str, Figures]:
        """Wait for the end of a section; of one that stays, for its first part. Return its parts so far."""
        ends_at = time.monotonic() + limit_s
        while time.monotonic() < ends_at:
            process.join(POLL_S)
            if process.exitcode is not None or (stays and read_parts(log)):
                break
        return read_parts(log)

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            end(self._engine)
            self._engine = None


def run_section(section: Section, device: str, log: Path) -> None:
    """Run a section in this process, which was forked for it; its parts print their results into the log."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    section.function(device)


def end(process: ForkProcess) -> None:
    """End a section's process and all that are left of its group. What it started by `run_program` ends with it."""
    process.terminate()
    process.join(LEAVE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def table(device: str, results: dict[str, Result]) -> str:
    """Return the results as Markdown, with the versions and the card of the section `device`."""
    about = results["device"].parts.get("versions", {}) if "device" in results else {}
    facts = {"device": device, "python": platform.python_version()} | about
    lines = ["", *(f"- {name}: {value}" for name, value in facts.items() if name != "verdict"), ""]
    lines += ["| section | verdict | seconds | figures |", "|---|---|---|---|"]
    for name, result in results.items():
        told = [f"**{result.reason}**"] if result.reason and result.verdict != "ok" else []
        for part, figures in result.parts.items() if name != "device" else ():
            told.append(f"{part}: {', '.join(_cells(figures))}")
        lines.append(f"| {name} | {result.verdict} | {result.seconds:.0f} | {'<br>'.join(told)} |".replace("\n", " "))
    return "\n".join(lines)


def _cells(figures: Figures) -> list[str]:
    shown = {name: value for name, value in figures.items() if name not in ("verdict", "reason") and value is not None}
    cells = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()]
    if figures["verdict"] != "ok":
        cells.append(f"{figures['verdict']}: {figures['reason'].partition(' - expected')[0][:LONGEST_REASON]}")
    return cells or ["ok"]


def exit_code(results: dict[str, Result]) -> int:
    return int(any(result.verdict == "failed" for result in results.values()))
