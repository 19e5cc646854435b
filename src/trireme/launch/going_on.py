"""Whether what lies in a run's folder can be gone on with as a configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.config.files import read_table
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.folder import holds_run


@dataclass(frozen=True)
class Going:
    """What a configuration says of where a run is to go, and what it cannot change on the way."""

    paths: RunPaths
    model: str | None
    optimizer: str
    trainer: tuple[str, ...]  # the table in which the trainer's settings stand
    max_steps: int | None  # None: it follows from the data
    resume: bool
    step: int | None  # from which it is to go on, where that was asked for

    @classmethod
    def of(cls, config: RunConfig | SftConfig) -> Going:
        above: tuple[str, ...] = ()
        if isinstance(config, SftConfig):
            optimizer, step = config.optim.type, config.ckpt.resume_step
            max_steps = None if config.num_epochs is not None else config.max_steps
        else:
            optimizer, step, above = config.trainer.optim.type, config.trainer.ckpt.resume_step, ("trainer",)
            max_steps = config.max_steps
        return cls(config.paths, config.model.name, optimizer, above, max_steps, config.resume, step)


def check_goes_on(config: RunConfig | SftConfig) -> None:
    """Before anything is started, or moved; nothing to say of a run that starts afresh.

    Raises:
        ConfigError: the run is one of another model, or of another kind of optimizer, or has gone further than this
            configuration wants to go.
    """
    going = Going.of(config)
    if not (going.resume or going.step is not None) or not holds_run(going.paths):
        return
    if going.paths.run_config.exists():
        before = read_table(going.paths.run_config)
        _check_model(before, going)
        if going.step != 0:  # the base model, of which no optimizer remembers anything
            _check_optimizer(before, going)
    if going.step in (None, -1):
        _check_end(going)


def is_trained(config: RunConfig | SftConfig) -> bool:
    """Whether its last step lies in a checkpoint."""
    return complete_steps(config.paths.checkpoints)[-1:] == [Going.of(config).max_steps]


def _check_model(before: dict[str, Any], going: Going) -> None:
    """By the last part of its name: a folder may have been moved, and one from a hub may be a folder by now."""
    old, new = before.get("model", {}).get("name"), going.model
    if isinstance(old, str) and new is not None and Path(old).name != Path(new).name:
        raise ConfigError(
            f"the run in {going.paths.root} is one of the model {old!r}, and `model.name` is {new!r} - expected the "
            "same: its weights would be given another model's tokenizer and prompts. Leave `model.name` as it was, or "
            "start afresh from the other model: `--name another`, without `--resume`."
        )


def _check_optimizer(before: dict[str, Any], going: Going) -> None:
    """AdamW and its 8-bit form go on with each other's moments."""
    for name in going.trainer:
        before = before.get(name, {})
    old, new = before.get("optim", {}).get("type", "adamw"), going.optimizer
    if str(old).removesuffix("_8bit") != new.removesuffix("_8bit") and complete_steps(going.paths.checkpoints):
        key = ".".join((*going.trainer, "optim.type"))
        raise ConfigError(
            f"the run in {going.paths.root} is trained by {old!r}, and `{key}` is {new!r} - expected the same (or "
            "'adamw' and 'adamw_8bit', in each other's place): its checkpoint has what that one remembers. Leave it "
            "as it was, or start afresh from the weights of this run: `model.name`, without `--resume`."
        )


def _check_end(going: Going) -> None:
    newest = max(complete_steps(going.paths.checkpoints), default=0)
    if going.max_steps is not None and newest > going.max_steps:
        flag = ".".join((*going.trainer, "ckpt.resume-step"))
        raise ConfigError(
            f"the run in {going.paths.root} has a checkpoint of step {newest}, and `max_steps` is {going.max_steps} - "
            f"expected {newest} or more. Raise `max_steps`, or go back with `--{flag} N`."
        )
