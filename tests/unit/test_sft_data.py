"""From conversations to batches: what is kept, what is held out, and in which order samples come."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path

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


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


GREETING = [said("user", "hi"), said("assistant", "yo")]


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    lines = ({"messages": [said("user", letter), said("assistant", letter * 4)]} for letter in 5 * "abcd")
    return write_lines(tmp_path / "letters.jsonl", *lines)


def build_config(folder: Path, model: Path, data: Path, **changed: object) -> SftConfig:
    config = SftConfig(
        output_dir=folder,
        data=str(data),
        batch_size=16,
        seq_len=64,
        device="cpu",
        threads=1,
        model=TrainerModel(name=str(model)),
    )
    return config.model_copy(update=changed)


# samples on disk


def write_samples(folder: Path, *samples: Tokenized, seq_len: int = 8, drop: bool = False) -> SampleFiles:
    writer = SampleWriter(seq_len=seq_len, drop=drop)
    for sample in samples:
        writer.add([sample])
    writer.write(folder)
    return SampleFiles(folder)


def ids_of(samples: SampleFiles) -> list[list[int]]:
    return [sample.tokens.ids.tolist() for sample in samples]


def test_samples_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    rng = random.Random(0)
    samples = [Tokenized([rng.randrange(9) for _ in range(n)], [0, *[1] * (n - 1)]) for n in (3, 8, 2, 5)]
    found = write_samples(tmp_path / "a", *samples)
    assert ids_of(found) == [sample.ids for sample in samples]
    assert [sample.tokens.loss_mask.tolist() for sample in found] == [sample.mask for sample in samples]
    assert (found.counts.samples, found.counts.tokens, found.counts.learned) == (4, 18, 14)
    (sample,) = write_samples(tmp_path / "b", Tokenized([5, 6], [1, 1]))
    assert sample.tokens.loss_mask.tolist() == [0, 1]  # nothing comes before the first token to predict it from


@pytest.mark.parametrize("drop", [False, True])
def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path: Path, drop: bool) -> None:
    long, exact = Tokenized(list(range(9)), [0] * 4 + [1] * 5), Tokenized(list(range(8)), [0] * 4 + [1] * 4)
    late = Tokenized(list(range(20)), [0] * 10 + [1] * 10)  # nothing to learn is left of it
    found = write_samples(tmp_path / "a", long, exact, late, drop=drop)
    assert ids_of(found) == ([exact.ids] if drop else [long.ids[:8], exact.ids])
    counts = found.counts
    assert (counts.conversations, counts.cut, counts.dropped, counts.empty) == ((3, 0, 2, 0) if drop else (3, 1, 0, 1))


# the order of the data


def epochs(samples: list[Sample], batch_size: int, seed: int) -> Epochs:
    return Epochs([Portion(samples)], batch_size, seed)


def test_every_epoch_visits_each_sample_once_in_an_order_that_follows_from_seed_and_step() -> None:
    samples = random_samples([5] * 12)
    ours = epochs(samples, batch_size=8, seed=3)  # 12 samples: every third batch ends an epoch
    batches = [ours.batch(step) for step in range(6)]
    order = [samples.index(sample) for batch in batches for sample in batch]
    visits = [order[start : start + 12] for start in range(0, 48, 12)]
    assert all(sorted(visit) == list(range(12)) for visit in visits)
    assert len(set(map(tuple, visits))) == 4
    again = epochs(samples, 8, seed=3)
    assert [again.batch(step) for step in reversed(range(6))] == batches[::-1]
    assert epochs(samples, 8, seed=4).batch(0) != batches[0]
    repeated = Counter(samples.index(sample) for sample in epochs(samples[:3], 9, seed=0).batch(4))
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
    lines = [{"messages": [said("user", "a"), said("assistant", "b" * (number + 1))]} for number in range(20)]
    data = write_lines(tmp_path / "data.jsonl", *lines)
    config = build_config(tmp_path / "run", tiny_model, data, validation_fraction=0.25)
    found = prepare_data(config, world, Waits("sft"))
    assert found.held_out is not None

    def said_in(samples: list[Sample] | SampleFiles) -> list[int]:
        return sorted(int(sample.tokens.loss_mask.sum()) - 1 for sample in samples)

    assert said_in(found.held_out) == [4, 8, 12, 16, 20]
    trained = said_in([sample for step in range(15) for sample in found.train.batch(step)])
    assert sorted(set(trained)) == sorted(set(range(1, 21)) - {4, 8, 12, 16, 20})


def test_a_run_that_goes_on_with_other_data_is_warned(
    letters: Path, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, world: World
) -> None:
    logging.getLogger("trireme.data").addHandler(caplog.handler)
    other = write_lines(tmp_path / "other.jsonl", {"messages": GREETING})
    for data, resume, warned in ((letters, False, False), (letters, True, False), (other, True, True)):
        config = build_config(tmp_path / "run", tiny_model, data, resume=resume)
        caplog.clear()
        prepare_data(config, world, Waits("sft"))
        assert ("not those that this run began with" in caplog.text) is warned
    logging.getLogger("trireme.data").removeHandler(caplog.handler)


def test_several_sources_are_trained_on_together_if_anything_is_to_be_learned(
    letters: Path, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    other = write_lines(tmp_path / "other.jsonl", {"messages": GREETING})
    config = build_config(tmp_path / "run", tiny_model, letters, source=(Source(data=str(other), repeat=40.0),))
    assert prepare_data(config, world, Waits("sft")).train.length == 20 + 40
    long = write_lines(tmp_path / "long.jsonl", {"messages": [said("user", "a" * 99), said("assistant", "b")]})
    with pytest.raises(ConfigError, match=r"no sample is left \(1 conversations.*Raise `seq_len`"):
        prepare_data(build_config(tmp_path / "run", tiny_model, long), world, Waits("sft"))


def test_a_run_is_as_long_as_its_epochs_say(tiny_model: Path, letters: Path, tmp_path: Path) -> None:
    def steps(**changed: object) -> int:
        config = build_config(tmp_path, tiny_model, letters, **changed)
        return steps_of(config, epochs(random_samples([5] * 40), config.batch_size, 0))

    assert steps() == SftConfig().max_steps
    assert steps(num_epochs=2.0) == 5  # 80 samples in batches of 16
    with pytest.raises(ConfigError, match="less than a step"):
        steps(num_epochs=0.1)
