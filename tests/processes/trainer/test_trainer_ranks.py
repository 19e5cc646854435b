"""Ranks wait for the first one while it tells them that it is busy."""

import sys
import time
from pathlib import Path

from rank_processes import require_success, started_ranks
from trireme.trainer.parallel.mesh import keep_alive, open_world

PATIENCE_S = 6.0


def test_ranks_wait_for_the_first_one_longer_than_their_timeout_where_it_tells_them_to(tmp_path: Path) -> None:
    with started_ranks(__file__, tmp_path) as processes:
        require_success(processes)
    assert [(tmp_path / f"said_{rank}").read_text() for rank in range(2)] == ["7", "7"]


def wait_longer(folder: Path) -> None:
    with open_world("cpu", threads=1, timeout_s=PATIENCE_S) as world:
        world.barrier()
        hold_on, began = keep_alive(world, timeout_s=PATIENCE_S), time.monotonic()
        while world.is_main and time.monotonic() - began < 1.5 * PATIENCE_S:
            time.sleep(0.05)
            hold_on()
        (folder / f"said_{world.rank}").write_text(str(world.agree(7 if world.is_main else 0)))


if __name__ == "__main__":
    wait_longer(Path(sys.argv[1]))
