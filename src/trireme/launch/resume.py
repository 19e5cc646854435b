"""Checks before a run is resumed with a configuration, and going back to an earlier step."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, set_aside_after
from trireme.config.files import read_table
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps


def check_resume(config: RunConfig | SftConfig) -> None:
    """Check that the run in the folder can be resumed with this configuration. A run that starts fresh always passes.

    Raises: ConfigError where the run has another model or kind of optimizer, or has gone beyond `max_steps`.
    """
    paths = config.paths
    trainer, prefix = (config, "") if isinstance(config, SftConfig) else (config.trainer, "trainer.")
    step = trainer.ckpt.resume_step  # of the checkpoint to resume from, where one was asked for
    if not (config.resume or step is not None) or not paths.holds_run:
        return
    # What the run was started with, by `rl` or by one of its processes alone.
    files = (paths.run_config, paths.configs / "trainer.json", paths.configs / "orchestrator.json")
    if (file := next((file for file in files if file.exists()), None)) is not None:
        before = read_table(file)
        # The last part of the names: a folder may have been moved, and a model of a hub may be a folder by now.
        old, new = before.get("model", {}).get("name"), config.model.name
        if isinstance(old, str) and new is not None and Path(old).name != Path(new).name:
            raise ConfigError(
                f"the run in {paths.root} trains the model {old!r}, but `model.name` is {new!r} - expected the same: "
                "its weights would get another model's tokenizer and prompts. Leave `model.name` as it was, or start a "
                "new run from the other model: `--name another`, without `--resume`."
            )
        old = (before.get("trainer", {}) if prefix else before).get("optim", {}).get("type", "adamw")
        new = trainer.optim.type
        # AdamW and its 8-bit form read each other's moments. The base model has no optimizer state.
        is_other = str(old).removesuffix("_8bit") != new.removesuffix("_8bit")
        if step != 0 and is_other and complete_steps(paths.checkpoints):
            raise ConfigError(
                f"the run in {paths.root} uses the optimizer {old!r}, but `{prefix}optim.type` is {new!r} - expected "
                "the same ('adamw' and 'adamw_8bit' may replace each other), because its checkpoint holds that "
                "optimizer's state. Leave it as it was, or start a new run from the weights of this one: `model.name`, "
                "without `--resume`."
            )
    confirmed = 0
    if isinstance(config, RunConfig):
        from trireme.journal.versions import Versions  # it imports numpy, which `rl --help` does not wait for

        confirmed = Versions(paths.journal).newest  # it may be later than the newest checkpoint
    newest, last = max(confirmed, *complete_steps(paths.checkpoints), 0), _last_step(config)
    if step in (None, -1) and last is not None and newest > last:
        raise ConfigError(
            f"the run in {paths.root} has reached step {newest}, but `max_steps` is {last} - expected {newest} or "
            f"more, as engines serve what they confirmed. Raise `max_steps`, or go back with "
            f"`--{prefix}ckpt.resume-step N`."
        )


def check_fresh(config: RunConfig, process: Literal["orchestrator", "trainer"]) -> None:
    """Check a process that starts alone: only a launcher moves the files of an earlier run aside.

    Raises: ConfigError where the folder holds such files of this process, and the user did not ask to resume.
    """
    from trireme.journal.journal import Journal  # it imports numpy, which `rl --help` does not wait for

    paths = config.paths
    if config.resume or config.trainer.ckpt.resume_step is not None:
        return
    if process == "orchestrator":
        steps = Journal(paths.journal).steps()
        found = f"{paths.journal} holds {len(steps)} batches"
    else:
        steps = complete_steps(paths.checkpoints)
        found = f"{paths.checkpoints} holds the checkpoints of steps {', '.join(map(str, steps))}"
    if steps:
        raise ConfigError(
            f"{found} of an earlier run - an empty folder was expected. Add --resume to continue that run, or set "
            "another `output_dir` or `name`."
        )


def is_trained(config: RunConfig | SftConfig) -> bool:
    """Return whether the last step is in a checkpoint, and the user does not ask to go back."""
    trainer = config if isinstance(config, SftConfig) else config.trainer
    is_last = complete_steps(config.paths.checkpoints)[-1:] == [_last_step(config)]
    return is_last and trainer.ckpt.resume_step in (None, -1)


def _last_step(config: RunConfig | SftConfig) -> int | None:
    """Return `max_steps`; None where the number of steps follows from the data."""
    return None if isinstance(config, SftConfig) and config.num_epochs is not None else config.max_steps


def rewind(paths: RunPaths, version: int) -> None:
    """Go back to the state right after `version` was trained; 0 is the base model. Later files are moved, not deleted.

    It can be repeated after an interruption. The batches, from which everything else can be made again, are moved last:
    until then a resume without rewinding continues the old run.
    """
    from trireme.journal.journal import Journal  # they import numpy, which `rl --help` does not wait for
    from trireme.journal.versions import Versions

    set_aside_after(paths.checkpoints, version)
    Versions(paths.journal).rewind(version)
    set_aside_after(paths.weights, version)
    set_aside_after(paths.evals, version)
    Journal(paths.journal).rewind(version)
