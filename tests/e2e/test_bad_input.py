"""What `rl` says to what cannot work: at once, in one message, with exit code 2, and with nothing started."""

import socket
import subprocess
from pathlib import Path

import pytest

from real_run import DEADLINE_S, QUICKSTART, REPOSITORY, command, started

RAISES_ON_LOAD = """
def load_environment(**args):
    raise FileNotFoundError("the word list has not been downloaded")
"""


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            ["--max-stepz", "3", "--seq-len", "long"],
            ["2 problems", "--max-steps", "`--seq-len long` - expected integer"],
        ),
        (["--orchestrator.env.0.id", "revers-text"], ["did you mean 'reverse_text'"]),
    ],
)
def test_a_flag_that_cannot_work_is_refused(flags: list[str], messages: list[str], tmp_path: Path) -> None:
    said = refused(*flags, folder=tmp_path)
    assert [message for message in messages if message not in said] == []


def test_a_port_in_use_is_named_with_its_purpose(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused("--inference.server.port", str(port), folder=tmp_path)
    assert f"port {port} on 127.0.0.1 is in use, wanted for the inference server (inference.server.port)" in message


def refused(*arguments: str | Path, folder: Path) -> str:
    """What `rl` writes to standard error. Nothing is left in its folder but the empty folder itself."""
    run = folder / "run"
    typed = [command("rl"), "@", QUICKSTART, "--output-dir", str(run), *map(str, arguments)]
    ended = subprocess.run(typed, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert "Traceback" not in ended.stderr
    assert not run.exists()
    return ended.stderr


def test_an_environment_that_fails_to_load_ends_the_run_with_its_words(tmp_path: Path) -> None:
    """Only the processes themselves can find that out; they all end."""
    environment = tmp_path / "forgetful.py"
    environment.write_text(RAISES_ON_LOAD)
    flags = ["--orchestrator.env.0.id", environment, "--orchestrator.env.0.args", "{}"]
    with started("rl", "@", QUICKSTART, "--output-dir", tmp_path / "run", *flags, log=tmp_path / "rl.log") as rl:
        assert rl.wait() == 2, rl.tail()
        assert rl.left() == []
        assert "forgetful" in rl.output
        assert "FileNotFoundError: the word list has not been downloaded" in rl.output
