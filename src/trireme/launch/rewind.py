"""Back to an earlier version: what came after it is set aside, so that the run goes another way from there."""

from __future__ import annotations

from pathlib import Path

from trireme.base.paths import RunPaths, step_folder, step_of
from trireme.journal.aside import move_aside
from trireme.journal.journal import Journal
from trireme.journal.versions import Versions


def rewind(paths: RunPaths, version: int) -> None:
    """Leaves what there was when `version` had just been trained; 0 is the base model. Nothing is deleted.

    Where it is cut short, doing it again finishes it, and a run that goes on without that stays on its old way: the
    batches, from which everything else can be made again, go last.
    """
    _rewind_steps(paths.checkpoints, version)
    Versions(paths.journal).rewind(version)
    _rewind_steps(paths.weights, version)
    _rewind_steps(paths.evals, version)
    Journal(paths.journal).rewind(version)


def _rewind_steps(folder: Path, version: int) -> None:
    """Half-written ones go too: what lies under a step's name must be of the new way."""
    steps = [step for entry in folder.iterdir() if (step := step_of(entry)) is not None] if folder.is_dir() else []
    move_aside(folder, [step_folder(folder, step) for step in sorted(steps) if step > version])
