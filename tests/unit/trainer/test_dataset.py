"""Samples on disk, and the order in which epochs visit them."""

from collections import Counter
from pathlib import Path

import pytest

from support.models.tiny import random_samples
from trireme.algo.packing import Sample
from trireme.messages import Picture
from trireme.trainer.sft.dataset import Counts, Epochs, Portion, SampleFiles, SampleWriter
from trireme.trainer.sft.rendering import Tokenized


def write_samples(folder: Path, *samples: Tokenized, drop: bool = False) -> tuple[list[Sample], Counts]:
    writer = SampleWriter(seq_len=8, drop=drop)
    for sample in samples:
        writer.add([sample])
    writer.write(folder)
    files = SampleFiles(folder)
    return [files[index] for index in range(len(files))], writer.counts


@pytest.mark.parametrize("drop", [False, True])
def test_samples_come_back_from_disk_as_they_were_but_for_what_is_too_long(tmp_path, drop):
    """No token before the first one predicts it. A sample whose picture would be cut is left out."""
    short = [Tokenized(list(range(n, 2 * n)), [1, 1, *[0] * (n - 2)]) for n in (3, 8, 2)]
    long = Tokenized(list(range(9)), [0] * 4 + [1] * 5)
    late = Tokenized(list(range(20)), [0] * 10 + [1] * 10)  # nothing to learn is left of it
    found, counts = write_samples(tmp_path / "a", *short, long, late, drop=drop)
    kept = short if drop else [*short, Tokenized(long.ids[:8], long.mask[:8])]
    assert [sample.tokens.ids.tolist() for sample in found] == [sample.ids for sample in kept]
    assert [sample.tokens.loss_mask.tolist() for sample in found] == [[0, *sample.mask[1:]] for sample in kept]
    assert counts == (Counts(5, 3, 13, 3, dropped=2) if drop else Counts(5, 4, 21, 7, cut=1, empty=1))
    pictures = [Picture("a" * 64, place, 1, 2) for place in (6, 7, 8)]
    shown = [Tokenized(list(range(12)), [0, 1, *[0] * 10], (picture,)) for picture in pictures]
    found, counts = write_samples(tmp_path / "b", *shown)
    assert [list(each.tokens.pictures) for each in found] == [pictures[:1], []]
    assert counts.parted == 1


def test_every_sft_epoch_visits_each_sample_once():
    samples = random_samples([5] * 12)
    ours, again, other = (Epochs([Portion(samples)], 8, seed) for seed in (3, 3, 4))
    batches = [ours.batch(step) for step in range(6)]  # every third batch ends an epoch
    order = [samples.index(sample) for batch in batches for sample in batch]
    visits = [order[start : start + 12] for start in range(0, 48, 12)]
    assert all(sorted(visit) == list(range(12)) for visit in visits)
    assert len(set(map(tuple, visits))) == 4
    assert [again.batch(step) for step in reversed(range(6))] == batches[::-1]
    assert other.batch(0) != batches[0]
    repeated = Counter(samples.index(sample) for sample in Epochs([Portion(samples[:3])], 9, 0).batch(4))
    assert repeated == {0: 3, 1: 3, 2: 3}


def test_a_source_is_in_an_epoch_as_often_as_it_says():
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
