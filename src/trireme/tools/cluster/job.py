"""A job of a cluster before and after it is submitted: its options, its script, and its record (`submission.json`).

A submission has a folder next to the run's: `outputs/NAME.submissions/20260102-030405-ab12/`. A folder inside the run's
would be moved aside together with an earlier run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trireme.base.errors import FINAL_EXIT_CODES, ConfigError, TriremeError
from trireme.base.paths import atomic_write
from trireme.base.safe_text import CONTROL
from trireme.config.files import toml_value
from trireme.config.problems import raise_together
from trireme.config.section import Section
from trireme.tools.cluster.nodes import ClusterPlan
from trireme.tools.templates import render

Scheduler = Literal["slurm", "kubernetes"]

RECORD = "submission.json"
RUN_TOML = "run.toml"
NODE_SCRIPT = "node.sh"
TEMPLATES = Path(__file__).parent / "templates"
END_S = 120
"""Seconds before a kill at which the scheduler asks a run to end."""
GRACE_S = 40
"""Seconds for which `node.sh` waits for the processes of its machine to end."""

COMMAND_TIMEOUT_S = 60.0
SECRETS = "secrets.sh"


class SubmitOptions(Section):
    """Flags of `trireme submit` itself. All others are keys of the run."""

    on: Scheduler | None = None
    """Default: the scheduler whose commands are in PATH."""
    dry_run: bool = False
    """Show all that would be submitted; submit nothing."""
    env_file: tuple[Path, ...] = ()
    """More secrets: a file with lines NAME=value. May be repeated."""
    nodes: int | None = None
    """Number of machines. Default: as many as the run's GPUs take."""
    gpus_per_node: int | None = None
    """0 runs on CPUs."""
    inference_nodes: int | None = None
    """Machines for engines. Default: half of them."""
    cpus_per_node: int | None = None
    """Default: all."""
    memory_per_node: str | None = None
    """Such as 500G. Default: all."""
    python: str | None = None
    """Interpreter on the machines. Default: the one that runs this command (Slurm), or the image's (Kubernetes)."""
    time: str | None = None
    """Slurm: time limit, such as 90 (minutes), 12:00:00, 2-00:00:00."""
    partition: str | None = None
    """Slurm. Default: Slurm's own default."""
    account: str | None = None
    """Slurm."""
    qos: str | None = None
    """Slurm."""
    sbatch: tuple[str, ...] = ()
    """Slurm: any other option, such as --sbatch=--constraint=h100. May be repeated."""
    image: str | None = None
    """Kubernetes: an image with trireme and the run's environments; see docker/."""
    volume: str | None = None
    """Kubernetes: an existing volume claim, for the run's folder."""
    namespace: str | None = None
    """Kubernetes. Default: kubectl's own."""

    def check(self, on: Scheduler, num_nodes: int) -> None:
        """Raises: ConfigError with all values that cannot be used."""

        problems = []
        # values become lines of scripts and manifests, which a line end could extend
        for name, value in self:
            for text in value if isinstance(value, tuple) else (value,):
                if CONTROL.search(str(text)):  # the rest of it would be a line of the script
                    problems.append(
                        f"`--{name.replace('_', '-')}` is {toml_value(text)}, with control characters - expected none. "
                        "Remove them."
                    )

        if self.memory_per_node is not None and not re.fullmatch(r"\d+[KMGT]", self.memory_per_node):
            problems.append(
                f"`--memory-per-node {self.memory_per_node}` - expected a number with K, M, G or T. "
                "Write `--memory-per-node 500G`."
            )
        # another run on a shared machine would want the same ports
        if on == "slurm" and num_nodes > 1 and (self.cpus_per_node or self.memory_per_node):
            problems.append(
                f"`--cpus-per-node` or `--memory-per-node` with {num_nodes} machines - a run on several machines takes "
                "whole ones: another run of yours on the same machine would want the same ports. Leave the two out."
            )

        if on == "kubernetes" and not self.dry_run and not (self.image and self.volume):
            problems.append(
                f"`--image {self.image or ''}` and `--volume {self.volume or ''}` - expected both: an image that holds "
                "trireme and the run's environments (`docker/` builds one), and a volume claim for checkpoints, "
                "journal and logs. Write `--image REGISTRY/trireme:TAG --volume CLAIM`."
            )

        raise_together(problems)


@dataclass(frozen=True)
class Job:
    """A run to be submitted. All paths but `folder` are as the machines see them."""

    id: str
    name: str  # the run's name, for people
    plan: ClusterPlan
    run: Path  # the run's folder
    state: Path  # the submission's folder, with a mark for each process that was started
    folder: Path  # the submission's folder, as this machine sees it
    run_toml: str
    python: str | None = None  # the interpreter on the machines; None runs commands by their names
    goes_back: bool = False  # `trainer.ckpt.resume_step` is set: it holds for the first start, and not for restarts
    restarts: int = 5  # restarts of one process in a row, while the run writes no metrics


