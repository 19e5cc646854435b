"""Slurm: one batch job over all machines of a run, as a script, and what is asked of Slurm's own commands.

Ahead of its time limit the job gets SIGTERM. The run then ends in good order, and the job puts itself back into the
queue, where it goes on as `--resume` does.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError, TriremeError
from trireme.tools.cluster.job import Job, Resources, Submission
from trireme.tools.cluster.node_script import NODE_SCRIPT, RUN_TOML, SECRETS
from trireme.tools.cluster.shell import waiting

SCRIPT = "job.sbatch"
CANCELLED = "cancelled"  # a mark: nobody wants the job back
ENDED = "ended"  # holds the exit code
END_S = 120
"""For a run to end in good order before its time is up."""
GRACE_S = 60
ASK_S = 60.0

# srun, asked to end, would kill its task. This signal reaches all processes of a step, and all but `node.sh` ignore it.
_ASK = 'scancel --signal=URG "$SLURM_JOB_ID"'

_START = r"""
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
say() { echo "$(date '+%F %T') job $SLURM_JOB_ID: $*"; }
say "on ${machines[*]}, start $((${SLURM_RESTART_COUNT:-0} + 1))"
all=${#machines[@]}
if ! srun --nodes="$all" --ntasks="$all" --ntasks-per-node=1 test -r "$here/RUN_TOML" </dev/null; then
  say "not every machine sees $here - expected the same folder on all of them, for checkpoints too." \
    "Set \`output_dir\` to a folder of the shared file system."
  exit 2
fi
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
for number in "${!machines[@]}"; do
  srun --nodes=1 --ntasks=1 --nodelist="${machines[$number]}" --cpu-bind=none \
    bash "$here/NODE_SCRIPT" "$number" "${machines[@]}" </dev/null &
  children+=($!)
done
wait_for "$leader"
code=$?
if [ -n "$stopping" ] && [ "$code" != 0 ] && [ ! -e "$here/CANCELLED" ]; then
  if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != RUNNING ]; then
    say "was cancelled, or moved away"
  elif [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    say "its time is up: back into the queue, to go on from there"
    scontrol requeue "$SLURM_JOB_ID" && exit "$code"
  else
    say "its time is up, and it was put back $requeues times (\`--requeues\`). Submit it again with --resume."
  fi
fi
[ "$code" != 0 ] || rm -f "$here/SECRETS"
echo "$code" >"$here/ENDED"
say "ends with exit code $code"
exit "$code"
"""


@dataclass(frozen=True)
class Options:
    """What only Slurm has."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    more: Sequence[str] = ()  # options of sbatch as they are written there: "--constraint=h100"
    requeues: int = 20


def batch_script(job: Job, resources: Resources, options: Options, *, workdir: Path) -> str:
    lines = [f"#SBATCH {option}" for option in _options(job, resources, options, workdir)]
    settings = [f"here={shlex.quote(str(job.state))}", f"leader={job.plan.leader}", f"requeues={options.requeues}"]
    return "\n".join(["#!/usr/bin/env bash", *lines, "", *settings, "", waiting(_ASK, GRACE_S), _named(_START)])


def _named(script: str) -> str:
    names = {"RUN_TOML": RUN_TOML, "NODE_SCRIPT": NODE_SCRIPT, "CANCELLED": CANCELLED, "SECRETS": SECRETS}
    for name, value in (names | {"ENDED": ENDED}).items():
        script = script.replace(name, value)
    return script


def _options(job: Job, resources: Resources, options: Options, workdir: Path) -> list[str]:
    num_nodes, gpus = len(job.plan.nodes), job.plan.gpus_per_node
    return [
        f"--job-name={_word(job.name)}",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *_share(resources),
        *([f"--time={resources.time}"] if resources.time else []),
        *(
            f"--{name}={value}"
            for name in ("partition", "account", "qos")
            if (value := getattr(options, name)) is not None
        ),
        "--requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{END_S}",
        f"--chdir={_path(workdir)}",
        f"--output={_path(job.state)}/slurm-%j.log",
        *options.more,
    ]


def _share(resources: Resources) -> list[str]:
    """Machines are taken whole, unless somebody says how much of one is enough."""
    if resources.cpus_per_node is None and resources.memory_per_node is None:
        return ["--exclusive", "--mem=0"]
    cpus = [f"--cpus-per-task={resources.cpus_per_node}"] if resources.cpus_per_node else []
    return cpus + ([f"--mem={resources.memory_per_node}"] if resources.memory_per_node else [])


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name) or "trireme"


