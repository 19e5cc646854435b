"""What is submitted, whatever to; and the record of it, by which it is found again.

A submission has a folder beside the run's: `outputs/NAME.submissions/20260102-030405-ab12/`. Inside it would be moved
aside with an earlier run.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.config.problems import raise_together
from trireme.tools.cluster.nodes import ClusterPlan

Scheduler = Literal["slurm", "kubernetes"]
RECORD = "submission.json"


@dataclass(frozen=True)
class Job:
    """A run on its way to a cluster. Paths are the machines', `folder` is here."""

    id: str
    name: str  # of the run, for people
    plan: ClusterPlan
    run: Path  # the run's folder
    state: Path  # the submission's folder, where marks of what was started lie
    folder: Path
    run_toml: str
    python: str | None = None  # the interpreter on the machines; commands by their names where not given
    goes_back: bool = False  # `trainer.ckpt.resume_step`: the first start goes back, later ones go on
    restarts: int = 5  # of one process, in a row


@dataclass(frozen=True)
class Resources:
    """Of each machine, and of the whole."""

    time: str | None = None  # as Slurm writes it
    cpus_per_node: int | None = None
    memory_per_node: str | None = None  # "500G"

    def __post_init__(self) -> None:
        raise_together(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        if self.time is not None and seconds_of(self.time) is None:
            yield (
                f"`--time {self.time}` - expected minutes, hours:minutes:seconds or days-hours:minutes:seconds. "
                "For a day and a half write `--time 1-12:00:00`."
            )
        if self.cpus_per_node is not None and self.cpus_per_node < 1:
            yield f"`--cpus-per-node {self.cpus_per_node}` - expected at least 1. Leave it out to take whole machines."
        if self.memory_per_node is not None and not re.fullmatch(r"\d+[KMGT]", self.memory_per_node):
            yield (
                f"`--memory-per-node {self.memory_per_node}` - expected a number with K, M, G or T. "
                "Write `--memory-per-node 500G`."
            )


def seconds_of(limit: str) -> int | None:
    """A limit as Slurm writes it: "90" (minutes), "1:30:00", "2-12" (days and hours), "2-12:30:00"; None where it is
    none."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)):
        return None
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    minutes, seconds = [*numbers, 0][:2]
    return minutes * 60 + seconds


def new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def submissions_of(run: Path) -> Path:
    folder = run.absolute()  # which has a name, where "." has none
    return folder.with_name(f"{folder.name}.submissions")


@dataclass(frozen=True)
class Submission:
    """The record: `submission.json`."""

    id: str
    scheduler: Scheduler
    job: str  # Slurm's number of it, or its name
    run: str  # the run's folder, as the machines see it
    processes: dict[str, int]  # by name: the machine of each
    namespace: str | None = None
    folder: Path = Path()  # where the record lies; not in it

    @property
    def leader(self) -> int:
        """The machine of the orchestrator."""
        return self.processes.get("orchestrator", 0)

    def write(self) -> None:
        record = {key: value for key, value in asdict(self).items() if key != "folder"}
        with atomic_write(self.folder / RECORD) as file:
            file.write(json.dumps(record, indent=1).encode() + b"\n")


def find_submission(run: Path) -> Submission | None:
    """The newest of a run; that of `run` itself where it is a submission's folder; None where it was never submitted.

    Raises: ConfigError where the record is damaged.
    """
    records = [run / RECORD, *sorted(submissions_of(run).glob(f"*/{RECORD}"), reverse=True)]
    newest = next((record for record in records if record.is_file()), None)
    return _read(newest) if newest else None


def _read(record: Path) -> Submission:
    try:
        return Submission(**json.loads(record.read_text()), folder=record.parent)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{record} cannot be read ({error}) - expected what `trireme submit` wrote. Look for the job with the "
            "scheduler's own commands (`squeue --me`, `kubectl get jobs`)."
        ) from None