def node_script(job: Job, *, to_terminal: bool = False, pause_s: int = 5, leave_s: int = 10) -> str:
    """Render `node.sh`, which runs and restarts the processes of one machine: `bash node.sh INDEX ADDRESS...`.

    Slurm and Kubernetes run the same script. It marks each started process on disk, so that a requeued job or a
    replaced pod resumes as well.

    Args:
        to_terminal: also print what the processes print, which goes to the run's `logs/` in any case.
        pause_s: seconds before the first restart. The n-th restart in a row waits n times as long.
        leave_s: seconds that processes left behind by a dead one have to end by themselves.
    """
    return render(
        TEMPLATES,
        NODE_SCRIPT,
        job=job,
        to_terminal=to_terminal,
        pause_s=pause_s,
        leave_s=leave_s,
        grace_s=GRACE_S,
        final_codes=(0, *FINAL_EXIT_CODES),
    )


def call_scheduler(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one of a scheduler's own commands.

    Raises: ConfigError if there is no such command; TriremeError if it did not answer in time.
    """
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            f"there is no `{command[0]}` in PATH - expected the scheduler's commands. Run this on a login node of the "
            "cluster, or install `kubectl`; `--dry-run` shows what would be submitted."
        ) from None
    except subprocess.TimeoutExpired:
        raise TriremeError(
            f"`{shlex.join(command[:2])}` did not answer within {COMMAND_TIMEOUT_S:.0f} s - expected the cluster to "
            "answer. `scontrol ping` and `kubectl cluster-info` say whether Slurm and Kubernetes can be reached."
        ) from None


def submissions_of(run: Path) -> Path:
    """Return the folder of a run's submissions."""
    folder = run.absolute()  # has a name, even if `run` is "."
    return folder.with_name(f"{folder.name}.submissions")


Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w.+-]*\Z")]
"""A name in a scheduler's command line, which must not be taken for an option or for several labels."""


@dataclass(frozen=True)
class Submission:
    """The record of a submission: `submission.json`."""

    id: Word
    scheduler: Scheduler
    job: Word  # Slurm's job number, or the name of the Kubernetes Job
    run: Annotated[str, msgspec.Meta(pattern="^/")]  # the run's folder, as the machines see it
    namespace: Word | None = None
    folder: Path = Path()  # the folder that holds the record; not written to it

    def write(self) -> None:
        record = {key: value for key, value in asdict(self).items() if key != "folder"}
        with atomic_write(self.folder / RECORD) as file:
            file.write(json.dumps(record, indent=1).encode() + b"\n")


def find_submission(run: Path) -> Submission | None:
    """Return a run's newest submission; None for a run that was never submitted.

    Raises: ConfigError for a record that is damaged, or that `trireme submit` did not write.
    """
    records = sorted(submissions_of(run).glob(f"*/{RECORD}"))
    if not records:
        return None
    # names of submissions begin with their time, so the last one is the newest
    record = records[-1]
    try:
        return replace(msgspec.json.decode(record.read_bytes(), type=Submission), folder=record.parent)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{record} cannot be read ({error}) - expected what `trireme submit` wrote. Look for the job with the "
            "scheduler's own commands (`squeue --me`, `kubectl get jobs`)."
        ) from None


def read_env_files(files: Sequence[Path]) -> dict[str, str]:
    """Return the variables of all files. Later files win.

    Raises: ConfigError for a file that is missing, or a line that is not `NAME=value`. Messages contain no values.
    """
    from dotenv.parser import parse_stream

    variables: dict[str, str] = {}

    for file in files:
        try:
            with open(file) as stream:
                bindings = list(parse_stream(stream))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'env_file = "{file}" cannot be read ({getattr(error, "strerror", None) or "no text"}; looked in '
                f"{Path.cwd()}) - expected a file with lines `NAME=value`. Check the path."
            ) from None
        for binding in bindings:
            if binding.key is None and not binding.error:
                continue  # a comment, or an empty line
            # the names become variables of a shell script, so a shell must accept them
            is_name = binding.key is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", binding.key)
            if binding.error or binding.value is None or not is_name:
                raise ConfigError(
                    f"env_file {file}, line {binding.original.line}: not `NAME=value` - expected a name of letters, "
                    "digits and `_`, and a value, in quotes where it holds spaces. Correct the line."
                )
            variables[str(binding.key)] = binding.value
    return variables


def write_secrets(file: Path, variables: Mapping[str, str]) -> None:
    """Write the variables for a shell to read. The file is private from its first byte on."""
    # With O_EXCL and 0o600 no other user can have opened the file, or put a link in its place.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        for name, value in variables.items():
            out.write(f"export {name}={shlex.quote(value)}\n")
