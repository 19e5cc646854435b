"""Rank 0 waits for longer than the others' patience, and tells them to hold on."""

from __future__ import annotations

import sys
import time

from trireme.trainer.mesh import HoldOn, open_world

PATIENCE_S = 8.0
WAIT_S = 12.0


def main(folder: str) -> None:
    with open_world("cpu", threads=1, timeout_s=PATIENCE_S) as world:
        world.barrier()
        hold_on, began = HoldOn(world, timeout_s=PATIENCE_S), time.monotonic()
        while world.is_main and time.monotonic() - began < WAIT_S:
            time.sleep(0.2)
            hold_on()
        with open(f"{folder}/said_{world.rank}", "w") as file:
            file.write(str(world.agree(7 if world.is_main else 0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
