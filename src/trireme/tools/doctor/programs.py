"""Programs that the doctor starts: they end in time, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trireme.base.processes import die_with_parent

LEAVE_S = 20.0  # between SIGTERM and SIGKILL
LAST = 12  # lines


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int | None  # None where it took too long, and was ended
    output: str
    said: str  # beside its output

    @property
    def last_words(self) -> str:
        lines = [line.rstrip() for line in (self.said or self.output).splitlines() if line.strip()]
        return "\n".join(lines[-LAST:])

    @property
    def how(self) -> str:
        if self.code is None:
            return "was ended: it took too long"
        if self.code >= 0:
            return f"ended with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"

    @property
    def answer(self) -> dict[str, Any] | None:
        """The last line of its output, where that is an object of JSON."""
        lines = self.output.strip().splitlines()
        with suppress(ValueError, IndexError):
            found = json.loads(lines[-1])
            return found if isinstance(found, dict) else None
        return None


class Program:
    """One of our modules, started with this interpreter."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def wait(self, limit_s: float) -> Ended:
        try:
            output, said = self._process.communicate(timeout=limit_s)
            return Ended(self._process.returncode, output, said)
        except subprocess.TimeoutExpired:
            return Ended(None, *self._end_reading())
        finally:
            self.end()

    def _end_reading(self) -> tuple[str, str]:
        """Asks it to end, so that it can end what it started; returns what it said until then."""
        for ask in (self._process.terminate, self._kill):
            ask()
            with suppress(subprocess.TimeoutExpired):
                return self._process.communicate(timeout=LEAVE_S)
        return "", ""

    def end(self) -> None:
        """Whatever is left of it. Nothing happens where it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_program(
    module: str, arguments: Sequence[str] = (), *, limit_s: float, env: Mapping[str, str] | None = None
) -> Ended:
    return Program(module, *arguments, env=env).wait(limit_s)
