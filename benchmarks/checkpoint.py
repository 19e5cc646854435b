"""How long a training step waits for a checkpoint: written in the background, against waited for.

    uv run python benchmarks/checkpoint.py [--hidden 512] [--layers 8] [--times 4]

A model of random weights with AdamW's state, saved `times` times each way, by turns; the ratio of medians is what
counts. Between two saves a step is taken, so that there is something new to write.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from tiny import open_state, random_samples, save_tiny_model, train_step
from trireme.base.waiting import Waits
from trireme.config.trainer import Checkpoints
from trireme.trainer.checkpoint.checkpoint import CheckpointStore
from trireme.trainer.parallel.mesh import open_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, open_world("cpu", threads=1, timeout_s=600) as world:
        folder = Path(name)
        state = open_state(save_tiny_model(folder / "model", hidden=args.hidden, layers=args.layers), world)
        store = CheckpointStore(
            folder / "checkpoints", Checkpoints(keep_last=2), world, waits=Waits("benchmark"), disk_timeout_s=60
        )
        waited: list[float] = []
        blocked: list[float] = []
        for number in range(2 * args.times + 1):
            train_step(state, random_samples([30, 20, 12], seed=number), world)
            began = time.perf_counter()
            store.save(state)
            returned = time.perf_counter() - began
            store.wait()
            if number:  # the first one allocates what is copied into
                (waited if number % 2 else blocked).append(returned if number % 2 else time.perf_counter() - began)
        step, whole = statistics.median(waited), statistics.median(blocked)
        print(f"{state.model.num_parameters() / 1e6:.0f} million parameters, on CPU")
        print(
            f"a step waits {step:.2f} s for its copy; {whole:.2f} s if it waited for the disk: ratio {step / whole:.3f}"
        )


if __name__ == "__main__":
    main()
