"""Trainer ranks as processes beside one another, for tests that compare them with a single rank."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar

import forkserver
from trireme.base.processes import free_port

DEADLINE_S = 300


@dataclass
class Rank:
    process: forkserver.Forked
    log: IO[str]


Ranks = list[Rank]


@contextmanager
def started_ranks(script: str | None, *arguments: Path, count: int = 2, num_ports: int = 1) -> Iterator[Ranks]:
    """Fork `count` ranks that run `script`, told who they are as torchrun would tell them. PORTS has one for each group
    that they form. None outlives the block."""
    assert script is not None, "a test's own module always has a file"
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
    argv = [sys.executable, script, *map(str, arguments)]
    environment = os.environ | told | {"OMP_NUM_THREADS": "1"}
    return Rank(forkserver.popen(argv, output=log.fileno(), env=environment, cwd=Path.cwd()), log)


def require_success(ranks: Ranks) -> None:
    """Wait for all of them."""
    for rank in ranks:
        code = rank.process.wait(DEADLINE_S)
        rank.log.seek(0)
        assert code == 0, rank.log.read()


# within a rank


class Stage(Protocol):
    """Something that the first of the ranks do together."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...


AnyStage = TypeVar("AnyStage", bound=Stage)


def stages_of_this_rank(stages: Sequence[AnyStage], folder: Path) -> Iterator[AnyStage]:
    """Those in which it takes part, one after the other; during the rest it waits, for who does it."""
    rank, ports = int(os.environ["RANK"]), os.environ["PORTS"].split(",")
    for stage, port in zip(stages, ports, strict=True):
        over = folder / stage.name / "over"
        if rank >= stage.ranks:
            _wait_for(over, stage.name)
            continue
        os.environ |= {"WORLD_SIZE": str(stage.ranks), "MASTER_PORT": port}
        yield stage
        if rank == 0:
            over.touch()


def _wait_for(path: Path, stage: str) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the ranks of {stage!r} were not done within {DEADLINE_S} s: {path} is not there")
        time.sleep(0.02)
