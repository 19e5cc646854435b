"""What ranks are handed of a batch: alike for whoever asks, worked out once."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest

from beats import with_beats
from tiny import num_loss_samples, num_loss_tokens, random_samples
from trireme.algo.cost import LINEAR, cost_of
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import TrainerConfig, TrainerModel
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.ledger.shares import Shares, cost_of_model, row_capacity, row_cost, share_of
from trireme.messages import BatchReply, encode

LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]
SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4, "vocab_size": 8}
SHAPE = {"model_type": "llama"} | SIZES


def record_of(step: int) -> BatchRecord:
    rollouts = [
        Rollout(step, place, 0, "env", 0, 0.0, [sample.tokens], sample.temperature)
        for place, sample in enumerate(random_samples(LENGTHS, seed=step))
    ]
    return BatchRecord(step, rollouts, [], State(next_batch=step + 1))


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return str(folder)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal")
    for step in range(2):
        journal.append(record_of(step))
    return Journal(tmp_path / "journal")


def test_all_ranks_get_their_share_of_one_reading(journal: Journal, model: str) -> None:
    config = RunConfig(seq_len=48, model=Model(name=model))
    shares = Shares(journal, config)
    with patch.object(journal, "read", wraps=journal.read) as reading:
        for step, rank in product(range(2), range(3)):
            alone = share_of(record_of(step), rank=rank, world=3, capacity=48, cost=row_cost(config))
            assert encode(shares.of(step, rank=rank, world=3)) == encode(alone)
    assert reading.call_count == 2
    samples = random_samples(LENGTHS, seed=1)
    found = shares.of(1, rank=0, world=1)
    assert (found.loss_tokens, found.loss_samples) == (num_loss_tokens(samples), num_loss_samples(samples))
    assert sorted(length for row in found.micro_batches for length in row.lengths) == sorted(LENGTHS)


def test_a_row_costs_by_the_sizes_of_the_trained_model_and_has_its_capacity(tmp_path: Path, model: str) -> None:
    trainer = TrainerConfig(model=TrainerModel(attn="flash_attention_2"))
    config = RunConfig(model=Model(name=model), trainer=trainer)
    assert row_cost(config) == cost_of(SHAPE, attention="flash_attention_2") != LINEAR
    other = TrainerConfig(model=TrainerModel(name=model))
    assert row_cost(RunConfig(model=Model(name="other"), trainer=other)) == cost_of(SHAPE, attention="sdpa")
    for name in (None, str(tmp_path / "nothing"), "nobody/has-downloaded-it"):
        assert cost_of_model(name, attention="sdpa") == LINEAR
    # the capacity of a row is shared by the ranks that share the row
    assert row_capacity(RunConfig(seq_len=64, trainer=TrainerConfig(model=TrainerModel(cp=4)))) == 64
    assert row_capacity(RunConfig(seq_len=64, trainer=TrainerConfig(micro_batch_tokens=128))) == 128


@pytest.mark.parametrize("world", [1, 3])
def test_shares_dealt_by_turns_are_the_same_and_let_others_run_between_rows(journal: Journal, world: int) -> None:
    shares, config = Shares(journal, RunConfig(seq_len=48)), RunConfig(seq_len=48)

    async def ask() -> list[BatchReply]:
        asked = [(step, rank) for step in (0, 1) for rank in range(world)]
        return await asyncio.gather(*(shares.by_turns(step, rank=rank, world=world) for step, rank in asked))

    found = asyncio.run(ask())
    alone = [Shares(journal, config).of(step, rank=rank, world=world) for step in (0, 1) for rank in range(world)]
    assert list(map(encode, found)) == list(map(encode, alone))
    reply, beats = asyncio.run(with_beats(Shares(journal, config).by_turns(0, rank=0, world=1)))
    assert beats > len(reply.micro_batches) > 1
