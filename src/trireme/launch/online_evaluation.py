"""Evaluation during `sft`: an engine next to the ranks, and the command `eval` for each step whose weights are due.

Each environment is evaluated by a process of its own, one after the other, on all steps that are due by then. Results
are in `evals/step_N/ENV.jsonl`.
Nothing that fails here ends the training: it is said, and a resumed run evaluates what is missing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from trireme.base.devices import Devices
from trireme.base.errors import TriremeError
from trireme.base.paths import atomic_write, set_aside_after, step_folder, steps_in
from trireme.base.processes import catch_signals
from trireme.config.files import write_run
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.orchestrator import EvaluatedEnvironment, Evaluation
from trireme.config.resolve import resolve_evaluating_run
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps
from trireme.journal.origin import read_origin
from trireme.launch.children import Child, Children, open_children
from trireme.launch.plan import Plan, plan
from trireme.monitor.metrics import MetricsFile

POLL_S = 0.1
LOOK_S = 1.0  # between two looks at the processes and the weights
LEAVE_S = 5.0  # between SIGTERM and SIGKILL: results are on disk as they come
FINISH_S = 86400.0  # a day at most for the evaluations that are left after the last step
SETUP_S = 2400.0  # for what an evaluation does before its first rollout: an environment may have to be installed
NICENESS = ("nice", "-n", "10")  # training comes first where both need the same cores


@dataclass
class Job:
    """One evaluation that runs: of the steps that are left, on an environment."""

    steps: list[int]
    environment: EvaluatedEnvironment
    child: Child
    evals: Path
    size: int = 0  # bytes of the results when they last grew
    grown_at: float = 0.0

    def is_stuck(self) -> bool:
        """Return whether no rollout has ended for longer than one may take."""
        size = 0
        for file in self.evals.glob(f"step_*/{self.environment.file_name}.jsonl*"):
            with suppress(OSError):  # renamed since: the evaluation ends
                size += file.stat().st_size
        if size != self.size or not self.grown_at:
            self.size, self.grown_at = size, time.monotonic()
        return time.monotonic() - self.grown_at > self.environment.rollout_timeout_s + SETUP_S


class OnlineEvaluation:
    """The evaluations of one `sft`. Only `finish` waits for them."""

    def __init__(self, config: SftConfig, run: RunConfig, planned: Plan, children: Children) -> None:
        assert config.eval is not None
        self._config, self._run, self._eval, self._planned = config, run, config.eval, planned
        self._metrics = MetricsFile(config.paths.metrics, process="sft")
        self._children = children
        self._engine = children.children[0]
        self._is_healthy = self._is_over = False
        self._began = time.monotonic()
        self._looked = 0.0
        self._job: Job | None = None
        self._failed: set[tuple[int, str]] = set()  # steps and environments that this command does not try again

    def close(self) -> None:
        self._metrics.close()

    def look(self, last: int | None = None) -> None:
        """Start and end what is due, at most once a second.

        Args:
            last: the last step, once it is trained.
        """
        if self._is_over or time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._children.look()

        # Without an engine there is nothing more to do.
        if self._engine.exit is not None:
            return self._give_up(f"the engine ended ({self._engine.exit})", self._engine.spec.log)
        if not self._is_healthy and not self._answers():
            limit = self._run.inference.start_timeout_s
            if time.monotonic() - self._began > limit:
                self._give_up(f"the engine was not healthy within {limit:g} s", self._engine.spec.log)
            return None

        if self._job is not None:
            self._look_at_job(self._job)
        if self._job is None and (due := self._due(last)):
            environment = due[0][1]
            try:
                self._begin([step for step, each in due if each is environment], environment)
            except (OSError, TriremeError) as error:  # such as a full disk
                self._failed |= {(step, each.resolved_name) for step, each in due if each is environment}
                print(f"evaluation of step {due[0][0]} on {environment.resolved_name} failed: {error}", flush=True)
        return None

    def finish(self) -> int:
        """Wait until the weights of the last step are evaluated. Return 0, or 128 + N after signal N."""
        last = max(steps_in(self._config.paths.weights), default=0)
        steps = dict.fromkeys(str(step) for step, _ in missing_evaluations(self._config, last))
        if steps and not self._is_over:
            print(f"trained; waiting for the evaluation of step {', '.join(steps)} (Ctrl-C leaves it out)", flush=True)
        with catch_signals() as received:
            until = time.monotonic() + FINISH_S
            while not received and not self._is_over and (self._job or self._due(last)):
                self.look(last)
                time.sleep(POLL_S)
                if time.monotonic() > until:
                    self._give_up(f"it was not done {FINISH_S:g} s after the last step", self._run.paths.log("eval"))

        left = self._failed | {(step, each.resolved_name) for step, each in missing_evaluations(self._config, last)}
        if left:
            names = ", ".join(f"step {step} on {name}" for step, name in sorted(left))
            print(f"not evaluated: {names}. The same command with --resume evaluates what is missing.", flush=True)
        return 128 + received[0] if received else 0

    def _due(self, last: int | None) -> list[tuple[int, EvaluatedEnvironment]]:
        due = missing_evaluations(self._config, last)
        return [each for each in due if (each[0], each[1].resolved_name) not in self._failed]

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            answer = httpx.get(str(self._engine.spec.health), timeout=LOOK_S, trust_env=False)
            self._is_healthy = answer.status_code == 200
        return self._is_healthy

    def _begin(self, steps: list[int], environment: EvaluatedEnvironment) -> None:
        """Start `eval` for some steps on one environment."""
        run = self._run
        file = run.paths.configs / f"{environment.file_name}.json"
        with atomic_write(file) as written:
            written.write(json.dumps(self._settings(environment), indent=1).encode())

        # Low priority, and the orchestrator's place: one thread, no GPU.
        weights = ",".join(str(step) for step in steps if step) or "0"
        flags = ("--steps", weights, "--eval-base", "true" if 0 in steps else "false")
        argv = (*NICENESS, sys.executable, "-m", "trireme.cli.eval", "@", str(file), *flags)
        spec = replace(
            self._planned["orchestrator"], name="eval", argv=argv, log=run.paths.log("eval"), ports={}, health=None
        )
        self._job = Job(steps, environment, self._children.start(spec), run.paths.root)

    def _settings(self, environment: EvaluatedEnvironment) -> dict[str, Any]:
        """Return the configuration of `eval` for one environment, without the step."""
        own: Evaluation = self._eval.of(environment.resolved_name)
        kept = environment.model_dump(mode="json", exclude_defaults=True, include=set(EnvironmentConfig.model_fields))

        # What is measured comes from the table of the environment over `[eval]`.
        settings = own.model_dump(
            mode="json",
            exclude_none=True,
            include={"num_examples", "rollouts_per_example", "pass_at", "pass_threshold", "max_concurrent", "sampling"},
        )

        # The rest says where the weights, the results and the engine are.
        return settings | {
            "weights_dir": str(self._config.paths.weights.resolve()),
            "output_dir": str(self._config.paths.evals.resolve()),
            "env": [kept | {"name": environment.file_name}],
            "seed": self._config.seed,
            "client": {"base_url": f"{str(self._engine.spec.health).removesuffix('/health')}/v1"},
            "model": {
                key: value
                for key, value in {
                    "base": self._config.model.name,
                    "max_model_len": self._run.inference.model.max_model_len,
                    "tool_call_parser": self._run.inference.model.tool_call_parser,
                    "reasoning_parser": self._run.inference.model.reasoning_parser,
                }.items()
                if value is not None
            },
        }

    def _look_at_job(self, job: Job) -> None:
        """Record the figures of each step that is evaluated, or say why there are none."""
        child, has_ended, is_first = job.child, job.child.exit is not None, True
        for step in list(job.steps):
            found = description(self._config, step, job.environment)
            # An evaluation that died did so at the first step that is left; those after it are tried again.
            if found.get("finished") or (has_ended and (found or is_first)):
                job.steps.remove(step)
                self._record(job, step, found)
                is_first = bool(found.get("finished"))
        if has_ended:
            child.end()
            self._children.children.remove(child)
            self._job = None
        elif job.is_stuck():
            child.kill("no rollout ended in time")

    def _record(self, job: Job, step: int, found: dict[str, Any]) -> None:
        # A rollout that failed leaves the evaluation unfinished, but with figures of the others.
        name, child = job.environment.resolved_name, job.child
        metrics = {key: value for key, value in found.get("metrics", {}).items() if isinstance(value, int | float)}
        if metrics:
            self._metrics.append(step, {f"eval/{name}/{key}": value for key, value in metrics.items()})
            reward = f"reward {metrics['reward']:.3f}" if "reward" in metrics else "nothing was scored"
            print(f"evaluation of step {step} on {name}: {reward}", flush=True)
        if not found.get("finished"):
            self._failed.add((step, name))
            print(f"evaluation of step {step} on {name} failed ({child.exit}): {child.spec.log}", flush=True)

    def _give_up(self, why: str, log: Path) -> None:
        self._is_over = True
        print(f"evaluation stops, and training goes on: {why}. Its log: {log}", flush=True)


@contextmanager
def open_evaluation(config: SftConfig, devices: Devices, keep_open: Sequence[int]) -> Iterator[OnlineEvaluation]:
    """Start the engine. Afterwards neither it nor an evaluation is alive, on any way out.

    Args:
        keep_open: as of `open_children`.
    """
    forget_later_steps(config)
    run = resolve_evaluating_run(config, devices)
    run_file = run.paths.configs / "engine.json"
    write_run(run, run_file)
    planned = plan(run, run_file, devices)
    engine = replace(planned["inference"], argv=(*NICENESS, *planned["inference"].argv))
    with open_children([engine], lambda: False, LEAVE_S, keep_open) as children:
        with closing(OnlineEvaluation(config, run, planned, children)) as evaluation:
            yield evaluation


def missing_evaluations(config: SftConfig, last: int | None) -> Iterator[tuple[int, EvaluatedEnvironment]]:
    """Yield what is due and has its weights on disk, but no complete results.

    Args:
        last: the last step, once it is trained.
    """
    # A run that began from another one's checkpoint has that as its base, not the engine's model.
    base = [0] if read_origin(config.paths.root) is None else []
    for step in [*base, *sorted(steps_in(config.paths.weights))]:
        due = config.evaluated_at(step, last=last)
        for each in config.eval.env if config.eval else ():
            if each.resolved_name in due and not description(config, step, each).get("finished"):
                yield step, each


def description(config: SftConfig, step: int, environment: EvaluatedEnvironment) -> dict[str, Any]:
    """Return what `eval` wrote next to its results; empty if there are none."""
    file = step_folder(config.paths.evals, step) / f"{environment.file_name}.json"
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def forget_later_steps(config: SftConfig) -> None:
    """Move weights and results aside of steps after the checkpoint that the run goes on from: they are made again."""
    step = config.ckpt.resume_step if config.resume_from is None or config.resume else None
    if step in (None, -1):
        origin = read_origin(config.paths.root)
        step = max(complete_steps(config.paths.checkpoints), default=origin.begins_at if origin else 0)
    for folder in (config.paths.weights, config.paths.evals):
        set_aside_after(folder, step)
