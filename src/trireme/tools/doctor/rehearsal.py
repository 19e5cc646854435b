"""Checks that start programs of their own: torch on each device, a collective of two processes, the environments with
nonsense for answers, and three steps of the run itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.network import interface_of, is_here, is_loopback, numeric
from trireme.base.processes import die_with_parent, free_port, last_lines
from trireme.config.files import write_run
from trireme.config.orchestrator import Buffer, Environment, Filters
from trireme.config.resolve import resolve, updated
from trireme.config.rules import problems
from trireme.config.run import Console, Hosts, Ports, RunConfig, Supervisor
from trireme.config.trainer import Checkpoints
from trireme.monitor.metrics import read_metrics
from trireme.tools.audit.audit import audit_run
from trireme.tools.doctor.machine import INSTALL
from trireme.tools.doctor.report import Case, Finding, about, ok, problem, skipped, warning

TORCH_S, COLLECTIVE_S = 300.0, 120.0
ENVIRONMENT_S = 900.0  # with the installation of its packages
EXAMPLES, ROLLOUTS = 2, 2
STEPS, GROUPS, STEP_S = 3, 2, 120.0
LONGEST_TURN = 64  # tokens
DISK_S = 30.0
LOG_LINES = 8
MUCH_TAKEN = 0.1  # of a GPU's memory, by others
NAMES = "Can the machine's own name be resolved? `getent hosts $(hostname)`; GLOO_SOCKET_IFNAME=lo takes loopback."

LEAVE_S = 20.0  # between SIGTERM and SIGKILL
LAST_LINES = 12


def check_torch(case: Case) -> Iterator[Finding]:
    ended = Program("trireme.tools.doctor.torch_check").wait(TORCH_S)
    facts = ended.read_json(last_line=True)
    if facts is None:
        yield problem(f"torch does not load: the program {ended.how}. Its last lines:\n{ended.last_lines}", INSTALL)
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA"
    said = f"torch {facts['torch']} ({build}) with {facts['threads']} threads"
    if facts["computes"]:
        yield ok(f"{said} computes a known product and its gradient", **facts)
    else:
        yield problem(f"{said}: a known product comes out wrong - expected it to the bit", INSTALL, **facts)
    yield from check_gpus(facts, case)


def check_gpus(facts: dict[str, Any], case: Case) -> Iterator[Finding]:
    gpus, visible = facts["gpus"], case.devices.num_gpus
    if len(gpus) != visible:
        say = problem if case.config.device == "cuda" else warning
        fix = f"`nvidia-smi` says whether the driver works; in a container, `--gpus all`. {INSTALL}"
        yield say(f"{visible} GPUs are visible, torch finds {len(gpus)} - expected all of them", fix)
    for number, gpu in enumerate(gpus):
        gib = 1 << 30
        said = f"GPU {number}: {gpu['name']}, {gpu['memory'] / gib:.0f} GiB, {gpu['free'] / gib:.0f} of them free"
        if not gpu["computes"]:
            said += "; a known product comes out wrong - expected it to the bit"
            yield problem(said, "Look at `nvidia-smi -q -d ECC`; leave this GPU out.")
        elif gpu["free"] < (1 - MUCH_TAKEN) * gpu["memory"]:
            yield warning(f"{said} - expected most of it", "`nvidia-smi` shows the process that holds it; end it.")
        elif float(gpu["capability"]) < 8:
            said += f", compute capability {gpu['capability']} - expected 8.0 or more for bfloat16"
            yield warning(said, 'Write `dtype = "float16"` under `[inference.model]`, or take another GPU.')
        else:
            yield ok(said)


def check_collectives(case: Case) -> Iterator[Finding]:
    """Add as ranks do and send as weights travel, for each kind of collective that the run uses. Every run uses gloo,
    for checkpoints and barriers."""
    trainer, engines = case.config.trainer_gpu_ids or (), case.config.inference_gpu_ids or ()
    pair = tuple(dict.fromkeys((*trainer[:1], *engines[-1:])))
    gpus = pair if len(pair) == 2 else trainer[:2]
    yield about("gloo", run_pair("gloo", case, ()))
    if len(gpus) == 2 and max(gpus) >= case.devices.num_gpus:
        yield skipped(f"nccl: GPUs {', '.join(map(str, gpus))} are not here")
    elif len(gpus) == 2:
        yield about("nccl", run_pair("nccl", case, gpus))


def run_pair(kind: str, case: Case, gpus: tuple[int, ...]) -> Finding:
    """Start two processes that meet at the address by which this machine is known to the others of the run."""
    address = numeric(next((host for host in case.config.hosts.all if is_here(host)), "127.0.0.1"))
    env = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(address)), "WORLD_SIZE": "2"}
    env |= {"TRIREME_DOCTOR_STORE": str(free_port(address))}
    env |= {"CUDA_VISIBLE_DEVICES": ",".join(case.devices.gpus[gpu] for gpu in gpus)}
    if not is_loopback(address) and (interface := interface_of(address)):
        env |= {name: os.environ.get(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with ExitStack() as stack:
        programs = []
        for rank in range(2):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank if gpus else 0)}
            programs.append(Program("trireme.tools.doctor.collective_check", kind, env=env | own))
            stack.callback(programs[-1].end)
        ended = [program.wait(COLLECTIVE_S) for program in programs]
    figures = ended[0].read_json(last_line=True)
    if figures is None or any(each.code != 0 for each in ended):
        bad = next(each for each in ended if each.code != 0)
        fix = NAMES if kind == "gloo" else "`NCCL_DEBUG=INFO trireme doctor --only collectives` says where it stops."
        lines = "\n".join(dict.fromkeys(each.last_lines for each in ended if each.code != 0))
        return problem(f"one of two processes {bad.how} - expected them to add up. Last lines:\n{lines}", fix)
    return ok(
        f"two processes add 4 MiB in {figures['all_reduce_s'] * 1000:.1f} ms, and one sends the other "
        f"{figures['broadcast_bytes'] >> 20} MiB at {figures['broadcast_bytes_per_s'] / 1e9:.2f} GB/s",
        **figures,
    )


def check_environments(case: Case) -> Iterator[Finding]:
    """Run `trireme env check` on each environment, with a policy that says nothing sensible."""
    evaluation = case.config.orchestrator.eval
    listed = (*case.config.orchestrator.env, *(evaluation.env if evaluation else ()))
    different = {json.dumps([each.id, each.args], sort_keys=True, default=str): each for each in listed}
    for number, environment in enumerate(different.values()):
        name = environment.resolved_name
        file = case.folder / f"environment-{number}.json"
        write_run(updated(case.config, {"orchestrator.env": (environment,), "orchestrator.eval": None}), file)
        words = ["env", "check", name, "--scripted", "--json", "-n", str(EXAMPLES), "-r", str(ROLLOUTS)]
        words += ["--output", str(case.folder / f"environment-{number}"), "--run", str(file)]
        yield about(name, judge_environment(Program("trireme.cli.trireme", *words).wait(ENVIRONMENT_S), environment))


def judge_environment(ended: Ended, environment: Environment) -> Finding:
    report, fix = ended.read_json(), f"`trireme env check {environment.id} --scripted` shows all of it."
    if report is None or "loaded" not in report:
        error = (report or {}).get("error") or ended.last_lines or ended.how
        return problem(f"it does not load: {error} - expected examples and a reward", fix)
    loaded = report["loaded"]
    said = (
        f"loaded in {loaded['load_s']:.1f} s, {loaded['num_train']} examples to train on, {loaded['num_eval']} held out"
    )
    if not loaded["num_train"]:
        return problem(f"{said} - expected examples to train on", fix)
    tried = report["num_examples"] * report["rollouts_per_example"]
    if failed := tried - report["num_done"]:
        first: dict[str, Any] = next(iter(report["troubles"]), {})
        say = warning if report["num_done"] else problem
        why = f"{first.get('stage')}: {first.get('error')}"
        return say(f"{said}; {failed} of {tried} rollouts failed ({why}) - expected a score for each", fix)
    return ok(f"{said}; {tried} rollouts with nonsense for answers are scored", load_s=loaded["load_s"])


def check_run(case: Case) -> Iterator[Finding]:
    """Start `rl` itself with the real engine, trainer and environments."""
    try:
        config = shrink(case)
    except ConfigError as error:
        yield skipped(f"the run cannot be made smaller: {error}")
        return
    if found := problems(config, case.devices):
        yield skipped(f"it cannot be rehearsed on this machine alone: {found[0]}")
        return
    file = case.folder / "run.json"
    write_run(config, file)
    began = time.time()
    ended = Program("trireme.cli.rl", "--run", str(file)).wait(config.inference.start_timeout_s + STEPS * STEP_S)
    yield judge_run(ended, config, began)


def shrink(case: Case) -> RunConfig:
    """Return the same run with three small batches, on this machine alone, in a folder that is removed.

    Evaluation and filters are left out: they could make it wait.
    """
    typed = case.typed
    orchestrator, sampling = typed.orchestrator, typed.orchestrator.sampling
    values: dict[str, Any] = {
        "output_dir": case.folder / "run",
        "name": None,
        "resume": False,
        "max_steps": STEPS,
        "wandb": None,
        "hosts": Hosts(),
        "console": Console(),
        "supervisor": Supervisor(restart=False),
        "disk_timeout_s": DISK_S,
        "trainer.ckpt": Checkpoints(),
        "orchestrator.batch_size": min(orchestrator.batch_size, GROUPS * orchestrator.rollouts_per_example),
        "orchestrator.sampling.max_tokens": max(
            min(sampling.max_tokens or LONGEST_TURN, LONGEST_TURN), sampling.min_tokens + 1
        ),
        "orchestrator.eval": None,
        "orchestrator.filters": Filters(),
        "orchestrator.buffer": Buffer(),
    }
    if len(case.config.hosts.all) > 1:
        values |= {"trainer.num_ranks": None, "ports": Ports()}
    return resolve(updated(typed, values), case.devices)


def judge_run(ended: Ended, config: RunConfig, began: float) -> Finding:
    """
    Args:
        began: unix time at which it was started.
    """
    rows, _ = read_metrics(config.paths.metrics)
    trained = [row for row in rows if row["process"] == "trainer" and "loss" in row]
    root = config.paths.root
    if ended.code != 0 or len(trained) < STEPS:
        said = f"it {ended.how} after {len(trained)} of {STEPS} steps. Its last lines:\n{ended.last_lines}"
        for log in sorted(config.paths.logs.glob("*.stdout")):
            said += f"\n{log.name}:\n" + "\n".join(f"  {line}" for line in last_lines(log, LOG_LINES))
        return problem(said, f"The whole logs: {config.paths.logs}")
    try:
        report = audit_run(root)
    except TriremeError as error:
        return problem(f"{STEPS} steps, and the run's files cannot be read: {error}", f"They are in {root}.")
    if not report.holds:
        said = f"{STEPS} steps, and the run's files contradict each other:\n{report.text()}"
        return problem(said, f"`trireme audit {root}` shows all of it; report it.")
    times = sorted(row["time_s"] for row in trained)
    figures = {
        "first_step_s": times[0] - began,
        "step_s": (times[-1] - times[0]) / (len(times) - 1),
        "publish_s": max(trained, key=lambda row: row["step"]).get("time/publish") or 0.0,
        "versions_confirmed": report.summary.versions_confirmed,
    }
    return ok(
        f"{STEPS} steps of {config.orchestrator.batch_size} rollouts: the first after {figures['first_step_s']:.0f} s, "
        f"the others {figures['step_s']:.1f} s each; {figures['versions_confirmed']} versions confirmed by the "
        f"engine, weights sent in {figures['publish_s']:.2f} s; the audit finds no fault",
        **figures,
    )


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    code: int | None  # None if it exceeded its limit, and was ended
    output: str
    errors: str

    @property
    def last_lines(self) -> str:
        lines = [line.rstrip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])

    @property
    def how(self) -> str:
        if self.code is None:
            return "was ended: it took too long"
        return f"ended with code {self.code}" if self.code >= 0 else f"was killed by {signal.Signals(-self.code).name}"

    def read_json(self, *, last_line: bool = False) -> dict[str, Any] | None:
        """Return the object of JSON that it printed, as its last line or as the whole of its output."""
        with suppress(ValueError, IndexError):
            found = json.loads(self.output.strip().splitlines()[-1] if last_line else self.output)
            return found if isinstance(found, dict) else None
        return None


class Program:
    """One of our modules, started with this interpreter in a process group of its own."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def wait(self, limit_s: float) -> Ended:
        try:
            output, errors = self._process.communicate(timeout=limit_s)
            return Ended(self._process.returncode, output, errors)
        except subprocess.TimeoutExpired:
            self.end()
            return Ended(None, *self._process.communicate())
        finally:
            self.end()

    def end(self) -> None:
        """Ask the program to end, so that it can end what it has started, then kill what is left of its group."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
