"""Data that are prepared for training: held out, repeated, and cut into steps."""

from pathlib import Path
from typing import Any

import pytest

from support.models.conversations import chat, write_lines
from support.models.tiny import random_samples
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig, Source
from trireme.config.trainer import TrainerModel
from trireme.trainer.parallel.mesh import World
from trireme.trainer.sft.dataset import Epochs, Portion
from trireme.trainer.sft.prepare_data import prepare_data, steps_of


def test_batches_of_another_size_continue_with_the_next_sample():
    samples = random_samples([5] * 12)
    ours, whole = Epochs([Portion(samples)], 8, 3, [(2, 2), (3, 5)]), Epochs([Portion(samples)], 1, 3)
    sizes = [len(ours.batch(step)) for step in range(5)]
    assert (sizes, ours.passed(3), ours.taken(5)) == ([2, 2, 5, 8, 8], 9 / 12, 25)
    order = [sample for step in range(5) for sample in ours.batch(step)]
    assert order == [whole.batch(place)[0] for place in range(25)]
    by_epochs = SftConfig(data="x", num_epochs=2.0, batch_size=8)
    assert steps_of(by_epochs, ours, 3) == 3 + 2  # 15 samples are left
    assert steps_of(by_epochs.model_copy(update={"num_epochs": 0.5}), ours, 3) == 3


def prepare(folder: Path, name: Path, data: Path, world: World, **changed: object) -> tuple[Epochs, Any, SftConfig]:
    sizes = {"batch_size": 16, "seq_len": 64, "device": "cpu", "threads": 1}
    config = SftConfig(output_dir=folder, data=str(data), model=TrainerModel(name=str(name)), **sizes)
    config = config.model_copy(update=changed)
    return *prepare_data(config, world, Waits("sft")), config


def test_what_is_held_out_is_spread_over_the_data_and_never_trained_on(tiny_model, tmp_path, world):
    data = write_lines(tmp_path / "data.jsonl", *(chat("a", "b" * number) for number in range(1, 21)))
    train, held_out, _ = prepare(tmp_path / "run", tiny_model, data, world, validation_fraction=0.25)
    trained = [sample for step in range(15) for sample in train.batch(step)]
    lengths = [{int(sample.tokens.loss_mask.sum()) - 1 for sample in samples} for samples in (held_out, trained)]
    assert lengths == [{4, 8, 12, 16, 20}, set(range(1, 21)) - {4, 8, 12, 16, 20}]
    everything, none, _ = prepare(tmp_path / "run", tiny_model, data, world, resume=True)
    assert (everything.length, none) == (20, None)
    with pytest.raises(ConfigError, match=r"validation_fraction = 0.01 holds out none of 20"):
        prepare(tmp_path / "few", tiny_model, data, world, validation_fraction=0.01)


def test_sources_are_trained_on_together_for_as_long_as_epochs_say(tiny_model, tmp_path, world):
    letters = write_lines(tmp_path / "letters.jsonl", *(chat(letter, letter * 4) for letter in 5 * "abcd"))
    source = Source(data=str(write_lines(tmp_path / "other.jsonl", chat("hi", "yo"))), repeat=40.0)
    train, _, config = prepare(tmp_path / "run", tiny_model, letters, world, source=(source,))
    assert train.length == 20 + 40
    assert steps_of(config, train) == SftConfig().max_steps
    assert steps_of(config.model_copy(update={"num_epochs": 2.0}), train) == 8  # 120 samples in batches of 16
    with pytest.raises(ConfigError, match="less than a step"):
        steps_of(config.model_copy(update={"num_epochs": 0.1}), train)
    rare = source.model_copy(update={"repeat": 0.4})
    with pytest.raises(ConfigError, match=r"repeat = 0.4 of .*other.jsonl, which has 1 samples"):
        prepare(tmp_path / "run", tiny_model, letters, world, source=(rare,))
    long = write_lines(tmp_path / "long.jsonl", chat("a" * 99, "b"))
    with pytest.raises(ConfigError, match=r"no sample is left \(1 conversations.*Raise `seq_len`"):
        prepare(tmp_path / "run", tiny_model, long, world)
