"""What the trainer needs to go on, on disk: whole or not at all.

`checkpoints/step_N/` is written as `.step_N.partial/` and renamed when its manifest, the last file, is on disk. A
folder without a manifest, or whose files have other sizes than the manifest says, does not count.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write, step_folder, step_of, sync_folder
from trireme.config.trainer import Checkpoints
from trireme.trainer.mesh import World

log = get_logger("checkpoint")

MANIFEST = "manifest.json"


@dataclass
class TrainerState:
    """What one trainer rank changes as it goes."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    version: int = 0  # optimizer steps that the weights have seen


class CheckpointStore:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, config: Checkpoints, world: World) -> None:
        self._folder = folder
        self._config = config
        self._world = world

    def is_due(self, version: int, *, last: int) -> bool:
        interval = self._config.interval
        return version == last or (interval is not None and version % interval == 0)

    def save(self, state: TrainerState) -> None:
        """A collective."""
        partial = self._folder / f".step_{state.version}.partial"
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._world.barrier()
        model, optimizer = get_state_dict(state.model, state.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial)
        torch.save(_random_state(self._world), partial / f"random_{self._world.rank}.pt")
        self._world.barrier()
        if self._world.is_main:
            self._complete(partial, state.version)
            self._remove_old()
        self._world.barrier()

    def _complete(self, partial: Path, version: int) -> None:
        files = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
        manifest = {"version": version, "world_size": self._world.size, "time": time.time(), "files": files}
        for name in files:
            with open(partial / name, "rb") as file:
                os.fsync(file.fileno())
        with atomic_write(partial / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        final = step_folder(self._folder, version)
        shutil.rmtree(final, ignore_errors=True)  # a resumed run may save the same step again
        partial.rename(final)
        sync_folder(self._folder)
        log.info("checkpoint %s", final)

    def _remove_old(self) -> None:
        if self._config.keep_last is None:
            return
        complete = complete_steps(self._folder)
        for step in complete[: -self._config.keep_last]:
            if not (self._config.keep_interval and step % self._config.keep_interval == 0):
                shutil.rmtree(step_folder(self._folder, step))

    def resume(self, state: TrainerState, *, resume: bool) -> None:
        """Loads what the run is to start from, if it is not the base model. A collective.

        Raises: as `version_to_resume`.
        """
        version = version_to_resume(self._folder, self._config, resume=resume)
        if self._world.is_main and self._config.resume_step not in (None, -1):
            self._set_aside_after(version)
        if version:
            self.load(state, version)

    def _set_aside_after(self, version: int) -> None:
        """The run goes another way from `version`: the newest checkpoint must not be one of the old way."""
        later = [step for step in complete_steps(self._folder) if step > version]
        if not later:
            return
        aside = self._folder / f"set_aside_{time.time_ns()}"
        aside.mkdir()
        for step in later:
            step_folder(self._folder, step).rename(step_folder(aside, step))
        sync_folder(self._folder)
        log.info("checkpoints of steps %s set aside in %s", later, aside)

    def load(self, state: TrainerState, version: int) -> None:
        """A collective. The number of ranks may differ from the one that saved."""
        folder = step_folder(self._folder, version)
        options = StateDictOptions()
        model, optimizer = get_state_dict(state.model, state.optimizer, options=options)
        content = {"model": model, "optimizer": optimizer}
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=options,
        )
        random = folder / f"random_{self._world.rank}.pt"
        if random.exists():
            _set_random_state(torch.load(random, weights_only=True))
        state.version = version
        log.info("resumed from %s", folder)


def complete_steps(folder: Path) -> list[int]:
    """Steps with a checkpoint that is whole, in order."""
    steps = [step_of(path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(step for step in steps if step is not None and is_complete(step_folder(folder, step)))


def is_complete(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, not JSON, or JSON of another kind
        return False


def version_to_resume(folder: Path, config: Checkpoints, *, resume: bool) -> int:
    """The version to start from: 0 for a fresh run.

    Raises:
        ConfigError: the asked-for checkpoint is not there, or not whole.
    """
    if config.resume_step is None and not resume:
        return 0
    steps = complete_steps(folder)
    if config.resume_step in (None, -1):
        return steps[-1] if steps else 0
    if config.resume_step != 0 and config.resume_step not in steps:
        raise ConfigError(
            f"There is no complete checkpoint of step {config.resume_step} in {folder} (complete: {steps or 'none'}). "
            "Set `--trainer.ckpt.resume-step` to one of these, or -1 for the newest."
        )
    return config.resume_step or 0


def _random_state(world: World) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
