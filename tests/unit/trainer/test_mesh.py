"""What the ranks of the trainer exchange."""

from dataclasses import replace

import torch


def test_ranks_that_wait_for_a_number_leave_the_gpu_alone(world):
    """They wait for batches so, and NCCL would poll on the GPU meanwhile. A meta device can wait for nothing."""
    assert replace(world, device=torch.device("meta")).agree(5) == 5
