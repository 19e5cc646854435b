"""`node.sh`: what one machine of a run does. The same for Slurm and Kubernetes, which only say how it is started:
`bash node.sh INDEX ADDRESS...`, with the addresses of all machines in their order.

Each process is kept alone, as `rl` does on one machine: one that dies is started again with `--resume`, unless its exit
code says that trying again is no use. A mark on disk says that it was started before, so that a job that was put back
into the queue, or a pod that took another's place, goes on too.
"""

from __future__ import annotations

import shlex

from trireme.base.errors import FINAL_EXIT_CODES
from trireme.config.files import ProcessName
from trireme.tools.cluster.job import Job
from trireme.tools.cluster.nodes import Node, Placed
from trireme.tools.cluster.shell import waiting

SECRETS = "secrets.sh"
RUN_TOML = "run.toml"
NODE_SCRIPT = "node.sh"
GRACE_S = 40
_ORDER: tuple[ProcessName, ...] = ("inference", "orchestrator", "trainer")

_KEEP = r"""
say() { echo "$(date '+%F %T') machine $index ($(hostname)): $*"; }

progress() { stat -c %s "$run/metrics.jsonl" 2>/dev/null; }

# end_rest_of PID: what a dead process has left behind (an engine's core, say) would hold its GPUs.
end_rest_of() {
  local tenths
  for ((tenths = 0; tenths < LEAVE_S * 10; tenths++)); do
    kill -0 -- "-$1" 2>/dev/null || return
    sleep 0.1
  done
  kill -KILL -- "-$1" 2>/dev/null
}

# keep NAME RESTARTS COMMAND...: starts a process, and again where it dies and trying again may help.
keep() {
  local name=$1 limit=$2 tries=0 stop= child=0 code before again
  shift 2
  trap 'stop=yes; [ "$child" = 0 ] || kill -TERM "$child" 2>/dev/null' TERM
  while [ -z "$stop" ]; do
    again=()
    if was_started "$name"; then again=("${go_on[@]}"); fi
    [ -e "$state/started.$name" ] || : >"$state/started.$name"
    before=$(progress)
    set -m # a process group of its own
    run_process "$name" "$@" ${again[@]+"${again[@]}"} </dev/null &
    child=$!
    set +m
    exit_of "$child"
    code=$?
    end_rest_of "$child"
    case $code in FINAL) exit "$code" ;; esac
    [ -z "$stop" ] || exit "$code"
    [ "$(progress)" = "$before" ] || tries=0
    tries=$((tries + 1))
    say "$name died with exit code $code"
    tail -n 20 "$run/logs/$name.stdout" 2>/dev/null | sed 's/^/    /'
    [ "$tries" -le "$limit" ] || exit "$code"
    say "$name is started again ($tries of $limit without a step between them)"
    sleep $((tries * PAUSE_S)) &
    child=$!
    wait "$child"
  done
  exit 143
}

start() {
  say "starts $1"
  keep "$@" &
  children+=($!)
}
"""

_END = r"""
wait_for 0
code=$?
if [ -n "${beside:-}" ]; then
  kill "$beside" 2>/dev/null
  exit_of "$beside"
fi
say "ends with exit code $code"
exit "$code"
"""


def node_script(job: Job, *, to_terminal: bool = False, pause_s: int = 5, leave_s: int = 10) -> str:
    """
    Args:
        to_terminal: what processes print is shown as well, not only in the run's `logs/`.
        pause_s: before a process is started again; each further time in a row it is longer by as much.
        leave_s: how long what a process has left behind may take to end by itself.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# One machine of the run: bash node.sh INDEX ADDRESS... (the addresses of all machines, in order)",
            *_settings(job),
            "",
            *_was_started(job),
            *_run_process(job, to_terminal=to_terminal),
            "",
            waiting('kill -TERM "${children[@]}"', GRACE_S),
            _keep(pause_s, leave_s),
            'mkdir -p "$run/logs" "$state" || exit 2',
            "case $index in",
            *(line for node in job.plan.nodes for line in _starts(job, node)),
            "esac",
            _END.lstrip("\n"),
        ]
    )


def _keep(pause_s: int, leave_s: int) -> str:
    final = " | ".join(map(str, (0, *FINAL_EXIT_CODES)))
    return _KEEP.replace("FINAL", final).replace("PAUSE_S", str(pause_s)).replace("LEAVE_S", str(leave_s))


def _settings(job: Job) -> list[str]:
    go_back = ["--trainer.ckpt.resume-step", "none"] if job.goes_back else []
    return [
        "index=$1",
        "shift",
        'here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        f"run={shlex.quote(str(job.run))}",
        f"state={shlex.quote(str(job.state))}",
        f"go_on=({shlex.join(['--resume', *go_back])})",
        *([] if job.plan.is_single else [f"hosts=({_hosts(job)})"]),
        f'[ ! -r "$here/{SECRETS}" ] || . "$here/{SECRETS}"',
    ]


def _hosts(job: Job) -> str:
    """`[hosts]` as flags; `$1` is the first machine's address."""
    addresses = {room: " ".join(f'"${{{index + 1}}}"' for index in job.plan.machines_of(room)) for room in _ORDER}
    return " ".join(f"--hosts.{room} {listed}" for room, listed in addresses.items())


def _was_started(job: Job) -> list[str]:
    """`rl` refuses to go on where it had not come to writing anything; an older file is that of an earlier run."""
    mark = '"$state/started.$1"'
    written = f' && [ "$run/configs/run.json" -nt {mark} ]' if job.plan.is_single else ""
    return [f"was_started() {{ [ -e {mark} ]{written}; }}"]


def _run_process(job: Job, *, to_terminal: bool) -> list[str]:
    """`rl` shows how the run goes, and keeps logs of its processes by itself."""
    to = ""
    if not job.plan.is_single:
        log = '"$run/logs/$name.stdout"'
        to = f" > >(tee -a {log}) 2>&1" if to_terminal else f" >>{log} 2>&1"
    return ["", "run_process() {", "  local name=$1", "  shift", f'  exec "$@"{to}', "}"]


def _starts(job: Job, node: Node) -> list[str]:
    if job.plan.is_single:
        return [f"{node.index})", f'  start rl 0 {_command(job, "rl")} @ "$here/{RUN_TOML}"', "  ;;"]
    lines = [f"{node.index})", *(f"  {_start(job, process)}" for process in node.processes)]
    if node.index == job.plan.leader:
        lines += [f"  {_follow(job)} &", "  beside=$!"]
    return [*lines, "  ;;"]


def _start(job: Job, process: Placed) -> str:
    place = "" if process.room == "orchestrator" else f"env TRIREME_NODE={process.place} "
    gpus = f" --{process.room}-gpu-ids {' '.join(map(str, process.gpus))}" if process.gpus else ""
    return (
        f"start {job.plan.name_of(process)} {job.restarts} {place}{_command(job, process.room)} "
        f'@ "$here/{RUN_TOML}" "${{hosts[@]}}"{gpus}'
    )


def _command(job: Job, room: str) -> str:
    return f"{shlex.quote(job.python)} -m trireme.cli.{room}" if job.python else room


def _follow(job: Job) -> str:
    """Steps as they come, in the job's log; and to Weights & Biases, where the run wants that."""
    trireme = f"{shlex.quote(job.python)} -m trireme.cli.trireme" if job.python else "trireme"
    return f'{trireme} status "$run" --follow --mirror'
