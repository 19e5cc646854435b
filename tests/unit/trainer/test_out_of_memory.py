"""A trainer that runs out of memory says what to change, and that only of what is not done yet."""

import pytest
import torch

from trireme.base.errors import ConfigError
from trireme.config.sft import SftConfig
from trireme.config.trainer import ActivationCheckpointing, Lora, TrainerConfig, TrainerModel
from trireme.trainer.out_of_memory import explain_out_of_memory, proposals

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB in total.")
FULL_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def message_of(error, config: TrainerConfig | SftConfig, table: str = "trainer.", device: str = "cuda") -> str:
    with pytest.raises(type(error) if "shapes" in str(error) else ConfigError) as caught:
        with explain_out_of_memory(table, config, seq_len=4096, device=device):
            raise error
    return str(caught.value)


def test_it_says_what_was_asked_for_what_is_cheapest_and_where_to_see_more() -> None:
    message = message_of(FULL, TrainerConfig(micro_batch_tokens=16384))
    assert "Tried to allocate 2.00 GiB" in message
    assert message.index("`[trainer.model.ac]`") < message.index("`trainer.micro_batch_tokens = 4096`")
    assert "`trireme plan @ CONFIG`" in message
    assert "`[model.ac]`" in message_of(FULL, SftConfig(), table="")  # a key of the user's own file
    assert "offload" not in message_of(FULL_CPU, TrainerConfig(), device="cpu")
    assert message_of(RuntimeError("mat1 and mat2 shapes"), TrainerConfig()) == "mat1 and mat2 shapes"  # another error


def test_only_what_is_not_done_yet_is_proposed() -> None:
    done = {"optimization_dtype": "bfloat16", "head_chunk": 128, "activation_offload": True, "fsdp_cpu_offload": True}
    model = TrainerModel(ac=ActivationCheckpointing(), lora=Lora(), **done)
    left = list(proposals("trainer.", TrainerConfig(model=model), seq_len=4096, on_gpu=True))
    assert [each.split(",")[0].split(" (")[0] for each in left] == ["more ranks", "a smaller `seq_len`"]
    for ac in (ActivationCheckpointing(freq=2), ActivationCheckpointing(mode="selective")):
        config = TrainerConfig(model=TrainerModel(ac=ac))
        assert "freq = 1" in next(proposals("trainer.", config, seq_len=64, on_gpu=True))
