"""The audit finds nothing in a run that did what it should, at any moment of it, and every fault that is planted."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trireme.base.errors import ConfigError
from trireme.cli.audit import audit
from trireme.config.run import RunConfig
from trireme.launch.rewind import rewind
from trireme.ledger.entry import write_entry
from trireme.ledger.journal import Journal
from trireme.ledger.manifest import MANIFEST
from trireme.ledger.records import BatchRecord, Cursor, Dropped, OpenGroup
from trireme.ledger.versions import Confirmation, Version, Versions
from trireme.monitor.audit.audit import audit_run
from trireme.monitor.audit.report import Report
from written_run import (
    GROUP,
    WrittenRun,
    build_config,
    digests_of,
    rewrite_batch,
    rewrite_version,
    write_whole_run,
)

DEADLINE_S = 60


def all_of(report: Report) -> str:
    return report.text(everything=True)


def assert_holds(folder: Path) -> Report:
    report = audit_run(folder)
    assert report.holds, all_of(report)
    return report


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> RunConfig:
    return write_whole_run(tmp_path_factory.mktemp("written") / "run")


@pytest.fixture
def config(written, tmp_path) -> RunConfig:
    """A run of five batches of one's own, to plant a fault in."""
    shutil.copytree(written.paths.root, tmp_path / "run")
    return written.model_copy(update={"output_dir": tmp_path / "run"})


# runs that did what they should


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_it_holds_at_every_moment_of_a_run(tmp_path, level, seed):
    """Whatever was written last: a process may be killed between any two files."""
    run = WrittenRun(build_config(tmp_path, max_async_level=level, seed=seed))
    moments = [(moment, assert_holds(tmp_path)) for moment in run.write(6)]
    report = moments[-1][1]
    assert len(moments) > 30
    assert report.summary.batches == 6
    assert report.summary.trained == 36
    assert report.summary.checkpoints == [2, 4, 6]
    assert report.summary.lag == ((0, 0) if level == 0 else (0, 2)) or level
    assert len(report.summary.dropped_for) > 1


def test_it_holds_where_the_last_line_of_the_metrics_is_cut_off_anywhere(config):
    content = config.paths.metrics.read_bytes()
    newest = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(newest, len(content)):
        config.paths.metrics.write_bytes(content[:end])
        assert_holds(config.paths.root)


def test_it_holds_at_every_moment_of_going_back_and_of_the_other_way_from_there(config):
    rewound = [*_moves_of_going_back(config, version=2)]
    assert len(rewound) > 6
    for source, target in rewound:
        target.parent.mkdir(exist_ok=True)
        source.rename(target)
        assert_holds(config.paths.root)
    for _ in WrittenRun(config).go_on(2, 5):
        assert_holds(config.paths.root)
    report = assert_holds(config.paths.root)
    assert report.summary.batches == 5
    assert report.summary.set_aside
    assert "ways not taken, set aside: checkpoints/set_aside_" in report.text(everything=False)


def _moves_of_going_back(config: RunConfig, version: int) -> Iterator[tuple[Path, Path]]:
    """One file after the other, as `rewind` moves them: by kind, the newest first."""
    root, twin = config.paths.root, config.paths.root.with_name("twin")
    shutil.copytree(root, twin)
    rewind(type(config.paths)(twin), version)
    order = ["checkpoints/step_", "journal/version_", "weights/step_", "journal/batch_"]
    moved = [path.relative_to(twin) for path in twin.glob("*/set_aside_*/*")]
    moved.sort(key=lambda path: path.name, reverse=True)
    moved.sort(key=lambda path: [f"{path.parts[0]}/{path.name}".startswith(kind) for kind in order].index(True))
    for path in moved:
        yield root / path.parts[0] / path.name, root / path


def test_a_run_that_goes_on_from_where_it_was_cut_off_after_going_back_half_way_holds(config):
    """Its versions were set aside, its batches were not: it goes on along its old way, and confirms them anew."""
    for source, target in _moves_of_going_back(config, version=2):
        if "batch" not in source.name:
            target.parent.mkdir(exist_ok=True)
            source.rename(target)
    versions = Versions(config.paths.journal)
    for version in (3, 4, 5):
        assert_holds(config.paths.root)
        versions.record(version, ["http://127.0.0.1:8000"], digests_of(version), 1e-7)
    assert_holds(config.paths.root)


