"""`checkpoint-N` and `runs`: the output folders that users of `vf-rl` expect.

Files are hard links to ours and take no room: `checkpoint-50/adapter_model.safetensors` is that of `weights/step_50`,
and stays when that is removed. Only `trainer_state.json` is made here, from the metrics.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from trireme.base.disk import pretend_full
from trireme.base.log import get_logger
from trireme.base.paths import remove_folder, replace_folder, step_folder
from trireme.config.run import RunConfig
from trireme.journal.manifest import complete_steps
from trireme.monitor.metrics import Row, latest_by_step, merge_processes, read_metrics

STATE = "trainer_state.json"
NAMES = {"lr": "learning_rate", "reward/mean": "reward", "policy/entropy": "entropy"}
"""Our metrics by the names that users of `vf-rl` know; the others keep theirs."""

logger = get_logger("folders")


class CheckpointFolders:
    """The folders of a run. Errors never end the run: what cannot be written now is retried."""

    def __init__(self, config: RunConfig) -> None:
        self._paths = config.paths
        self._max_steps = config.max_steps
        self._keeps_all = config.trainer.ckpt.keep_last is None
        self._warned = False

    def write_due(self) -> list[int]:
        """Make missing folders and remove expired ones. Return the steps of the new ones."""
        try:
            self._link_logs()
            steps = [step for step in complete_steps(self._paths.checkpoints) if self._weights(step).is_dir()]

            # Remove what `keep_last` has expired. A folder of that name without our file is the user's.
            if not self._keeps_all:
                kept = {self.folder(step).name for step in steps}
                for folder in self._paths.root.glob("checkpoint-*"):
                    if folder.name not in kept and (folder / STATE).is_file():
                        remove_folder(folder)
                for folder in self._paths.root.glob(".checkpoint-*.removed"):  # left by a killed launcher
                    shutil.rmtree(folder)

            # Retried every second, so the work must be idempotent: only folders that lack current weights are written.
            due = [step for step in steps if not self._is_current(step)]
            for step in due:
                self._write(step)
            return due
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("Folders checkpoint-N could not be written (%s); tried again every second.", error)
            return []

    def folder(self, step: int) -> Path:
        return self._paths.root / f"checkpoint-{step}"

    def _weights(self, step: int) -> Path:
        return step_folder(self._paths.weights, step)

    def _link_logs(self) -> None:
        """Link the logs and metrics of the processes into `runs`."""
        runs = self._paths.root / "runs"
        if not self._paths.logs.is_dir():
            return
        runs.mkdir(exist_ok=True)
        for target in (self._paths.logs, self._paths.metrics):
            link = runs / target.name
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(target, runs))

    def _is_current(self, step: int) -> bool:
        """Return whether a folder has the current weights: a run that went back may have trained the step again."""
        folder = self.folder(step)
        return (folder / STATE).is_file() and all(
            _is_link_or_copy(folder / file.name, file) for file in _files(self._weights(step))
        )

    def _write(self, step: int) -> None:
        partial = self._paths.root / f".checkpoint-{step}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pretend_full()
        partial.mkdir()

        # Links take no room, and stay valid when the run removes its own weights.
        for file in _files(self._weights(step)):
            try:
                (partial / file.name).hardlink_to(file)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, partial / file.name)

        (partial / STATE).write_text(json.dumps(trainer_state(self._paths.metrics, step, self._max_steps), indent=2))
        replace_folder(partial, self.folder(step))


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()]


def _is_link_or_copy(file: Path, ours: Path) -> bool:
    if not file.is_file():
        return False
    found, known = file.stat(), ours.stat()
    return os.path.samestat(found, known) or (found.st_size == known.st_size and found.st_mtime >= known.st_mtime)


def trainer_state(metrics: Path, step: int, max_steps: int) -> dict[str, Any]:
    """Return what was reported until the checkpoint: a row per step and per evaluation.

    Batches count from 0 here and steps from 1 there; evaluations belong to a version, which is a step.

    Example:
        {"step": 50, "global_step": 50, "max_steps": 100, "log_history": [{"step": 1, "loss": 0.2, "reward": 0.4}, ...]}
    """
    by_number: dict[int, list[Row]] = {}
    for (process, number), row in latest_by_step(read_metrics(metrics)[0]).items():
        if process in ("trainer", "orchestrator") and number <= step:
            by_number.setdefault(number, []).append(row)

    # Users plot `log_history`: rows of evaluations come before the step that follows them.
    history = []
    for number, rows in sorted(by_number.items()):
        row = merge_processes(rows)
        values = {NAMES.get(name, name): value for name, value in row.items() if name not in ("step", "process")}
        evaluated = {name: value for name, value in values.items() if name.startswith("eval/")}
        if evaluated:
            history.append({"step": number} | evaluated)
        if number < step:
            history.append({"step": number + 1} | {name: values[name] for name in values if name not in evaluated})
    return {"step": step, "global_step": step, "max_steps": max_steps, "log_history": history}
