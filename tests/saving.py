"""Trainers that die while they save, for `test_trainer_saving`.

python tests/saving.py MODEL_FOLDER OUTPUT_FOLDER POINT...

For each point, in a process and a folder of its own: version 1 is saved whole, then the point is armed, then version 2
is saved. Prints how each process ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tiny import open_exporter, open_state, open_store, random_samples, train_step
from trireme.trainer.mesh import open_world


def train_and_save(model: Path, folder: Path, point: str) -> None:
    faults = folder / "faults"
    faults.mkdir(parents=True)
    os.environ["TRIREME_FAULTS"] = f"folder={faults}"
    with open_world("cpu", threads=1, timeout_s=240) as world:
        state = open_state(model, world)
        store = open_store(folder / "checkpoints", world, exporter=open_exporter(folder / "weights", model, world))
        for version in (1, 2):
            train_step(state, random_samples([30, 20, 12], seed=state.version), world)
            if version == 2:
                (faults / point).write_text("kill")
            store.save(state)
            store.wait()


def main() -> None:
    model, folder = map(Path, sys.argv[1:3])
    for point in sys.argv[3:]:
        pid = os.fork()  # nothing but imports has been done
        if pid == 0:
            try:
                train_and_save(model, folder / point, point)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
