"""A trainer that runs out of memory says what to change, and that only of what is not done yet."""

from __future__ import annotations

import pytest
import torch

from trireme.base.errors import ConfigError
from trireme.config.sft import SftConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, TrainerConfig, TrainerModel
from trireme.trainer.out_of_memory import explained, proposals

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB in total.")


def refusal(error: Exception, config: TrainerConfig | SftConfig, table: str = "trainer.") -> str:
    with pytest.raises(ConfigError) as caught, explained(table, config, seq_len=4096, device="cuda"):
        raise error
    return str(caught.value)


def test_it_says_what_was_asked_for_what_is_cheapest_and_where_to_see_more() -> None:
    message = refusal(FULL, TrainerConfig(micro_batch_tokens=16384))
    assert "Tried to allocate 2.00 GiB" in message
    assert message.index("`[trainer.model.ac]`") < message.index("`trainer.micro_batch_tokens = 4096`")
    assert "`trireme plan @ CONFIG`" in message


def test_the_keys_are_those_of_the_users_own_file() -> None:
    assert "`[model.ac]`" in refusal(FULL, SftConfig(), table="")


def test_what_is_done_already_is_not_proposed() -> None:
    model = TrainerModel(
        ac=ActivationCheckpointing(),
        optimization_dtype="bfloat16",
        head_chunk=128,
        activation_offload=True,
        lora=Lora(),
        fsdp_cpu_offload=True,
    )
    left = list(proposals("trainer.", TrainerConfig(model=model), seq_len=4096, on_gpu=True))
    assert len(left) == 2
    assert left[0].startswith("more ranks")
    assert left[1].startswith("a smaller `seq_len`")


def test_layers_that_are_kept_yet_are_proposed_for_recomputation() -> None:
    for ac in (ActivationCheckpointing(freq=2), ActivationCheckpointing(mode="selective")):
        config = TrainerConfig(model=TrainerModel(ac=ac))
        assert "freq = 1" in next(proposals("trainer.", config, seq_len=64, on_gpu=True))


def test_cpu_memory_counts_too_and_is_not_offered_to_itself() -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    with pytest.raises(ConfigError) as caught, explained("trainer.", TrainerConfig(), seq_len=64, device="cpu"):
        raise error
    assert "offload" not in str(caught.value)


def test_other_errors_pass() -> None:
    with (
        pytest.raises(RuntimeError, match="shapes"),
        explained("trainer.", TrainerConfig(), seq_len=64, device="cuda"),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
