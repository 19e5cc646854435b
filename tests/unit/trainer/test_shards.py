"""A tensor in shards is whole, or the missing part is noticed."""

import pytest
import torch

from trireme.base.errors import JournalCorrupt
from trireme.trainer.parallel.shards import Shard, open_shards, write_shards


def test_a_missing_part_of_a_tensor_is_noticed(tmp_path):
    write_shards(tmp_path / "half.safetensors", {"model.x": Shard(torch.zeros(4, 3), (8, 3), (4, 0))})
    with open_shards([tmp_path / "half.safetensors"]) as stored, pytest.raises(JournalCorrupt, match="12 of the 24"):
        stored.read_into("model.x", torch.zeros(8, 3))
