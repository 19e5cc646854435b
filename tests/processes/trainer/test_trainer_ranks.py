"""Ranks wait for the first one while it is busy."""

import sys
from pathlib import Path

from rank_processes import require_success, started_ranks
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel
from trireme.trainer.parallel.mesh import keep_alive, open_world
from trireme.trainer.sft.prepare_data import open_tokenizer_of, prepare_data

PATIENCE_S = 6.0
SLOW = f"""import time

def conversations():
    for _ in range(100):
        time.sleep({1.5 * PATIENCE_S / 100})
        yield {{"prompt": "a", "completion": "b"}}
"""


def test_ranks_wait_for_the_first_one_to_read_its_data_longer_than_their_timeout(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with started_ranks(__file__, tiny_model, tmp_path) as processes:
        require_success(processes)
    assert [(tmp_path / f"said_{rank}").read_text() for rank in range(2)] == ["100", "100"]


def wait_longer(model: Path, folder: Path) -> None:
    config = SftConfig(output_dir=folder, data=str(folder / "slow.py"), model=TrainerModel(name=str(model)), seq_len=64)
    open_tokenizer_of(config)  # its imports take long the first time
    with open_world("cpu", threads=1, timeout_s=PATIENCE_S) as world:
        world.barrier()
        train, _ = prepare_data(config, world, Waits("sft"), keep_alive(world, timeout_s=PATIENCE_S))
        (folder / f"said_{world.rank}").write_text(str(train.length))


if __name__ == "__main__":
    wait_longer(*map(Path, sys.argv[1:]))
