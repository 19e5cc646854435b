"""What ends a command: one message where the user can put it right, a traceback where we have to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trireme.cli.door import run_door
from trireme.cli.rl import rl

ROOT = Path(__file__).parents[2]


def ended_with(
    main: Callable[[list[str]], int | None], monkeypatch: pytest.MonkeyPatch, *argv: str
) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["rl", *argv])
    with pytest.raises(SystemExit) as ended:
        run_door("rl", main)
    return ended.value.code


def test_a_folder_that_cannot_be_made_is_named_without_a_traceback(monkeypatch, capsys, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    example = str(ROOT / "configs" / "reverse-text" / "rl.toml")
    assert ended_with(rl, monkeypatch, "@", example, "--output-dir", str(tmp_path / "file"), "--dry-run") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rl: {tmp_path / 'file'}")
    assert said.count("\n") == 1


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch) -> None:
    def mistaken(_: list[str]) -> int:
        raise OSError("of nobody knows what")

    monkeypatch.setattr("sys.argv", ["rl"])
    with pytest.raises(OSError, match="of nobody knows what"):
        run_door("rl", mistaken)


def test_a_full_disk_behind_standard_output_is_said_without_a_traceback() -> None:
    command = [sys.executable, "-m", "trireme.cli.trireme", "env", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("trireme: what it says cannot be written: No space left on device")
    assert done.stderr.count("\n") == 1
