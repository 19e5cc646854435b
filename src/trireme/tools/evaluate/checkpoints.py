"""Which checkpoints `uv run eval` is about: what lies in the weights folder, and the run that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trireme.algo.weight_checks import first_difference
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, step_folder, step_of
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.versions import Versions
from trireme.messages import TensorSpec
from trireme.tools.evaluate.config import EvalConfig, inherit_from_run
from trireme.tools.evaluate.session import prepare

SHOWN = 20


@dataclass(frozen=True)
class Plan:
    """What will be evaluated."""

    config: EvalConfig
    steps: dict[int, Path]
    output: Path
    run: RunConfig | None  # that wrote the checkpoints, where it is beside them

    @property
    def models(self) -> dict[int, Path | None]:
        """By step, in order; None is the engine's own base model."""
        base: dict[int, Path | None] = {0: None} if self.config.eval_base else {}
        return base | {step: folder for step, folder in self.steps.items() if step or not base}

    @property
    def label(self) -> dict[int, str]:
        return {step: "base" if folder is None else f"step_{step}" for step, folder in self.models.items()}


def read_plan(config: EvalConfig) -> Plan:
    """Raises: ConfigError with what cannot be evaluated."""
    weights = config.weights_dir
    assert weights is not None
    if not weights.is_dir():
        raise ConfigError(
            f"--weights-dir {weights} is no folder - expected one with `step_N` folders, as a run has in "
            f"`weights/`.{_nearby(weights)}"
        )
    run = _run_beside(weights)
    config = inherit_from_run(config, run) if run else config
    if not config.env:
        raise ConfigError(
            "no environment is named, and there is no run beside the checkpoints that says which "
            f"({weights.resolve().parent / 'configs'}) - expected one. Add `--env.id my-env`."
        )
    config = prepare(config)
    steps = find_steps(weights, config.steps)
    return Plan(config, steps, config.output_dir or weights.resolve().parent / "evals", run)


def find_steps(weights: Path, wanted: tuple[int, ...]) -> dict[int, Path]:
    """Raises: ConfigError where one is not there."""
    there = sorted(step for folder in weights.iterdir() if folder.is_dir() and (step := step_of(folder)) is not None)
    shown = f"{', '.join(map(str, there[:SHOWN]))}{' …' if len(there) > SHOWN else ''}" or "none"
    if missing := sorted(set(wanted) - set(there)):
        raise ConfigError(
            f"--steps {','.join(map(str, wanted))}: {weights} has no step {', '.join(map(str, missing))} - it has "
            f"{shown}. Take some of these; `trireme export RUN --step N` makes one of a checkpoint."
        )
    if not there:
        raise ConfigError(
            f"{weights} has no `step_N` folders - expected the weights of a run. `trireme export RUN` makes some of "
            "its checkpoints."
        )
    return {step: step_folder(weights, step) for step in sorted(set(wanted)) or there}


def _nearby(weights: Path) -> str:
    found = sorted(folder for folder in Path("outputs").glob("**/weights") if folder.is_dir())[:3]
    return f" There are {', '.join(map(str, found))}." if found and weights not in found else ""


def _run_beside(weights: Path) -> RunConfig | None:
    """Of `RUN/weights`. One of `sft` has no environments."""
    try:
        return read_run(RunConfig, find_run_file(weights.resolve().parent, "orchestrator"))
    except ConfigError:
        return None


def require_as_confirmed(plan: Plan, step: int, specs: list[TensorSpec], digests: dict[str, str]) -> None:
    """A run has written down what each of its versions was, tensor by tensor: files that say otherwise have changed.

    Adapters are not compared: the run's engines were given them in another form.

    Raises: ConfigError.
    """
    folder = plan.steps[step]
    versions = Versions(RunPaths(folder.resolve().parent.parent).journal)
    is_adapter = (folder / "adapter_config.json").is_file()
    if plan.run is None or is_adapter or not versions.has(step) or _dtypes(specs) != {_served(plan.run)}:
        return
    confirmed = [confirmation.digests for confirmation in versions.read(step).confirmations]
    if all(first_difference(each, digests) for each in confirmed):
        raise ConfigError(
            f"{folder} is not what the run's engines confirmed as version {step}: "
            f"{first_difference(confirmed[-1], digests)} - expected the weights of that version. The files were "
            "changed or damaged since. Move the folder away and make it again: `trireme export "
            f"{folder.resolve().parent.parent} --step {step}`."
        )


def _served(run: RunConfig) -> str:
    dtype = run.inference.model.dtype
    return dtype if dtype != "auto" else "float32" if run.device == "cpu" else "bfloat16"


def _dtypes(specs: list[TensorSpec]) -> set[str]:
    return {spec.dtype for spec in specs}
