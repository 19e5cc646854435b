"""Trainer ranks as processes beside one another, for tests that compare them with a single rank.

A test module names itself (`__file__`) as what its ranks run. As `__main__`, it calls `run_rank`.
"""

import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import forkserver
from trireme.base.processes import free_port
from trireme.trainer.parallel.mesh import World, open_world

DEADLINE_S = 300


@dataclass
class Rank:
    process: forkserver.Forked
    log: IO[str]


Ranks = list[Rank]


@contextmanager
def started_ranks(script: str, *arguments: Path, count: int = 2, num_ports: int = 1) -> Iterator[Ranks]:
    """Fork `count` ranks that run `script`, told who they are as torchrun would tell them. PORTS has one for each group
    that they form. None outlives the block."""
    ports = [str(free_port()) for _ in range(num_ports)]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "PORTS": ",".join(ports)}
    ranks = [_start(script, arguments, shared | {"RANK": str(rank)}) for rank in range(count)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.close()
            rank.log.close()


def _start(script: str, arguments: Sequence[Path], told: dict[str, str]) -> Rank:
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `started_ranks` closes it
    argv = [sys.executable, __file__, script, *map(str, arguments)]
    environment = os.environ | told | {"OMP_NUM_THREADS": "1"}
    return Rank(forkserver.popen(argv, output=log.fileno(), env=environment, cwd=Path.cwd()), log)


def require_success(ranks: Ranks) -> None:
    for rank in ranks:
        code = rank.process.wait(DEADLINE_S)
        rank.log.seek(0)
        assert code == 0, rank.log.read()


def results_of(folder: Path, count: int = 2) -> list[Any]:
    return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(count)]


def run_ranks(script: str, *arguments: Path) -> list[Any]:
    """Return what each of two ranks found, which left it in the last of the arguments, a folder."""
    with started_ranks(script, *arguments) as ranks:
        require_success(ranks)
    return results_of(arguments[-1])


def run_rank(work: Callable[..., Any]) -> None:
    """Within a rank: do the work, given the arguments of `run_ranks` and the world of ranks."""
    arguments = [Path(argument) for argument in sys.argv[1:]]
    with open_world("cpu", threads=1, timeout_s=240) as world:
        torch.save(work(*arguments, world), arguments[-1] / f"result_{world.rank}.pt")


def run_stages(stages: Sequence[Any], work: Callable[[Any, World], Any], folder: Path) -> None:
    """Within a rank: do the work of the stages (of a `name` and so many `ranks`) in which it takes part, one by one.

    It waits while others work. `stage_results` returns what the ranks of each stage found.
    """
    rank, ports = int(os.environ["RANK"]), os.environ["PORTS"].split(",")
    for stage, port in zip(stages, ports, strict=True):
        over = folder / f"{stage.name} is over"
        if rank >= stage.ranks:
            give_up = time.monotonic() + DEADLINE_S
            while not over.exists():
                assert time.monotonic() < give_up, f"the ranks of {stage.name!r} were not done within {DEADLINE_S} s"
                time.sleep(0.01)
            continue
        os.environ |= {"WORLD_SIZE": str(stage.ranks), "MASTER_PORT": port}
        with open_world("cpu", threads=1, timeout_s=240, replicas=stage.replicas, cp=stage.cp) as world:
            torch.save(work(stage, world), folder / f"{stage.name}_{world.rank}.pt")
            world.barrier()
        if rank == 0:
            over.touch()


def stage_results(stages: Sequence[Any], folder: Path) -> dict[str, list[Any]]:
    found = {stage.name: range(stage.ranks) for stage in stages}
    files = {name: [folder / f"{name}_{rank}.pt" for rank in ranks] for name, ranks in found.items()}
    return {name: [torch.load(file, weights_only=True) for file in each] for name, each in files.items()}


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)  # as the trainer does, and why, see `run_command`
