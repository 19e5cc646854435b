"""What `rl` says to what cannot work: at once, in one message, with exit code 2, and with nothing started."""

import subprocess
from pathlib import Path

import pytest

from real_run import DEADLINE_S, QUICKSTART, REPOSITORY, command


@pytest.mark.parametrize(("flags", "words"), [
    ("--max-stepz 3 --seq-len long", ["2 problems", "--max-steps", "`--seq-len long` - expected integer"]),
    ("--model.name ./nowhere", ["this folder does not exist"]),
    ("--orchestrator.env.0.id revers-text", ["did you mean 'reverse_text'"]),
])  # fmt: skip
def test_a_flag_that_cannot_work_is_refused(flags: str, words: list[str], tmp_path: Path) -> None:
    typed = [command("rl"), "@", QUICKSTART, "--output-dir", str(tmp_path / "run"), *flags.split()]
    ended = subprocess.run(typed, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert [each for each in words if each not in ended.stderr] == []
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
