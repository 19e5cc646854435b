"""Whatever may go wrong with a run on disk, as a function that makes it so, and how an audit should name it.

Batches and versions are written again with a right checksum: as if a process of ours had made the mistake.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from trireme.config.run import RunConfig
from trireme.ledger.journal import Journal
from trireme.ledger.manifest import MANIFEST
from trireme.ledger.records import BatchRecord, Cursor, Dropped, OpenGroup
from trireme.ledger.versions import Version, Versions
from written_run import GROUP, digests_of, rewrite_batch, rewrite_version

Plant = Callable[[RunConfig], Any]


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
    "a checkpoint is of another version": (rename_checkpoint, 5, r"step_5/manifest\.json is of version 4"),
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