def _path(path: Path) -> str:
    """`%` begins a pattern of Slurm's, and a blank ends the option."""
    return shlex.quote(str(path).replace("%", "%%"))


# Slurm's own commands


def is_here() -> bool:
    return shutil.which("sbatch") is not None


def check_submission(script: str) -> str:
    """Asks Slurm whether it would take the job, and when it would start. Submits nothing.

    Raises: ConfigError with its answer where it would not.
    """
    return _sbatch(["--test-only"], script).replace("sbatch: ", "").strip()


def submit(script: Path) -> str:
    """Returns: Slurm's number of the job."""
    return _sbatch(["--parsable"], script.read_text()).strip().partition(";")[0]


def _sbatch(options: list[str], script: str) -> str:
    """By its standard input, which a dry run has too."""
    if not is_here():
        raise ConfigError(
            "there is no `sbatch` in PATH - expected Slurm's commands, to submit with. Run this on a login node of the "
            "cluster, or see what would be submitted with `--dry-run`."
        )
    answer = _run(["sbatch", *options], script)
    if answer.returncode:
        raise ConfigError(_refused(answer.stderr))
    return answer.stdout + answer.stderr


def _refused(said: str) -> str:
    words = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines() if line)
    advice = "`sinfo` shows what the cluster has."
    if "controller" in words or "configuration source" in words:
        advice = "`scontrol ping` says whether Slurm's controller can be reached from here."
    elif "partition" in words.lower():
        advice = f"Choose one with `--partition`: {', '.join(_partitions()) or 'none is known'}."
    elif "node configuration" in words.lower():
        have = "; ".join(_machines())
        advice = f"Change `--nodes`, `--gpus-per-node` or `--partition`. The cluster has (machines, GPUs): {have}."
    return f"Slurm does not take the job: {words} - expected a job that the cluster can run. {advice}"


def _partitions() -> list[str]:
    return [name.rstrip("*") for name in _run(["sinfo", "--noheader", "--format=%P"]).stdout.split()]


def _machines() -> list[str]:
    return _run(["sinfo", "--noheader", "--format=%P %D x %G"]).stdout.splitlines()


def state_of(submission: Submission) -> str:
    """ "RUNNING on n[1-2]", "PENDING (Priority)", "COMPLETED", …; what is on disk where Slurm knows it no more."""
    if not is_here():
        return f"job {submission.job}; Slurm's commands are not in PATH here"
    row = _run(["squeue", "--noheader", "--jobs", submission.job, "--format=%T|%R"]).stdout.strip()
    if row:
        state, _, where = row.partition("|")
        return f"{state} {where}" if where.startswith("(") else f"{state} on {where}"
    return _state_shown(submission.job) or _state_accounted(submission.job) or _state_on_disk(submission.folder)


def _state_shown(job: str) -> str | None:
    found = re.search(r"JobState=(\w+)", _run(["scontrol", "show", "job", job]).stdout)
    return found[1] if found else None


def _state_accounted(job: str) -> str | None:
    if not shutil.which("sacct"):
        return None
    lines = _run(["sacct", "--noheader", "-X", "--jobs", job, "--format=State%40"]).stdout.splitlines()
    return lines[-1].strip() if lines else None


def _state_on_disk(folder: Path) -> str:
    try:
        return f"ended with exit code {(folder / ENDED).read_text().strip()}"
    except OSError:
        return "not known to Slurm any more"


def machines_of(submission: Submission) -> list[str]:
    """Those of a job that runs."""
    listed = _run(["squeue", "--noheader", "--jobs", submission.job, "--format=%N"]).stdout.strip() if is_here() else ""
    return _run(["scontrol", "show", "hostnames", listed]).stdout.split() if listed else []


def cancel(submission: Submission) -> None:
    """Its secrets go with it.

    Raises: TriremeError with Slurm's answer.
    """
    (submission.folder / CANCELLED).touch()
    answer = _run(["scancel", submission.job])
    if answer.returncode:
        raise TriremeError(
            f"`scancel {submission.job}` did not work: {answer.stderr.strip()} - expected a job of yours. "
            "`squeue --me` shows them."
        )
    (submission.folder / SECRETS).unlink(missing_ok=True)


def logs_of(submission: Submission) -> list[Path]:
    """What the job itself said: steps, and what became of processes."""
    return sorted(submission.folder.glob("slurm-*.log"))


def _run(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=ASK_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no `{command[0]}` in PATH - expected Slurm's commands. Run this on a login node of the cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise TriremeError(
            f"`{command[0]}` has not answered for {ASK_S:.0f} s - expected Slurm's controller to. "
            "`scontrol ping` says whether it is up."
        ) from None
