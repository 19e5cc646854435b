"""Several trainer ranks below one process: how they fail is how it fails, and none is left without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stage import DEADLINE_S, until
from trireme.launch.descendants import read_process

DOOR = """
import os, signal, sys, time
from pathlib import Path
from trireme.base.errors import ConfigError
from trireme.cli.door import become_ranks, end_with_parent, rank, run_door

def main(argv):
    end_with_parent()
    become_ranks(2, "door", Path("run.json"))
    Path(f"pid_{rank()}").write_text(str(os.getpid()))
    while not all(Path(f"pid_{n}").exists() for n in range(2)):
        time.sleep(0.02)
    if rank() == 1 and Path("refuse").exists():
        raise ConfigError("no")
    time.sleep(600 if not Path("leave").exists() else 0)

if __name__ == "__main__":
    run_door("door", main)
"""


class Group:
    """A process that becomes two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "door.py").write_text(DOOR)
        with open(folder / "log", "wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "door"],
                cwd=folder,
                env=os.environ | {"TRIREME_PARENT": str(os.getpid()), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def ranks(self) -> list[int]:
        until(lambda: all((self.folder / f"pid_{n}").exists() for n in range(2)))
        time.sleep(0.1)  # what is in the files
        return [int((self.folder / f"pid_{n}").read_text()) for n in range(2)]

    def alive(self) -> list[int]:
        found = (read_process(pid) for pid in self.ranks())
        return [process.pid for process in found if process is not None and not process.zombie]


@pytest.mark.parametrize(("wish", "code"), [("refuse", 2), ("leave", 0)])
def test_a_rank_that_refuses_its_configuration_makes_the_whole_group_refuse(
    tmp_path: Path, wish: str, code: int
) -> None:
    (tmp_path / wish).touch()
    group = Group(tmp_path)
    assert group.popen.wait(DEADLINE_S) == code, (tmp_path / "log").read_text()
    assert group.alive() == []


def test_a_killed_rank_ends_the_group_with_1_and_names_it(tmp_path: Path) -> None:
    group = Group(tmp_path)
    os.kill(group.ranks()[1], signal.SIGKILL)
    assert group.popen.wait(DEADLINE_S) == 1
    assert group.alive() == []
    assert "ranks failed, the others were stopped. Exit codes: rank 1: -9" in (tmp_path / "log").read_text()


def test_ranks_do_not_outlive_the_process_that_started_them(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.ranks()
    group.popen.kill()
    group.popen.wait(DEADLINE_S)
    until(lambda: group.alive() == [])


def test_a_group_that_is_asked_to_end_ends_its_ranks_first(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.ranks()
    group.popen.terminate()
    assert group.popen.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert group.alive() == []
