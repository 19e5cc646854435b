"""From conversations to batches: what is kept, what is held out, and in which order samples come."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tiny import random_samples
from trireme.algo.packing import Sample
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig, Source
from trireme.config.trainer import TrainerModel
from trireme.trainer.data import Epochs, Portion, SampleFiles, SampleWriter
from trireme.trainer.mesh import World
from trireme.trainer.rendering import Tokenized
from trireme.trainer.sft_data import prepare_data, steps_of


def chat(said: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "letters.jsonl", *(chat(letter, letter * 4) for letter in 5 * "abcd"))


def build_config(folder: Path, model: Path, data: Path, **changed: object) -> SftConfig:
    sizes = {"batch_size": 16, "seq_len": 64, "device": "cpu", "threads": 1}
    config = SftConfig(output_dir=folder, data=str(data), model=TrainerModel(name=str(model)), **sizes)
    return config.model_copy(update=changed)


def write_samples(folder: Path, *samples: Tokenized, drop: bool = False) -> tuple[SampleFiles, list[list[int]]]:
    """Return the samples as they are in files, and the ids of each."""
    writer = SampleWriter(seq_len=8, drop=drop)
    for sample in samples:
        writer.add([sample])
    writer.write(folder)
    found = SampleFiles(folder)
    return found, [sample.tokens.ids.tolist() for sample in found]


def test_samples_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    rng = random.Random(0)
    samples = [Tokenized([rng.randrange(9) for _ in range(n)], [0, *[1] * (n - 1)]) for n in (3, 8, 2, 5)]
    found, ids = write_samples(tmp_path / "a", *samples)
    assert ids == [sample.ids for sample in samples]
    assert [sample.tokens.loss_mask.tolist() for sample in found] == [sample.mask for sample in samples]
    assert (found.counts.samples, found.counts.tokens, found.counts.learned) == (4, 18, 14)
    (sample,), _ = write_samples(tmp_path / "b", Tokenized([5, 6], [1, 1]))
    assert sample.tokens.loss_mask.tolist() == [0, 1]  # nothing comes before the first token to predict it from


@pytest.mark.parametrize("drop", [False, True])
def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path: Path, drop: bool) -> None:
    long, exact = Tokenized(list(range(9)), [0] * 4 + [1] * 5), Tokenized(list(range(8)), [0] * 4 + [1] * 4)
    late = Tokenized(list(range(20)), [0] * 10 + [1] * 10)  # nothing to learn is left of it
    found, ids = write_samples(tmp_path / "a", long, exact, late, drop=drop)
    assert ids == ([exact.ids] if drop else [long.ids[:8], exact.ids])
    counts = found.counts
    assert (counts.conversations, counts.cut, counts.dropped, counts.empty) == ((3, 0, 2, 0) if drop else (3, 1, 0, 1))


def epochs(samples: list[Sample], batch_size: int, seed: int = 0) -> Epochs:
    return Epochs([Portion(samples)], batch_size, seed)


def test_every_epoch_visits_each_sample_once_in_an_order_that_follows_from_seed_and_step() -> None:
    samples = random_samples([5] * 12)
    ours = epochs(samples, 8, seed=3)  # 12 samples: every third batch ends an epoch
    batches = [ours.batch(step) for step in range(6)]
    order = [samples.index(sample) for batch in batches for sample in batch]
    visits = [order[start : start + 12] for start in range(0, 48, 12)]
    assert all(sorted(visit) == list(range(12)) for visit in visits)
    assert len(set(map(tuple, visits))) == 4
    again = epochs(samples, 8, seed=3)
    assert [again.batch(step) for step in reversed(range(6))] == batches[::-1]
    assert epochs(samples, 8, seed=4).batch(0) != batches[0]
    repeated = Counter(samples.index(sample) for sample in epochs(samples[:3], 9).batch(4))
    assert repeated == {0: 3, 1: 3, 2: 3}


def test_a_source_is_in_an_epoch_as_often_as_it_says() -> None:
    samples = random_samples([5] * 16)
    portions = [Portion(samples[:4], repeat=2.5), Portion(samples[4:12]), Portion(samples[12:], repeat=0.25)]
    ours = Epochs(portions, batch_size=19, seed=1)  # 10 + 8 + 1: a batch is an epoch
    assert ours.length == 19
    visits = [Counter(samples.index(sample) for sample in ours.batch(step)) for step in range(4)]
    for visit in visits:
        assert sorted(visit[i] for i in range(4)) == [2, 2, 3, 3]
        assert [visit[i] for i in range(4, 12)] == [1] * 8
    assert sorted(i for visit in visits for i in visit if i >= 12) == [12, 13, 14, 15]
    assert [sum(visit[i] for visit in visits) for i in range(4)] == [10] * 4  # the halves take turns


def test_what_is_held_out_is_spread_over_the_data_and_never_trained_on(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    data = write_lines(tmp_path / "data.jsonl", *(chat("a", "b" * number) for number in range(1, 21)))
    config = build_config(tmp_path / "run", tiny_model, data, validation_fraction=0.25)
    found = prepare_data(config, world, Waits("sft"))
    assert found.held_out is not None
    trained = [sample for step in range(15) for sample in found.train.batch(step)]
    said = [{int(sample.tokens.loss_mask.sum()) - 1 for sample in samples} for samples in (found.held_out, trained)]
    assert said == [{4, 8, 12, 16, 20}, set(range(1, 21)) - {4, 8, 12, 16, 20}]


def test_a_run_that_goes_on_with_other_data_is_warned(
    letters: Path, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, world: World
) -> None:
    logging.getLogger("trireme.data").addHandler(caplog.handler)
    other = write_lines(tmp_path / "other.jsonl", chat("hi", "yo"))
    for data, resume, warned in ((letters, False, False), (letters, True, False), (other, True, True)):
        config = build_config(tmp_path / "run", tiny_model, data, resume=resume)
        caplog.clear()
        prepare_data(config, world, Waits("sft"))
        assert ("not those that this run began with" in caplog.text) is warned
    logging.getLogger("trireme.data").removeHandler(caplog.handler)


def test_several_sources_are_trained_on_together_if_anything_is_to_be_learned_for_as_long_as_epochs_say(
    letters: Path, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    source = Source(data=str(write_lines(tmp_path / "other.jsonl", chat("hi", "yo"))), repeat=40.0)
    config = build_config(tmp_path / "run", tiny_model, letters, source=(source,))
    train = prepare_data(config, world, Waits("sft")).train
    assert train.length == 20 + 40
    assert steps_of(config, train) == SftConfig().max_steps
    assert steps_of(config.model_copy(update={"num_epochs": 2.0}), train) == 8  # 120 samples in batches of 16
    with pytest.raises(ConfigError, match="less than a step"):
        steps_of(config.model_copy(update={"num_epochs": 0.1}), train)
    long = write_lines(tmp_path / "long.jsonl", chat("a" * 99, "b"))
    with pytest.raises(ConfigError, match=r"no sample is left \(1 conversations.*Raise `seq_len`"):
        prepare_data(build_config(tmp_path / "run", tiny_model, long), world, Waits("sft"))
