"""What ranks are handed of a batch: alike for whoever asks, worked out once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from beats import with_beats
from tiny import num_loss_samples, num_loss_tokens, random_samples
from trireme.algo.cost import LINEAR, cost_of
from trireme.algo.packing import Sample, num_learned
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import TrainerConfig, TrainerModel
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.ledger.shares import Shares, cost_of_model, row_capacity, row_cost, share_of
from trireme.messages import BatchReply, build_tokens, encode
from trireme.trainer.forward import places_of

LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]
SHAPE = {
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 4,
    "vocab_size": 8,
}


class Counting(Journal):
    """Says how often it is read."""

    num_reads = 0

    def read(self, step: int) -> BatchRecord:
        self.num_reads += 1
        return super().read(step)


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
def journal(tmp_path: Path) -> Counting:
    journal = Counting(tmp_path / "journal")
    for step in range(2):
        journal.append(record_of(step))
    return Counting(tmp_path / "journal")


def test_all_ranks_get_their_share_of_one_reading(journal: Counting, model: str) -> None:
    config = RunConfig(seq_len=48, model=Model(name=model))
    shares = Shares(journal, config)
    for step in range(2):
        for rank in range(3):
            alone = share_of(record_of(step), rank=rank, world=3, capacity=48, cost=row_cost(config))
            assert encode(shares.of(step, rank=rank, world=3)) == encode(alone)
    assert journal.num_reads == 2
    samples = random_samples(LENGTHS, seed=1)
    found = shares.of(1, rank=0, world=1)
    assert (found.loss_tokens, found.loss_samples) == (num_loss_tokens(samples), num_loss_samples(samples))
    assert sorted(length for row in found.micro_batches for length in row.lengths) == sorted(LENGTHS)


def test_a_first_token_that_was_sampled_counts_no_more_than_it_is_trained_on() -> None:
    """Nothing stands before it that it could be predicted from: an empty prompt."""
    masks = [[1, 1, 1], [0, 1], [1]]
    rows = [
        build_tokens(ids=mask, loss_mask=mask, logprobs=[0] * len(mask), advantages=mask, versions=[0] * len(mask))
        for mask in masks
    ]
    record = BatchRecord(0, [Rollout(0, 0, 0, "env", 0, 0.0, rows, 1.0)], [], State(next_batch=1))
    found = share_of(record, rank=0, world=1, capacity=16)
    places, _ = places_of(found.micro_batches[0])
    assert (found.loss_tokens, found.loss_samples) == (len(places), 2) == (3, 2)
    assert num_learned([Sample(tokens, 1.0) for tokens in rows]) == [2, 1, 0]


def test_a_row_costs_by_the_sizes_of_the_trained_model(tmp_path: Path, model: str) -> None:
    trainer = TrainerConfig(model=TrainerModel(attn="flash_attention_2"))
    config = RunConfig(model=Model(name=model), trainer=trainer)
    assert row_cost(config) == cost_of(SHAPE, attention="flash_attention_2") != LINEAR
    other = TrainerConfig(model=TrainerModel(name=model))
    assert row_cost(RunConfig(model=Model(name="other"), trainer=other)) == cost_of(SHAPE, attention="sdpa")
    for name in (None, str(tmp_path / "nothing"), "nobody/has-downloaded-it"):
        assert cost_of_model(name, attention="sdpa") == LINEAR


def test_ranks_that_share_a_row_share_its_capacity() -> None:
    config = RunConfig(seq_len=64, trainer=TrainerConfig(model=TrainerModel(cp=4)))
    assert row_capacity(config) == 64
    assert row_capacity(RunConfig(seq_len=64, trainer=TrainerConfig(micro_batch_tokens=128))) == 128


@pytest.mark.parametrize("world", [1, 3])
def test_shares_dealt_by_turns_are_the_same_and_let_others_run_between_rows(journal: Counting, world: int) -> None:
    shares, config = Shares(journal, RunConfig(seq_len=48)), RunConfig(seq_len=48)

    async def ask() -> list[BatchReply]:
        asked = [(step, rank) for step in (0, 1) for rank in range(world)]
        return await asyncio.gather(*(shares.by_turns(step, rank=rank, world=world) for step, rank in asked))

    found = asyncio.run(ask())
    alone = [Shares(journal, config).of(step, rank=rank, world=world) for step in (0, 1) for rank in range(world)]
    assert list(map(encode, found)) == list(map(encode, alone))
    reply, beats = asyncio.run(with_beats(Shares(journal, config).by_turns(0, rank=0, world=1)))
    assert beats > len(reply.micro_batches) > 1