def test_the_summary_counts_what_there_is(config):
    records = [Journal(config.paths.journal).read(step) for step in range(5)]
    summary = assert_holds(config.paths.root).summary
    assert summary.trained == 30
    assert summary.dropped == sum(len(record.dropped) for record in records)
    assert summary.dropped == sum(summary.dropped_for.values())
    assert summary.groups == records[-1].state.next_group
    assert summary.open_groups == len(records[-1].state.open_groups)
    samples = [sample for record in records for rollout in record.rollouts for sample in rollout.samples]
    assert summary.trained_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert summary.versions_confirmed == 6


def test_a_run_that_has_only_begun_holds(tmp_path):
    next(WrittenRun(build_config(tmp_path)).write(1))
    assert assert_holds(tmp_path).summary.batches == 0


def test_a_run_that_was_moved_holds_where_it_lies_now(config, tmp_path):
    shutil.move(config.paths.root, tmp_path / "elsewhere")
    assert_holds(tmp_path / "elsewhere")


def test_a_version_may_be_confirmed_again(config):
    Versions(config.paths.journal).record(5, ["http://127.0.0.1:8001"], digests_of(5), 0.0)
    assert_holds(config.paths.root)


def test_an_export_that_somebody_took_away_is_worth_a_note(config):
    shutil.rmtree(config.paths.weights / "step_2")
    report = assert_holds(config.paths.root)
    assert "no export of checkpoint 2" in report.findings.notes[0]


# faults, and how they are named


def trained_group(record: BatchRecord) -> int:
    """The second of a batch."""
    return sorted({rollout.group for rollout in record.rollouts})[1]


def step_with(config: RunConfig, reason: str) -> int:
    """The first batch that dropped something for it."""
    journal = Journal(config.paths.journal)
    found = (s for s in journal.steps() if any(d.reason.startswith(reason) for d in journal.read(s).dropped))
    return next(found)


def change_batch(step: int, change: Callable[[BatchRecord], Any]) -> Callable[[RunConfig], None]:
    return lambda config: rewrite_batch(config, step, change)


def change_column(name: str, value: Any, *, masked: bool = True, step: int = 3) -> Callable[[RunConfig], None]:
    """One token of one rollout, that is trained on or not."""

    def change(record: BatchRecord) -> None:
        sample = record.rollouts[4].samples[0]
        column = getattr(sample, name).copy()
        column[int(np.flatnonzero(sample.loss_mask == masked)[-1])] = value
        record.rollouts[4].samples[0] = msgspec.structs.replace(sample, **{name: column})

    return change_batch(step, change)


def change_lines(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[RunConfig], None]:
    def plant(config: RunConfig) -> None:
        rows = [json.loads(line) for line in config.paths.metrics.read_text().splitlines()]
        change(rows)
        config.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return plant


def row_of(rows: list[dict[str, Any]], process: str, step: int) -> dict[str, Any]:
    return next(row for row in rows if (row["process"], row["step"]) == (process, step))


def damage(path: str, change: Callable[[bytes], bytes]) -> Callable[[RunConfig], None]:
    def plant(config: RunConfig) -> None:
        file = config.paths.root / path
        file.write_bytes(change(file.read_bytes()))

    return plant


def remove(path: str) -> Callable[[RunConfig], None]:
    return lambda config: (config.paths.root / path).unlink()


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def train_a_group_again(config: RunConfig) -> None:
    before = Journal(config.paths.journal).read(1).rollouts[:GROUP]
    rewrite_batch(config, 3, lambda record: record.rollouts.extend(copy.deepcopy(before)))


def exchange_a_group_for_one_that_was_trained(config: RunConfig) -> None:
    before = Journal(config.paths.journal).read(1).rollouts[:GROUP]

    def change(record: BatchRecord) -> None:
        record.rollouts[:GROUP] = before

    rewrite_batch(config, 3, change)


def exchange_examples(record: BatchRecord) -> None:
    one, other = record.rollouts[:GROUP], record.rollouts[GROUP:]
    examples = one[0].example, other[0].example
    assert one[0].env != other[0].env or examples[0] != examples[1]
    for rollout in one:
        rollout.env, rollout.example = other[0].env, examples[1]


