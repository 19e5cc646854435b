"""A row that ranks share: who holds what of it, and how attention is told of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from trireme.algo.packing import positions
from trireme.base.errors import ConfigError
from trireme.trainer.context import SharedRow, Team, share_attention

CPU = torch.device("cpu")


@given(length=st.integers(1, 60), size=st.integers(1, 8))
def test_the_parts_of_a_team_are_the_row_and_equally_long(length: int, size: int) -> None:
    column = np.arange(1, length + 1)
    parts = [Team(rank, size).part_of(length) for rank in range(size)]
    taken = [part.take(column) for part in parts]
    assert len({len(each) for each in taken}) == 1
    whole = np.concatenate(taken)
    assert whole[:length].tolist() == column.tolist()
    assert not whole[length:].any()
    assert len(whole) - length < size


@given(length=st.integers(2, 60), size=st.integers(1, 8), seed=st.integers(0, 99))
def test_each_place_is_held_by_one_rank(length: int, size: int, seed: int) -> None:
    places = np.flatnonzero(np.random.default_rng(seed).random(length) < 0.4)
    counts = Team(0, size).counts(Team(0, size).part_of(length), places)
    parts = [Team(rank, size).part_of(length) for rank in range(size)]
    assert counts == [int(((places >= part.first) & (places < part.first + part.size)).sum()) for part in parts]
    assert sum(counts) == len(places)


def test_what_a_row_lacks_becomes_a_sample_of_its_own() -> None:
    assert SharedRow(Team(0, 4), [5, 4], CPU).positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert SharedRow(Team(0, 3), [5, 4], CPU).positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_a_shared_row_sees_a_tokens_own_sample_and_window(window: int | None) -> None:
    row = SharedRow(Team(1, 2), [5, 6], CPU)  # rank 1's part begins within the second sample
    query = torch.zeros(1, 1, 12, 4)
    mask = row.mask("sdpa", window, query)[0, 0]
    sample = np.repeat([0, 1, 2], [5, 6, 1])
    place = positions([5, 6, 1])
    for q in range(12):
        for k in range(12):
            sees = sample[q] == sample[k] and 0 <= place[q] - place[k] < (window or 99)
            assert bool(mask[q, k]) == sees, (q, k)
    assert row.mask("sdpa", window, query) is row.mask("sdpa", window, query)


def test_a_rank_by_itself_exchanges_and_gathers_nothing() -> None:
    tensor = torch.randn(2, 3)
    assert Team().exchange(tensor) is tensor
    assert Team().gather(tensor, [3]) is tensor


@pytest.mark.parametrize(
    ("attention", "team_size", "problem"), [("eager", 2, 'attn = "eager"'), ("sdpa", 3, "4 attention heads")]
)
def test_attention_that_cannot_be_shared_is_refused(attention: str, team_size: int, problem: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None)
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(attention)
    with pytest.raises(ConfigError, match=problem):
        share_attention(model, team_size)
