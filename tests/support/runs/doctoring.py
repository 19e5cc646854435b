"""A case for the doctor, and what it finds."""

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.tools.doctor.doctor import command as doctor
from trireme.tools.doctor.finding import Case, Finding

ENVIRONMENT = ["--orchestrator.env", '[{"id": "reverse-text"}]']


def build_case(folder: Path, words: str = "", devices: Devices | None = None) -> Case:
    """Build a case from flags, with all else that a run needs."""
    devices = devices or Devices(cores=2)
    typed, _ = load_run_config([*ENVIRONMENT, "--output-dir", str(folder), *words.split()], program="rl")
    return Case(typed, resolve(typed, devices), devices, is_given=True, folder=folder / "doctor")


def expect(found: Iterable[Finding], verdict: str, *words: str) -> Finding:
    """Expect a single finding with these words, and return it."""
    (finding,) = found
    assert finding.verdict == verdict, finding
    assert [part for part in words if part not in f"{finding.found} {finding.fix}"] == [], finding
    return finding


def diagnosed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit code, and the answers by check."""
    capsys.readouterr()
    code = doctor([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] == (code == 0)
    names = {answer["name"]: None for answer in report["answers"]}
    return code, {name: [answer for answer in report["answers"] if answer["name"] == name] for name in names}


@contextmanager
def taken_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before have just been closed
        taken.bind((host, port))
        taken.listen()
        yield taken.getsockname()[1]
