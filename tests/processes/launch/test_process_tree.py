"""No process outlives its group, and orphans are known."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.stage import (
    COOPERATE,
    DEADLINE_S,
    GRACE_S,
    SLEEP,
    launch,
    until,
)
from trireme.launch.process_tree import Descendants, Process, read_process, read_processes


def test_processes_tied_to_a_killed_launcher_die_without_the_guard(stage):
    tied = f"import pathlib; pathlib.Path({str(stage.folder / 'tied')!r}).touch(); import time; {SLEEP}"
    grandchild = f"from trireme.base.processes import die_with_parent; die_with_parent(); {tied}"
    bodies = dict.fromkeys(("inference", "trainer"), COOPERATE + SLEEP)
    code = f"{COOPERATE}grandchild({grandchild!r}, start_new_session=True)\n{SLEEP}"
    launcher = launch(stage, GRACE_S, orchestrator=code, **bodies)
    until(lambda: len(stage.pids()) == 4 and (stage.folder / "tied").exists())
    children = [process.pid for process in read_processes().values() if process.parent == launcher.pid]
    (guard,) = [pid for pid in children if b"process_tree.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(guard, signal.SIGKILL)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    until(lambda: stage.alive() == [])


RANKS = """
import os, time
from pathlib import Path
from trireme.base.errors import ConfigError
from trireme.cli.command import run_command
from trireme.launch.ranks import become_ranks, end_with_parent, rank

def main(argv):
    end_with_parent()
    become_ranks(2, ["door"])
    Path(f"pid_{rank()}").write_text(str(os.getpid()))
    while not all(Path(f"pid_{n}").exists() for n in range(2)):
        time.sleep(0.02)
    if rank() == 1 and Path("refuse").exists():
        raise ConfigError("no")
    time.sleep(600)

if __name__ == "__main__":
    run_command("door", main)
"""


@pytest.mark.parametrize(
    ("wish", "end", "code", "told"),
    [
        ("refuse", None, 2, ""),
        ("", lambda group, ranks: os.kill(ranks[1], signal.SIGKILL), 1, "stopped. Exit codes: rank 1: -9"),
        ("", lambda group, ranks: group.terminate(), 128 + signal.SIGTERM, ""),
        ("", lambda group, ranks: group.kill(), -signal.SIGKILL, ""),
    ],
)
def test_no_rank_outlives_its_group_however_it_ends(tmp_path, wish, end, code, told):
    (tmp_path / "door.py").write_text(RANKS)
    (tmp_path / (wish or "sleep")).touch()
    environment = os.environ | {"TRIREME_PARENT": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        command = [sys.executable, "-m", "door"]
        group = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    files = [tmp_path / f"pid_{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    ranks = [int(file.read_text()) for file in files]
    if end:
        end(group, ranks)
    assert group.wait(DEADLINE_S) == code, (tmp_path / "log").read_text()
    patience_s = DEADLINE_S if code == -signal.SIGKILL else 0  # without it they take a moment
    until(lambda: all(process is None or process.zombie for process in map(read_process, ranks)), patience_s)
    assert told in (tmp_path / "log").read_text()


def test_descendants_are_recorded_as_long_as_they_live_orphans_too():
    """Sandboxes start many short-lived processes; each end and restart looks at all that are recorded."""
    worker, tool, orphan = (Process(10**8 + n, n, parent, 10**8, "S", "") for n, parent in enumerate((1, 10**8, 10**8)))
    before = {process.pid: process for process in (worker, tool, orphan)}
    after = {process.pid: process for process in (worker, orphan._replace(parent=1, session=7))}
    record = Descendants()
    record.add(worker.pid, worker.start)
    assert [len(record.scan(table)) for table in (before, after)] == [2, 0]
    assert [process.pid for process in record.members(before)] == [worker.pid, orphan.pid]
