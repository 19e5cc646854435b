"""Ranks that share a row."""

import numpy as np
import pytest
import torch

from support.models.families import build_attending_model, flash_on_cpu
from trireme.algo.packing import positions
from trireme.base.errors import ConfigError
from trireme.trainer.model.packing.attention import ARGUMENT, FLASH, PackedRow, row_given, use_packed_attention
from trireme.trainer.parallel.context_parallel import SharedRow, Team, share_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 3])
def test_attention_of_a_shared_row_sees_a_tokens_own_sample_and_window(window):
    row = SharedRow(Team(1, 2), [5, 6], CPU)  # rank 1's part begins within the second sample
    query = torch.zeros(1, 1, 12, 4)
    mask = row.mask("sdpa", window, query)[0, 0]
    sample, place = np.repeat([0, 1, 2], [5, 6, 1]), positions([5, 6, 1])  # what the row lacks is a sample of its own
    distance = place[:, None] - place
    expected = (sample[:, None] == sample) & (distance >= 0) & (distance < (window or 99))
    assert mask.bool().tolist() == expected.tolist()
    assert row.mask("sdpa", window, query) is row.mask("sdpa", window, query)


def test_a_team_runs_flash_attention():
    model, row = build_attending_model(), SharedRow(Team(), [5, 6], CPU)
    inputs = {"input_ids": torch.arange(11)[None], "position_ids": row.position_ids, "use_cache": False}
    with torch.no_grad(), flash_on_cpu() as windows:
        expected = model(**inputs).logits
        use_packed_attention(model, FLASH)
        share_attention(model, 1)
        with row_given():
            found = model(**inputs, shared_row=row, **{ARGUMENT: PackedRow(row.lengths, CPU)}).logits
    torch.testing.assert_close(found, expected)
    assert len(windows) == len(model.model.layers)


@pytest.mark.parametrize(("attention", "team_size", "problem"), [("eager", 2, '"eager"'), ("sdpa", 3, "4 attention")])
def test_attention_that_cannot_be_shared_is_refused(attention, team_size, problem):
    model = build_attending_model()
    model.set_attn_implementation(attention)
    with pytest.raises(ConfigError, match=problem):
        share_attention(model, team_size)
