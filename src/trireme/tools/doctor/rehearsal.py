"""Checks that start programs of their own: torch on each device, the environments with nonsense for answers, and three
steps of the run itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.processes import die_with_parent, last_lines
from trireme.config.files import write_run
from trireme.config.orchestrator import Buffer, Environment, Filters
from trireme.config.resolve import resolve, updated
from trireme.config.rules.check import problems
from trireme.config.run import Console, Hosts, Ports, RunConfig, Supervisor
from trireme.config.trainer import Checkpoints
from trireme.monitor.metrics import read_metrics
from trireme.tools.audit.audit import audit_run
from trireme.tools.doctor.finding import Case, Finding, about, ok, problem, skipped, warning
from trireme.tools.doctor.machine import INSTALL

TORCH_S = 300.0
ENVIRONMENT_S = 900.0  # with the installation of its packages
EXAMPLES, ROLLOUTS = 2, 2
STEPS, GROUPS, STEP_S = 3, 2, 120.0
LONGEST_TURN = 64  # tokens
DISK_S = 30.0
LOG_LINES = 8
MUCH_TAKEN = 0.1  # share of a GPU's memory that other processes hold

LEAVE_S = 20.0  # between SIGTERM and SIGKILL
LAST_LINES = 12


def check_torch(case: Case) -> Iterator[Finding]:
    share = ("--share",) if case.config.weight_broadcast.type == "ipc" else ()
    ended = run_program(TORCH_S, "trireme.tools.doctor.torch_check", *share)
    facts = ended.read_json()
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
        # engines reserve a share of all memory, so what others hold is missing
        elif gpu["free"] < (1 - MUCH_TAKEN) * gpu["memory"]:
            yield warning(f"{said} - expected most of it", "`nvidia-smi` shows the process that holds it; end it.")
        elif float(gpu["capability"]) < 8:
            said += f", compute capability {gpu['capability']} - expected 8.0 or more for bfloat16"
            yield warning(said, "Engines take float16 and the trainer float32, which is slow; or take another GPU.")
        else:
            yield ok(said)

    if error := facts.get("share_error"):
        said = f"another process cannot read memory of a GPU by a handle: {error} - expected it, as weights go over ipc"
        yield problem(said, 'Start all processes in one container; or set `weight_broadcast.type = "filesystem"`.')


def check_environments(case: Case) -> Iterator[Finding]:
    """Run `trireme env check` on each environment, with a policy that says nothing sensible."""
    evaluation = case.config.orchestrator.eval
    listed = (*case.config.orchestrator.env, *(evaluation.env if evaluation else ()))
    # environments with the same code and arguments are checked once
    different = {json.dumps([each.id, each.args], sort_keys=True, default=str): each for each in listed}
    for number, environment in enumerate(different.values()):
        name = environment.resolved_name
        # the check reads the environment's settings from a file, as it is a process of its own
        file = case.folder / f"environment-{number}.json"
        write_run(updated(case.config, {"orchestrator.env": (environment,), "orchestrator.eval": None}), file)
        words = ["env", "check", name, "--scripted", "--json", "-n", str(EXAMPLES), "-r", str(ROLLOUTS)]
        words += ["--output", str(case.folder / f"environment-{number}"), "--run", str(file)]
        yield about(name, judge_environment(run_program(ENVIRONMENT_S, "trireme.cli.trireme", *words), environment))


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
    # a run for several machines may not fit on this one
    if found := problems(config, case.devices):
        yield skipped(f"it cannot be rehearsed on this machine alone: {found[0]}")
        return
    file = case.folder / "run.json"
    write_run(config, file)
    # the limit covers the start of the engine, and then some minutes for each step
    began = time.time()
    ended = run_program(config.inference.start_timeout_s + STEPS * STEP_S, "trireme.cli.rl", "--run", str(file))
    yield judge_run(ended, config, began)


def shrink(case: Case) -> RunConfig:
    """Return the same run with three small batches, on this machine alone, in a folder that is removed.

    Evaluation and filters are left out: they could make it wait.
    """

    typed = case.typed
    orchestrator, sampling = typed.orchestrator, typed.orchestrator.sampling
    largest = max([own.rollouts_per_example for own in orchestrator.sources.values()], default=1)
    # nothing of the user's own run is touched, neither its folder nor its page at wandb
    values: dict[str, Any] = {
        "output_dir": case.folder / "run",
        "name": None,
        "resume": False,
        "resume_from": None,
        "max_steps": STEPS,
        "wandb": None,
        "hosts": Hosts(),
        "console": Console(),
        "supervisor": Supervisor(restart=False),
        "disk_timeout_s": DISK_S,
        "trainer.ckpt": Checkpoints(),
        "orchestrator.batch_size": min(orchestrator.num_rollouts(typed.seq_len), GROUPS * largest),
        "orchestrator.token_batch_size": None,
        "orchestrator.env": tuple(updated(each, {"filters": None, "buffer": None}) for each in orchestrator.env),
        "orchestrator.sampling.max_tokens": max(
            min(sampling.max_tokens or LONGEST_TURN, LONGEST_TURN), sampling.min_tokens + 1
        ),
        "orchestrator.eval": None,
        "orchestrator.filters": Filters(),
        "orchestrator.buffer": Buffer(),
    }
    # all processes are on this machine now, which has no place for the ranks and ports of the others
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
        # the cause is most often in the log of a process, and the folder is removed afterwards
        for log in sorted(config.paths.logs.glob("*.stdout")):
            said += f"\n{log.name}:\n" + "\n".join(f"  {line}" for line in last_lines(log, LOG_LINES))
        return problem(said, f"The whole logs: {config.paths.logs}")
    # a run that ends well may still have lost something
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
        f"{STEPS} steps of {config.orchestrator.batch_in_words}: the first after {figures['first_step_s']:.0f} s, "
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

    def read_json(self) -> dict[str, Any] | None:
        """Return the object of JSON with which its output ends."""
        with suppress(ValueError):
            # an environment may print braces of its own before
            found: dict[str, Any] = json.loads(self.output[f"\n{self.output}".rindex("\n{") :])
            return found
        return None


def run_program(limit_s: float, module: str, *arguments: str) -> Ended:
    """Run one of our modules with this interpreter. Nothing that it started is alive afterwards."""
    # a session of its own, so that its whole group can be killed
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )

    code = None
    try:
        output, errors = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        # SIGTERM first, so that it ends what it has started itself
        _end(process)
        try:
            output, errors = process.communicate(timeout=LEAVE_S)
        except subprocess.TimeoutExpired as error:  # a program in another session still holds the pipes
            output, errors = ((read or b"").decode(errors="replace") for read in (error.output, error.stderr))
    finally:
        # the group may outlive the program that led it
        _end(process)
    return Ended(code, output, errors)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the program to end, so that it can end what it has started, then kill what is left of its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