def remove_dropped(reason: str) -> Callable[[RunConfig], None]:
    def change(record: BatchRecord) -> None:
        record.dropped.remove(next(drop for drop in record.dropped if drop.reason.startswith(reason)))

    return lambda config: rewrite_batch(config, step_with(config, reason), change)


def forget_an_open_group(record: BatchRecord) -> None:
    record.state.open_groups.pop()


def reopen_what_was_trained(record: BatchRecord) -> None:
    rollout = record.rollouts[0]
    record.state.open_groups.append(OpenGroup(rollout.group, rollout.env, rollout.example))


def exchange_an_open_groups_example(record: BatchRecord) -> None:
    group = record.state.open_groups[0]
    record.state.open_groups[0] = msgspec.structs.replace(group, example=group.example + 1)


def forget_an_open_group_for_good(config: RunConfig) -> None:
    """In the newest batch: nothing later could mention it."""
    rewrite_batch(config, 4, forget_an_open_group)


def lose_a_group_between_two_batches(config: RunConfig) -> None:
    """It is open in one entry, and in the next one neither open nor decided."""
    journal = Journal(config.paths.journal)
    lost = journal.read(1).state.open_groups[0].id

    def change(record: BatchRecord) -> None:
        record.rollouts = [rollout for rollout in record.rollouts if rollout.group != lost]
        record.dropped = [dropped for dropped in record.dropped if dropped.group != lost]
        record.state.open_groups = [group for group in record.state.open_groups if group.id != lost]

    for step in (2, 3, 4):
        rewrite_batch(config, step, change)


def take_confirmations_away(version: Version) -> None:
    version.confirmations.clear()


def confirm_otherwise(config: RunConfig) -> None:
    """A second time, with one tensor that is another."""
    Versions(config.paths.journal).record(
        3, ["http://127.0.0.1:8000"], digests_of(3) | {"model.norm.weight": "other"}, 0.0
    )


def rename_checkpoint(config: RunConfig) -> None:
    (config.paths.checkpoints / "step_4").rename(config.paths.checkpoints / "step_5")


def set_counter(record: BatchRecord) -> None:
    record.state.counters["trained"] += 1


def set_cursor(record: BatchRecord) -> None:
    cursor = record.state.cursors["a"]
    record.state.cursors["a"] = Cursor(cursor.epoch, cursor.position + 1)


