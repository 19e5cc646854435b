"""Trainer ranks as processes beside one another, for tests that compare them with a single rank.

A test module names itself (`__file__`) as what its ranks run. As `__main__`, it calls `run_rank`.
"""

import os
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is run as a script, too

from support.processes import forkserver
from trireme.base.processes import free_port
from trireme.config.trainer import TrainerModel
from trireme.trainer.parallel.mesh import open_world

DEADLINE_S = 300


def run_ranks(script: str, *arguments: Path, count: int = 2, ends_with: int = 0) -> list[Any]:
    """Fork ranks that run `script`. Return what each of them found, which it left in the last argument, a folder.

    Args:
        ends_with: the exit code of all of them. Those that fail find nothing.
    """
    argv, folder = [sys.executable, __file__, script, *map(str, arguments)], arguments[-1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    with ExitStack() as stack:
        for rank in range(count):
            environment = os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}
            log = stack.enter_context(open(folder / f"log_{rank}", "w"))
            processes.append(forkserver.popen(argv, output=log.fileno(), env=environment, cwd=Path.cwd()))
            stack.callback(processes[-1].close)
        for rank, process in enumerate(processes):
            assert process.wait(DEADLINE_S) == ends_with, (folder / f"log_{rank}").read_text()
    found = [] if ends_with else range(count)
    return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in found]


def run_rank(work: Callable[..., Any], *, timeout_s: float = 240, replicas: int = 1, cp: int = 1) -> None:
    """Within a rank: do the work, given the arguments of `run_ranks` and the world of ranks."""
    arguments = [Path(argument) for argument in sys.argv[1:]]
    model = TrainerModel(dp_replicate=replicas, cp=cp)
    with open_world("cpu", model, threads=1, timeout_s=timeout_s) as world:
        torch.save(work(*arguments, world), arguments[-1] / f"result_{world.rank}.pt")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)  # as the trainer does, and why, see `run_command`
