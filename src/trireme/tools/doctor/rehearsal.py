"""What only a program of its own can show: each environment with a policy that says nothing sensible, and three steps
of the run itself, on the way that all of its steps take."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.processes import last_lines
from trireme.config.files import write_run
from trireme.config.orchestrator import Buffer, Environment, Filters
from trireme.config.resolve import resolve, updated
from trireme.config.rules import problems
from trireme.config.run import Console, Hosts, RunConfig, Supervisor
from trireme.config.trainer import Checkpoints
from trireme.monitor.metrics import Row, read_metrics
from trireme.tools.audit.audit import audit_run
from trireme.tools.doctor.finding import Case, Finding, of, ok, problem, skipped, warning
from trireme.tools.doctor.programs import Ended, Program, run_program

ENVIRONMENT_S = 900.0  # with the installation of its packages
EXAMPLES, ROLLOUTS = 2, 2
STEPS, GROUPS = 3, 2
LONGEST_TURN = 64  # tokens
STEP_S = 120.0
DISK_S = 30.0
LAST = 8


# environments


def environments(case: Case) -> Iterator[Finding]:
    seen: set[str] = set()
    for environment in environments_of(case.config):
        key = json.dumps([environment.id, environment.args], sort_keys=True, default=str)
        if key not in seen:
            seen.add(key)
            yield of(_checked(environment, case, number=len(seen)), environment.name or environment.id)


def environments_of(config: RunConfig) -> tuple[Environment, ...]:
    evaluation = config.orchestrator.eval
    return (*config.orchestrator.env, *(evaluation.env if evaluation else ()))


def _checked(environment: Environment, case: Case, *, number: int) -> Finding:
    """By `trireme env check`, in a process of its own."""
    folder = case.folder / f"environment-{number}"
    alone = updated(case.config, {"orchestrator.env": (environment,), "orchestrator.eval": None})
    write_run(alone, case.folder / f"environment-{number}.json")
    words = ["env", "check", environment.name or environment.id, "--scripted", "--json"]
    words += ["-n", str(EXAMPLES), "-r", str(ROLLOUTS), "--output", str(folder)]
    words += ["--run", str(case.folder / f"environment-{number}.json")]
    ended = run_program("trireme.cli.trireme", words, limit_s=ENVIRONMENT_S)
    return of_environment(ended, f"trireme env check {environment.id} --scripted")


def of_environment(ended: Ended, command: str) -> Finding:
    report = _whole(ended.output)
    fix = f"`{command}` shows all of it."
    if report is None:
        return problem(f"it could not be checked: {ended.last_words or ended.how} - expected it to load", fix)
    if "loaded" not in report:
        return problem(f"it does not load: {report.get('error', ended.last_words)}", fix)
    loaded = report["loaded"]
    examples = f"{loaded['num_train']} examples to train on, {loaded['num_eval']} held out"
    said = f"loaded in {loaded['load_s']:.1f} s, {examples}"
    if not loaded["num_train"]:
        return problem(f"{said} - expected examples to train on", fix)
    tried = report["num_examples"] * report["rollouts_per_example"]
    if failed := tried - report["num_done"]:
        first: dict[str, Any] = next(iter(report["troubles"]), {})
        why = f"{first.get('stage')}: {first.get('error')}"
        say = warning if report["num_done"] else problem
        return say(f"{said}; {failed} of {tried} rollouts failed ({why}) - expected each to be scored", fix)
    return ok(f"{said}; {tried} rollouts with nonsense for answers are scored", load_s=loaded["load_s"])


def _whole(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# three steps


def run(case: Case) -> Iterator[Finding]:
    try:
        config = small(case)
    except ConfigError as error:
        yield skipped(f"it cannot be made smaller: {error}")
        return
    if found := problems(config, case.devices):
        yield skipped(f"it cannot be made on this machine alone: {found[0]}")
        return
    write_run(config, run_file := case.folder / "run.json")
    began = time.time()
    program = Program("trireme.cli.rl", "--run", str(run_file))
    yield of_run(program.wait(limit_of(config)), config, began)


def small(case: Case) -> RunConfig:
    """The same run with three small batches, on this machine alone, in a folder that goes away."""
    typed = case.typed
    orchestrator, sampling = typed.orchestrator, typed.orchestrator.sampling
    longest = max(min(sampling.max_tokens or LONGEST_TURN, LONGEST_TURN), sampling.min_tokens + 1)
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
        "orchestrator.sampling.max_tokens": longest,
        "orchestrator.eval": None,
        "orchestrator.filters": Filters(),
        "orchestrator.buffer": Buffer(),
    }
    if case.is_of_several_machines:
        values |= {"trainer.num_ranks": None, "ports": type(typed.ports)()}
    return resolve(updated(typed, values), case.devices)


def limit_of(config: RunConfig) -> float:
    return config.inference.start_timeout_s + STEPS * STEP_S


def of_run(ended: Ended, config: RunConfig, began: float) -> Finding:
    """
    Args:
        began: unix time at which it was started.
    """
    rows, _ = read_metrics(config.paths.metrics)
    trained = [row for row in rows if row["process"] == "trainer" and "loss" in row]
    if ended.code != 0 or len(trained) < STEPS:
        return problem(
            f"it {ended.how} after {len(trained)} of {STEPS} steps. Its last words:\n{ended.last_words}"
            f"{_logs_of(config)}",
            f"The whole logs: {config.paths.logs}",
        )
    try:
        report = audit_run(config.paths.root)
    except TriremeError as error:
        return problem(
            f"{STEPS} steps, and the run's files cannot be read: {error}", f"They are in {config.paths.root}."
        )
    if not report.holds:
        return problem(
            f"{STEPS} steps, and the run's files contradict each other:\n{report.text(everything=False)}",
            f"`trireme audit {config.paths.root}` shows all of it; report it.",
        )
    figures = figures_of(trained, began) | {"versions_confirmed": report.summary.versions_confirmed}
    return ok(
        f"{STEPS} steps of {config.orchestrator.batch_size} rollouts: the first after {figures['first_step_s']:.0f} s, "
        f"the others {figures['step_s']:.1f} s each; {report.summary.versions_confirmed} versions confirmed by the "
        f"engine, weights sent in {figures['publish_s']:.2f} s; the audit finds no fault",
        **figures,
    )


def figures_of(trained: list[Row], began: float) -> dict[str, float]:
    """Of the trainer's lines, one per step. The first versions may have waited for the engine to come up."""
    trained = sorted(trained, key=lambda row: row["step"])
    times = [row["time_s"] for row in trained]
    return {
        "first_step_s": times[0] - began,
        "step_s": (times[-1] - times[0]) / (len(times) - 1),
        "publish_s": trained[-1].get("time/publish") or 0.0,
    }


def _logs_of(config: RunConfig) -> str:
    """The end of each process's log."""
    said = ""
    for log in sorted(config.paths.logs.glob("*.stdout")):
        lines = "\n".join(f"  {line}" for line in last_lines(log, LAST))
        said += f"\n{log.name}:\n{lines}"
    return said
