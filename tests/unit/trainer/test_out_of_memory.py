"""A trainer that runs out of memory says what to change."""

import pytest
import torch

from trireme.base.errors import ConfigError
from trireme.trainer.out_of_memory import explain_out_of_memory

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.10 GiB in total.")
FULL_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.mark.parametrize(("error", "asked"), [(FULL, "Tried to allocate 2.00 GiB"), (FULL_CPU, "allocate 8 bytes")])
def test_it_says_what_was_asked_for_what_is_cheapest_and_where_to_see_more(error, asked):
    for table in ("trainer.", ""):  # keys of the user's own file
        with pytest.raises(ConfigError) as caught, explain_out_of_memory(table):
            raise error
        words = [asked, f"`[{table}model.ac]`", f"`{table}micro_batch_tokens`", "`trireme plan @ CONFIG`"]
        places = [str(caught.value).index(each) for each in words]
        assert places == sorted(places)
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(""):
        raise RuntimeError("mat1 and mat2 shapes")  # another error
