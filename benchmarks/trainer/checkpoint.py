"""How long a training step waits for a checkpoint: written in the background, against waited for.

    uv run python -m benchmarks.trainer.checkpoint [--hidden 512] [--layers 8] [--times 4]

A model of random weights with AdamW's state, saved `times` times each way, by turns; the ratio of medians is what
counts. Between two saves a step is taken, so that there is something new to write.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measuring import Work, by_turns, command, print_table, wall_s
from support.models.tiny import open_state, random_samples, save_tiny_model, train_step
from trireme.base.waiting import Waits
from trireme.config.trainer import Checkpoints
from trireme.trainer.checkpoint.checkpoint import CheckpointStore
from trireme.trainer.parallel.mesh import open_world


def main(hidden: int = 512, layers: int = 8, times: int = 4) -> None:
    with tempfile.TemporaryDirectory() as name, open_world("cpu", threads=1, timeout_s=600) as world:
        folder, waits, settings = Path(name), Waits("benchmark"), Checkpoints(keep_last=2)
        state = open_state(save_tiny_model(folder / "model", hidden=hidden, layers=layers), world)
        store = CheckpointStore(folder / "checkpoints", settings, world, waits=waits, disk_timeout_s=60)

        def save_and_wait() -> None:
            store.save(state)
            store.wait()

        def clock(save: Work) -> float:
            """Time a save, after a step and before the wait for its end."""
            train_step(state, random_samples([30, 20, 12], seed=state.version), world)
            seconds = wall_s(save)
            store.wait()
            return seconds

        found = by_turns({"step": lambda: store.save(state), "whole": save_and_wait}, times, clock)
        step_s, whole_s = map(median, found.values())
        millions = f"{state.model.num_parameters() / 1e6:.0f} million"
        columns = ("parameters, with AdamW's state", "step waits", "whole checkpoint", "ratio")
        print_table(columns, [(millions, f"{step_s:.2f} s", f"{whole_s:.2f} s", f"{step_s / whole_s:.3f}")])


if __name__ == "__main__":
    command(main)
