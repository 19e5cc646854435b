"""Whether what lies in a run's folder can be gone on with as a configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.config.written import read_table
from trireme.launch.folder import holds_run
from trireme.ledger.manifest import complete_steps


def check_goes_on(config: RunConfig) -> None:
    """Before anything is started, or moved; nothing to say of a run that starts afresh.

    Raises:
        ConfigError: the run is one of another model, or of another kind of optimizer, or has gone further than this
            configuration wants to go.
    """
    step = config.trainer.ckpt.resume_step
    if not (config.resume or step is not None) or not holds_run(config.paths):
        return
    if config.paths.run_config.exists():
        before = read_table(config.paths.run_config)
        _check_model(before, config)
        _check_optimizer(before, config)
    if step in (None, -1):
        _check_end(config)


def is_trained(config: RunConfig) -> bool:
    """Whether its last step lies in a checkpoint."""
    return complete_steps(config.paths.checkpoints)[-1:] == [config.max_steps]


def _check_model(before: dict[str, Any], config: RunConfig) -> None:
    """By the last part of its name: a folder may have been moved, and one from a hub may be a folder by now."""
    old, new = before.get("model", {}).get("name"), config.model.name
    if isinstance(old, str) and Path(old).name != Path(new).name:
        raise ConfigError(
            f"the run in {config.paths.root} is one of the model {old!r}, and `model.name` is {new!r} - expected the "
            "same: its weights would be given another model's tokenizer and prompts. Leave `model.name` as it was, or "
            "start afresh from the other model: `--name another`, without `--resume`."
        )


def _check_optimizer(before: dict[str, Any], config: RunConfig) -> None:
    """AdamW and its 8-bit form go on with each other's moments."""
    old, new = before.get("trainer", {}).get("optim", {}).get("type", "adamw"), config.trainer.optim.type
    if str(old).removesuffix("_8bit") != new.removesuffix("_8bit") and complete_steps(config.paths.checkpoints):
        raise ConfigError(
            f"the run in {config.paths.root} is trained by {old!r}, and `trainer.optim.type` is {new!r} - expected the "
            "same (or 'adamw' and 'adamw_8bit', in each other's place): its checkpoint has what that one remembers. "
            "Leave it as it was, or start afresh from the weights of this run: `model.name`, without `--resume`."
        )


def _check_end(config: RunConfig) -> None:
    newest = max(complete_steps(config.paths.checkpoints), default=0)
    if newest > config.max_steps:
        raise ConfigError(
            f"the run in {config.paths.root} has a checkpoint of step {newest}, and `max_steps` is {config.max_steps} "
            f"- expected {newest} or more. Raise `max_steps`, or go back with `--trainer.ckpt.resume-step N`."
        )
