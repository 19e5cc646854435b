"""Reading a process's log: its start-up phase, and why it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trireme.base.processes import last_lines

MAX_LINES = 24
STACK_LINES = 12  # newest frames' lines of a traceback, or lines of a log without one

STARTUP_PHASES = (
    (re.compile(r"Application startup complete"), "ready"),
    (re.compile(r"Capturing CUDA graph|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"torch\.compile|Compiling a graph"), "compiling"),
    (re.compile(r"KV cache size|init engine"), "warming up"),
    (re.compile(r"Starting to load model|Loading weights|Loading safetensors"), "loading the model"),
)

_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"error|Error|ERROR|exception|Exception|Fatal Python")
_SYMPTOM = "root cause above"  # vLLM's server says this of its engine core, whose traceback comes before
_NOISE = re.compile(
    r"^\s*$|^\s*warnings\.warn\(|\w+Warning: |resource_tracker|leaked \w+ objects|destroy_process_group"
    r"|\d+%\||\"(GET|POST) \S+ HTTP/1\.\d\" 2\d\d"
    r"|Shutting down|Waiting for application shutdown|Finished server process"
)
# "(EngineCore pid=123) ERROR 01-02 03:04:05 [core.py:12] " of vLLM; "    | " of an exception group
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\] )?(?:\s*\| )?")


def startup_phase(log: Path, start: int = 0) -> str:
    """Return what a starting process is doing, as far as its log shows."""
    for line in reversed(last_lines(log, start=start)):
        for pattern, phase in STARTUP_PHASES:
            if pattern.search(line):
                return phase
    return "starting"


def failure_lines(log: Path, start: int = 0) -> list[str]:
    """Return the lines that most likely say why a process ended: its last traceback, else around its last error, else
    its last lines. Progress bars, access logs and shutdown messages are left out.
    """
    lines = [line for line in last_lines(log, start=start) if not _NOISE.search(line)]
    tracebacks = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    if tracebacks:
        # Where the last traceback is a symptom, the one before it is the cause.
        is_symptom = len(tracebacks) > 1 and any(_SYMPTOM in line for line in lines[tracebacks[-1] :])
        return _shorten(lines[tracebacks[-2 if is_symptom else -1] :])
    errors = [index for index, line in enumerate(lines) if _ERROR.search(line)]
    tail = max(0, len(lines) - STACK_LINES)
    if errors and errors[-1] < tail:
        return [*lines[errors[-1] : min(errors[-1] + STACK_LINES, tail)], "…", *lines[tail:]]
    return lines[tail:]


def _shorten(lines: Sequence[str]) -> list[str]:
    """Return a traceback without its oldest frames, with the lines after it."""
    is_frame = [_PREFIX.sub("", line).startswith((" ", "\t")) for line in lines]
    end = next((i for i in range(1, len(lines)) if not is_frame[i]), len(lines) - 1)
    frames = list(lines[1:end])
    if len(frames) > STACK_LINES:
        frames = ["  …", *frames[-STACK_LINES:]]
    return [lines[0], *frames, *lines[end:]][:MAX_LINES]