FAULTS: dict[str, tuple[Callable[[RunConfig], Any], int, str]] = {
    # journal
    "a batch is gone": (remove("journal/batch_000002.msgpack"), 2, "batch 2 is missing, and batch 4 is there"),
    "the first batch is gone": (remove("journal/batch_000000.msgpack"), 0, "batch 0 is missing"),
    "the newest batch is gone": (remove("journal/batch_000004.msgpack"), 4, "there are 4 batches"),
    "a batch is torn": (damage("journal/batch_000002.msgpack", lambda content: content[:-9]), 2, "do not match"),
    "a bit of a batch is flipped": (damage("journal/batch_000001.msgpack", flip_last), 1, "do not match"),
    "a batch is another one": (
        lambda config: shutil.copy(
            config.paths.journal / "batch_000001.msgpack", config.paths.journal / "batch_000003.msgpack"
        ),
        3,
        r"batch_000003\.msgpack holds entry 1",
    ),
    "the next batch is another": (
        change_batch(2, lambda record: setattr(record.state, "next_batch", 2)),
        2,
        "batch 2 and that 2 is next",
    ),
    # fates
    "a rollout is gone": (change_batch(2, lambda record: record.rollouts.pop(1)), 2, "place 1 has no fate"),
    "a group is gone": (
        change_batch(2, lambda record: record.rollouts.__delitem__(slice(GROUP))),
        2,
        "began and had no fate|3 rollouts of 1 groups",
    ),
    "a rollout is there twice": (
        change_batch(2, lambda record: record.rollouts.append(record.rollouts[4])),
        2,
        "place 1 has attempt 0 trained, attempt 0 trained",
    ),
    "a rollout stands in for another": (
        change_batch(2, lambda record: record.rollouts.__setitem__(0, record.rollouts[1])),
        2,
        "place 0 has no fate",
    ),
    "a group is trained again": (train_a_group_again, 3, r"is trained here, and batch 1 had decided it before"),
    "a group is trained again, instead of another": (
        exchange_a_group_for_one_that_was_trained,
        3,
        "is trained here, and batch 1 had decided it before",
    ),
    "a failed attempt is gone": (remove_dropped("score: KeyError"), -1, "place 1 has attempt 1 trained"),
    "a dropped rollout is gone": (remove_dropped("no signal"), -1, "place 0 has no fate"),
    "a group is dropped in part": (remove_dropped("stale"), -1, "place 0 has no fate"),
    "one was tried too often": (
        lambda config: rewrite_batch(
            config,
            step_with(config, "timeout"),
            lambda record: record.dropped.append(
                msgspec.structs.replace(next(d for d in record.dropped if d.reason.startswith("timeout")), attempt=2)
            ),
        ),
        -1,
        "attempt 2 dropped",
    ),
    "one is dropped without a reason": (
        lambda config: rewrite_batch(
            config, step_with(config, "no signal"), lambda record: setattr(record.dropped[0], "reason", "")
        ),
        -1,
        "dropped without a reason",
    ),
    "a trained one is dropped as well": (
        change_batch(
            2,
            lambda record: record.dropped.append(
                Dropped(record.rollouts[0].group, 0, 1, record.rollouts[0].env, record.rollouts[0].example, "stale: x")
            ),
        ),
        2,
        "place 0 has attempt 0 trained, attempt 1 dropped",
    ),
    "an open group is forgotten": (forget_an_open_group_for_good, 4, "began and had no fate until now"),
    "an open group is forgotten once": (change_batch(2, forget_an_open_group), 2, "began and had no fate until now"),
    "an open group is never heard of again": (lose_a_group_between_two_batches, 2, "began and had no fate until now"),
    "a trained group is open again": (
        change_batch(3, reopen_what_was_trained),
        3,
        "as open, and batch 3 has decided it",
    ),
    "an open group is listed twice": (
        change_batch(3, lambda record: record.state.open_groups.append(record.state.open_groups[0])),
        3,
        "as open, and it is listed twice",
    ),
    "groups are skipped": (
        change_batch(4, lambda record: setattr(record.state, "next_group", record.state.next_group + 2)),
        4,
        "began and had no fate until now",
    ),
    "group numbers go back": (
        change_batch(4, lambda record: setattr(record.state, "next_group", 1)),
        4,
        "the next group is 1",
    ),
    "group numbers leap": (
        change_batch(4, lambda record: setattr(record.state, "next_group", 10**15)),
        4,
        "the next group is 1000000000000000",
    ),
    "the counter of rollouts is wrong": (change_batch(2, set_counter), 2, "the journal counts 19 rollouts trained"),
    # the data order
    "an example is another": (change_batch(2, exchange_examples), 2, "group .* is . example"),
    "one rollout has another example": (
        change_batch(2, lambda record: setattr(record.rollouts[0], "example", record.rollouts[0].example + 1)),
        2,
        "place 0, attempt 0 is . example",
    ),
    "an open group has another example": (change_batch(3, exchange_an_open_groups_example), 3, "open group .* is"),
    "the place in the data is another": (change_batch(4, set_cursor), 4, "the journal's place in the data is a epoch"),
    "the data set is another": (
        change_batch(3, lambda record: record.state.sizes.update(a=8)),
        3,
        "a 8, b 5 training examples",
    ),
    "the data set is unknown": (change_batch(0, lambda record: record.state.sizes.clear()), 0, "training sets as none"),
    # tokens
    "a token is too old": (change_column("versions", 0), 3, "token . has 0 in `versions`"),
    "a token is of the future": (change_column("versions", 4), 3, "token . has 4 in `versions`"),
    "a trained token has no version": (change_column("versions", -1), 3, "token . has -1 in `versions`"),
    "a given token has a version": (change_column("versions", 2, masked=False), 3, "token . has 2 in `versions`"),
    "a given token has an advantage": (
        change_column("advantages", 0.5, masked=False),
        3,
        "token . has 0.5 in `advantages`",
    ),
    "a given token has a logprob": (change_column("logprobs", -0.5, masked=False), 3, "has -0.5 in `logprobs`"),
    "an advantage is another": (change_column("advantages", 0.375), 3, "token . has 0.375 in `advantages`"),
    "a logprob is no number": (change_column("logprobs", np.nan), 3, "has nan in `logprobs`"),
    "a logprob is of no probability": (change_column("logprobs", 0.5), 3, "has 0.5 in `logprobs`"),
    "a token is trained on that nobody sampled": (change_column("loss_mask", 1, masked=False), 3, "-1 in `versions`"),
    "a token is not trained on": (change_column("loss_mask", 0), 3, "in `versions`"),
    "a column is too short": (
        change_batch(
            3,
            lambda record: record.rollouts[4].samples.__setitem__(
                0,
                msgspec.structs.replace(
                    record.rollouts[4].samples[0], logprobs=record.rollouts[4].samples[0].logprobs[:-1]
                ),
            ),
        ),
        3,
        "values of float32 in `logprobs`",
    ),
    "a rollout has no tokens": (
        change_batch(3, lambda record: record.rollouts[4].samples.clear()),
        3,
        "has no token that is trained on",
    ),
    "a reward is another": (
        change_batch(3, lambda record: setattr(record.rollouts[4], "reward", 9.0)),
        3,
        "in `advantages`",
    ),
    "a temperature is another": (
        change_batch(3, lambda record: setattr(record.rollouts[4], "temperature", 0.5)),
        3,
        "was sampled at temperature 0.5",
    ),
    # versions
    "a version is gone": (remove("journal/version_000002.msgpack"), 2, "version 2 has no record"),
    "the newest version is gone": (remove("journal/version_000005.msgpack"), 4, "version 4 is the newest"),
    "the first version is gone": (remove("journal/version_000000.msgpack"), 0, "has 0 in `versions`|version 0 has no"),
    "a version is torn": (damage("journal/version_000002.msgpack", lambda content: content[:-3]), 2, "do not match"),
    "a version was never confirmed": (
        lambda config: rewrite_version(config, 2, take_confirmations_away),
        2,
        "version 2 was recorded without digests",
    ),
    "a version is another one": (
        lambda config: rewrite_version(config, 2, lambda version: setattr(version, "version", 1)),
        2,
        "the record of version 2 is about version 1",
    ),
    "a version was confirmed as two things": (confirm_otherwise, 3, "2. confirmation says that model.norm.weight has"),
    "a version comes before its batch": (
        lambda config: [Versions(config.paths.journal).record(v, ["x"], digests_of(v), 0.0) for v in (6, 7)],
        5,
        "version 7 was confirmed, and there are 5 batches",
    ),
    # checkpoints
    "a byte of a checkpoint is flipped": (
        damage("checkpoints/step_4/rank_0.safetensors", flip_last),
        4,
        r"rank_0\.safetensors has .* its manifest says",
    ),
    "a file of a checkpoint is gone": (
        remove("checkpoints/step_2/random_0.safetensors"),
        2,
        r"step_2/random_0\.safetensors is missing",
    ),
    "a manifest is gone": (remove(f"checkpoints/step_2/{MANIFEST}"), 2, "it is half a checkpoint"),
    "a checkpoint is of another version": (rename_checkpoint, 5, "step_5 holds version 4 by its manifest"),
    "a checkpoint is of a version that never was": (
        lambda config: shutil.copytree(config.paths.checkpoints / "step_4", config.paths.checkpoints / "step_9"),
        5,
        "checkpoint 9 is there, and metrics.jsonl has no line of the trainer for step 5",
    ),
    # metrics
    "a metric is another": (
        change_lines(lambda rows: row_of(rows, "orchestrator", 2).update({"reward/mean": 0.123})),
        2,
        "metrics.jsonl says reward/mean = 0.123",
    ),
    "a metric is another in the newest line": (
        change_lines(lambda rows: row_of(rows, "orchestrator", 4).update({"tokens/total": 1})),
        4,
        "metrics.jsonl says tokens/total = 1",
    ),
    "a metric is another in the journal": (
        change_batch(2, lambda record: record.metrics.update({"lag/max": 7})),
        2,
        "the journal says lag/max = 7",
    ),
    "a metric is missing in the journal": (
        change_batch(2, lambda record: record.metrics.pop("tokens/total")),
        2,
        "the journal says tokens/total = nothing",
    ),
    "a line of the orchestrator is gone": (
        change_lines(lambda rows: rows.remove(row_of(rows, "orchestrator", 2))),
        2,
        "batch 2 has no line of the orchestrator",
    ),
    "a line of the trainer is gone": (
        change_lines(lambda rows: rows.remove(row_of(rows, "trainer", 2))),
        2,
        "step 2 has no line of the trainer",
    ),
    "a line is about a step that never was": (
        change_lines(lambda rows: rows.append(row_of(rows, "trainer", 2) | {"step": 6})),
        6,
        "lines of the trainer for step 6; there are 5 batches",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named_first(config, name):
    plant, step, words = FAULTS[name]
    plant(config)
    report = audit_run(config.paths.root)
    assert not report.holds
    first = report.findings.in_order()[0]
    assert re.search(words, first.found), all_of(report)
    assert step in (-1, first.step)
    assert first.expected
    assert first.meaning


def test_one_fault_is_not_told_of_for_ever(tmp_path):
    """What follows from it in each later batch is not a finding of its own."""
    config = write_whole_run(tmp_path, batches=30)
    for plant in (forget_an_open_group, set_counter, set_cursor, exchange_an_open_groups_example):
        before = Journal(config.paths.journal).read(3)
        rewrite_batch(config, 3, plant)
        assert audit_run(tmp_path).findings.total <= 3, plant
        write_entry(Journal(config.paths.journal).path(3), 3, before)


@pytest.mark.parametrize("gone", [0, 3, 11])
def test_after_a_batch_that_is_gone_the_others_are_still_looked_at(tmp_path, gone):
    config = write_whole_run(tmp_path, batches=12)
    (config.paths.journal / f"batch_{gone:06d}.msgpack").unlink()
    report = audit_run(tmp_path)
    rooms = {contradiction.room for contradiction in report.findings.in_order()}
    assert rooms <= ({"journal"} if gone < 11 else {"versions", "metrics"}), all_of(report)
    if gone < 10:
        rewrite_batch(config, 10, lambda record: record.rollouts.pop(1))
        assert "batch 10: group" in all_of(audit_run(tmp_path))


def test_on_a_gpu_a_version_that_was_replayed_otherwise_is_worth_a_note(tmp_path):
    config = write_whole_run(tmp_path, device="cuda")
    confirm_otherwise(config)
    assert "2. confirmation says that model.norm.weight" in assert_holds(tmp_path).findings.notes[0]


def test_a_token_of_lag_one_contradicts_a_synchronous_run(tmp_path):
    config = write_whole_run(tmp_path, max_async_level=0)
    change_column("versions", 2)(config)
    first = audit_run(tmp_path).findings.in_order()[0]
    assert "has 2 in `versions`" in first.found
    assert "at least 3 (max_async_level = 0)" in first.expected


# any fault


LEFT_TO_OTHERS = {
    "ids",
    "logprobs",
    "prompt",
    "completion",
    "answer",
    "stop",
    "reason",
    "engines",
    "time",
    "difference",
}
"""What nothing else on disk repeats (a replay of the run sees ids and logprobs), or what decides nothing."""


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all numbers, texts and lists inside."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in LEFT_TO_OTHERS:
                yield from leaves(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        if value:
            yield (*path, "some entry")
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    else:
        yield path


def mutate(value: Any, path: tuple, chance: random.Random) -> Any:
    """A copy that differs at that path."""
    if not path:
        return changed(value, chance)
    step, rest = path[0], path[1:]
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{step: mutate(getattr(value, step), rest, chance)})
    if isinstance(value, dict):
        return value | {step: mutate(value[step], rest, chance)}
    if step == "some entry":
        place = chance.randrange(len(value))
        return value[:place] + value[place + 1 :] if chance.random() < 0.5 else [*value, value[place]]
    return [*value[:step], mutate(value[step], rest, chance), *value[step + 1 :]]


def changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, np.ndarray):
        array = value.copy()
        place = chance.randrange(len(array))
        array[place] = 1 - array[place] if array.dtype == np.uint8 else array[place] + chance.choice([-1, 1])
        return array
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + chance.choice([-1, 1])
    if isinstance(value, float):
        return value + chance.choice([-0.25, 0.25])
    assert isinstance(value, str), value
    return value + "x"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_changed_in_a_batch_is_found(config, seed):
    chance = random.Random(seed)
    journal = Journal(config.paths.journal)
    for _ in range(40):
        step = chance.randrange(5)
        before = journal.read(step)
        by_kind: dict[tuple, list[tuple]] = {}
        for path in leaves(before):
            by_kind.setdefault(tuple(part for part in path if isinstance(part, str)), []).append(path)
        path = chance.choice(by_kind[chance.choice(sorted(by_kind))])
        write_entry(journal.path(step), step, mutate(before, path, chance))
        report = audit_run(config.paths.root)
        assert not report.holds, f"batch {step}: {path} was changed"
        write_entry(journal.path(step), step, before)
    assert_holds(config.paths.root)


def test_whatever_is_changed_in_a_version_is_found(config):
    versions, chance = Versions(config.paths.journal), random.Random(1)
    versions.record(2, ["http://127.0.0.1:8000"], digests_of(2), 0.0)
    before = versions.read(2)
    for path in leaves(before):
        if path == ("confirmations", "some entry"):  # once or twice is the same
            continue
        write_entry(versions.path(2), 2, mutate(before, path, chance))
        assert not audit_run(config.paths.root).holds, path
    write_entry(versions.path(2), 2, Version(2, [Confirmation([], digests_of(2), 0.0, 1.7e9)]))
    assert not audit_run(config.paths.root).holds


def test_whatever_number_of_a_batch_is_changed_in_the_metrics_is_found(config):
    names = list(Journal(config.paths.journal).read(2).metrics)
    content = config.paths.metrics.read_bytes()
    for name in names:
        change_lines(lambda rows, name=name: row_of(rows, "orchestrator", 2).update({name: 0.015625}))(config)
        assert f"metrics.jsonl says {name} = 0.015625" in all_of(audit_run(config.paths.root))
        config.paths.metrics.write_bytes(content)


# what it says, and how it ends


def test_the_command_ends_with_0_1_or_2(config, tmp_path, capsys):
    assert audit([str(config.paths.root)]) == 0
    assert "nothing was lost, and nothing was trained twice" in capsys.readouterr().out
    rewrite_batch(config, 2, lambda record: record.rollouts.pop(1))
    assert audit([str(config.paths.root)]) == 1
    said = capsys.readouterr().out
    assert "batch 2: group" in said
    assert "expected: one fate of each place" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty is not a run's folder - expected .*run\.json"):
        audit([str(tmp_path / "empty")])


def test_only_the_first_contradiction_is_shown_unless_all_are_asked_for(config, capsys):
    for step in (3, 1):
        rewrite_batch(config, step, lambda record: record.rollouts.pop(1))
    audit([str(config.paths.root)])
    first = capsys.readouterr().out
    assert "batch 1: group" in first
    assert "batch 3: group" not in first
    audit([str(config.paths.root), "--all"])
    assert "batch 3: group" in capsys.readouterr().out


def test_machines_get_json(config, capsys):
    rewrite_batch(config, 2, lambda record: record.rollouts.pop(1))
    assert audit([str(config.paths.root), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is False
    assert said["num_contradictions"] == len(said["contradictions"]) > 0
    assert said["contradictions"][0]["step"] == 2
    assert said["summary"]["batches"] == 5


def test_thousands_of_contradictions_are_counted_and_not_all_kept(tmp_path):
    config = write_whole_run(tmp_path, batches=12)
    change_lines(lambda rows: rows.extend({"step": 10**6 + n, "process": "trainer"} for n in range(5000)))(config)
    shutil.rmtree(config.paths.journal)
    report = audit_run(tmp_path)
    assert not report.holds
    assert len(all_of(report)) < 100_000


def test_it_needs_no_torch_and_no_process(config):
    code = (
        "import sys\nfrom trireme.cli.trireme import trireme\n"
        f"code = trireme(['audit', {str(config.paths.root)!r}])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
