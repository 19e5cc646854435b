"""Programs that the doctor starts: they end within a limit, and leave no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trireme.base.processes import die_with_parent

LEAVE_S = 20.0  # between SIGTERM and SIGKILL
LAST_LINES = 12


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    code: int | None  # None if it exceeded its limit, and was ended
    output: str
    errors: str

    @property
    def last_lines(self) -> str:
        lines = [line.rstrip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])

    @property
    def how(self) -> str:
        if self.code is None:
            return "was ended: it took too long"
        return f"ended with code {self.code}" if self.code >= 0 else f"was killed by {signal.Signals(-self.code).name}"

    def read_json(self, *, last_line: bool = False) -> dict[str, Any] | None:
        """Return the object of JSON that it printed, as its last line or as the whole of its output."""
        with suppress(ValueError, IndexError):
            found = json.loads(self.output.strip().splitlines()[-1] if last_line else self.output)
            return found if isinstance(found, dict) else None
        return None


class Program:
    """One of our modules, started with this interpreter in a process group of its own."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
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
            output, errors = self._process.communicate(timeout=limit_s)
            return Ended(self._process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            self.end()
            return Ended(None, *self._process.communicate())
        finally:
            self.end()

    def end(self) -> None:
        """Ask the program to end, so that it can end what it has started, then kill what is left of its group."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
