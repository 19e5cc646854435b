"""Layouts say where values come from: what is done to them is what would have been done to the values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trireme.trainer.model.layouts import Region, TensorLayout, UnsupportedLayout, identity_layout

SOURCES = {name: torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("abcd")}


def laid(name: str) -> TensorLayout:
    return identity_layout(name, SOURCES[name].shape)


def experts(of: Callable[[str], Any]) -> Any:
    """As a checkpoint's experts become one tensor: joined in pairs, stacked, turned."""
    pairs = [torch.cat([of("a"), of("b")]), torch.cat([of("c"), of("d")])]
    return torch.transpose(torch.stack(pairs), 1, 2)


@pytest.mark.parametrize("region", [(0, 2, 1, 5, 3, 7), (1, 2, 0, 6, 0, 1), (0, 1, 5, 6, 2, 8), (1, 1, 0, 6, 0, 8)])
def test_a_part_is_read_from_the_parts_of_the_sources_that_it_needs(region):
    parts = tuple(slice(*region[i : i + 2]) for i in (0, 2, 4))
    num_read = 0

    def counting(name: str, region: Region) -> torch.Tensor:
        nonlocal num_read
        num_read += SOURCES[name][region].numel()
        return SOURCES[name][region]

    expected = experts(lambda name: SOURCES[name])
    target = torch.full(expected[parts].shape, torch.nan, dtype=torch.float64)
    experts(laid).at(parts).read_into(target, counting)
    assert torch.equal(target, expected[parts].double())
    assert num_read == target.numel()


def test_a_single_number_is_read():
    found = identity_layout("a", ()).tensor(lambda name, region: torch.tensor(2.5)[region])
    assert (found.shape, found.item()) == ((), 2.5)


def test_what_is_computed_has_no_layout():
    with pytest.raises(UnsupportedLayout, match="mul"):
        torch.mul(laid("a"), 2)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedLayout, match=r"joined along dimension 0: \[\(4, 6\), \(4, 7\)\]"):
        torch.cat([laid("a"), identity_layout("e", (4, 7))])  # type: ignore[list-item]
