"""Faults planted in a run on disk, one for each kind that the audit must detect, and how it should name them.

Batches and versions are written again with a right checksum: as if a process of ours had made the mistake.
"""

import json
import shutil
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from support.engines.fake_engine import digests_of
from support.runs.written_run import GROUP, rewrite_batch, rewrite_version
from trireme.config.orchestrator import Filters
from trireme.config.run import RunConfig
from trireme.journal.entry import write_entry
from trireme.journal.journal import Journal
from trireme.journal.manifest import MANIFEST
from trireme.journal.records import BatchRecord, Dropped
from trireme.journal.versions import Versions
from trireme.messages import Tokens

WITHOUT_LAST = itemgetter(slice(-1))
Plant = Callable[[RunConfig], Any]
Fault = tuple[Plant, int, str]  # how to plant it, the step that the audit should name (-1: any), and its words


def replaced(value: Any, path: tuple[str | int, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy in which one part, inside structs, dictionaries and lists, is changed."""
    if not path:
        return change(value)
    step, rest = path[0], path[1:]
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{str(step): replaced(getattr(value, str(step)), rest, change)})
    if isinstance(value, dict):
        return value | {step: replaced(value[step], rest, change)}
    return [*value[:step], replaced(value[step], rest, change), *value[step + 1 :]]


def change(step: int, path: str, how: Callable[[Any], Any]) -> Plant:
    """Change one part of a batch, like `rollouts.4.reward`."""
    parts = tuple(int(part) if part.isdigit() else part for part in path.split("."))

    def plant(config: RunConfig) -> None:
        journal = Journal(config.paths.journal)
        write_entry(journal.path(step), step, replaced(journal.read(step), parts, how))

    return plant


def one_more(number: int) -> int:
    return number + 1


def put(step: int, path: str, value: Any) -> Plant:
    return change(step, path, lambda _: value)


def change_column(name: str, how: Any, *, masked: bool = True, step: int = 3, place: int = -1) -> Plant:
    """Give one of the tokens that are trained on, or of the others, another value, or what a function makes of it."""

    def in_sample(sample: Tokens) -> Tokens:
        column, at = getattr(sample, name).copy(), np.flatnonzero(sample.loss_mask == masked)[place]
        column[at] = how(column[at]) if callable(how) else how
        return msgspec.structs.replace(sample, **{name: column})

    return change(step, "rollouts.4.samples.0", in_sample)


def change_lines(how: Callable[[list[dict[str, Any]]], Any]) -> Plant:
    def plant(config: RunConfig) -> None:
        rows = [json.loads(line) for line in config.paths.metrics.read_text().splitlines()]
        how(rows)
        config.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return plant


def row_of(rows: list[dict[str, Any]], process: str, step: int) -> dict[str, Any]:
    return next(row for row in rows if (row["process"], row["step"]) == (process, step))


def damage(path: str, how: Callable[[bytes], bytes]) -> Plant:
    def plant(config: RunConfig) -> None:
        file = config.paths.root / path
        file.write_bytes(how(file.read_bytes()))

    return plant


def remove(path: str) -> Plant:
    return lambda config: (config.paths.root / path).unlink()


def edit(step: int, how: Callable[[BatchRecord], Any]) -> Plant:
    return lambda config: rewrite_batch(config, step, how)


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def train_a_group_again(config: RunConfig) -> None:
    before = Journal(config.paths.journal).read(1).rollouts[:GROUP]
    rewrite_batch(config, 3, lambda record: record.rollouts.extend(before))


def change_dropped(reason: str, how: Callable[[list[Dropped], Dropped], Any]) -> Plant:
    def plant(config: RunConfig) -> None:
        journal = Journal(config.paths.journal)
        for record in map(journal.read, journal.steps()):
            drop = next((drop for drop in record.dropped if drop.reason.startswith(reason)), None)
            if drop is not None:
                how(record.dropped, drop)
                return write_entry(journal.path(record.step), record.step, record)

    return plant


def try_again(dropped: list[Dropped], drop: Dropped) -> None:
    dropped.append(msgspec.structs.replace(drop, attempt=2))


def forget_reason(dropped: list[Dropped], drop: Dropped) -> None:
    drop.reason = ""


def drop_what_was_trained(record: BatchRecord) -> None:
    rollout = record.rollouts[0]
    record.dropped.append(Dropped(rollout.group, 0, 1, rollout.env, rollout.example, "stale: x"))


def copy_checkpoint(config: RunConfig) -> None:
    shutil.copytree(config.paths.checkpoints / "step_4", config.paths.checkpoints / "step_9")


def remove_row(process: str) -> Plant:
    return change_lines(lambda rows: rows.remove(row_of(rows, process, 2)))


add_line = change_lines(lambda rows: rows.append(row_of(rows, "trainer", 2) | {"step": 6}))


def confirm_otherwise(config: RunConfig) -> None:
    digests = digests_of(3) | {"model.norm.weight": "other"}
    Versions(config.paths.journal).record(3, ["http://127.0.0.1:8000"], digests, 0.0)


def confirm_too_early(config: RunConfig) -> None:
    for version in (6, 7):
        Versions(config.paths.journal).record(version, ["x"], digests_of(version), 0.0)


def forget_confirmations(config: RunConfig) -> None:
    rewrite_version(config, 2, lambda version: version.confirmations.clear())


FAULTS: dict[str, Fault] = {
    # journal
    "a batch is gone": (remove("journal/batch_000002.msgpack"), 2, "batch 2 is missing, and batch 4 is there"),
    "a batch is torn": (damage("journal/batch_000002.msgpack", WITHOUT_LAST), 2, "do not match"),
    # fates
    "a group is trained again": (train_a_group_again, 3, "is trained here, and batch 1 had decided it before"),
    "a trained one is dropped": (edit(2, drop_what_was_trained), 2, "attempt 0 trained, attempt 1 dropped"),
    "a failed attempt is gone": (change_dropped("score: KeyError", list.remove), -1, "place 1 has attempt 1 trained"),
    "one was tried too often": (change_dropped("timeout", try_again), -1, "attempt 2 dropped"),
    "one has no reason": (change_dropped("no signal", forget_reason), -1, "dropped without a reason"),
    "an open group is forgotten": (change(3, "state.open_groups", WITHOUT_LAST), 3, r"open group \d+ is nothing"),
    "group numbers leap": (put(4, "state.next_group", 10**15), 4, "the next group is 1000000000000000"),
    "a counter is wrong": (change(3, "state.counters.trained", one_more), 3, "state.counters.trained is 25"),
    # the data order
    "the data set is unknown": (put(0, "state.sizes", {}), 0, "training sets as nothing"),
    "an outcome is gone": (change(3, "outcomes", WITHOUT_LAST), 3, r"outcomes\[\d+\] is nothing"),
    # tokens
    "an advantage is another": (change_column("advantages", 9.0), 3, "has 9 in `advantages`"),
    "a token is of the future": (change_column("versions", 4), 3, "token . has 4 in `versions`"),
    "a given token has a logprob": (change_column("logprobs", -0.5, masked=False), 3, "has -0.5 in `logprobs`"),
    "a logprob is of no probability": (change_column("logprobs", 0.5), 3, "has 0.5 in `logprobs`"),
    "a column is too short": (change(3, "rollouts.4.samples.0.logprobs", WITHOUT_LAST), 3, "values of float32 in"),
    "a rollout has no tokens": (put(3, "rollouts.4.samples", []), 3, "has no token that is trained on"),
    # versions
    "a version is gone": (remove("journal/version_000002.msgpack"), 2, "version 2 has no record"),
    "the newest version is gone": (remove("journal/version_000005.msgpack"), 4, "version 4 is the newest"),
    "a version is torn": (damage("journal/version_000002.msgpack", flip_last), 2, "do not match"),
    "a version was never confirmed": (forget_confirmations, 2, "version 2 was recorded without digests"),
    "a version was confirmed as two things": (confirm_otherwise, 3, "2. confirmation says that model.norm.weight has"),
    "a version comes before its batch": (confirm_too_early, 5, "version 7 was confirmed, and there are 5 batches"),
    # checkpoints
    "a byte is flipped": (damage("checkpoints/step_4/rank_0.safetensors", flip_last), 4, "its manifest says"),
    "a file is gone": (remove("checkpoints/step_2/random_0.safetensors"), 2, "random_0.safetensors is missing"),
    "a manifest is gone": (remove(f"checkpoints/step_2/{MANIFEST}"), 2, "it is half a checkpoint"),
    "a checkpoint is too new": (copy_checkpoint, 5, "checkpoint 9 is there, and metrics.jsonl has no line .* step 5"),
    # metrics
    "a line of the orchestrator is gone": (remove_row("orchestrator"), 2, "batch 2 has no line of the orchestrator"),
    "a line of the trainer is gone": (remove_row("trainer"), 2, "step 2 has no line of the trainer"),
    "a line is about a step that never was": (add_line, 6, "lines of the trainer for step 6; there are 5 batches"),
}


# a run with pools, a curriculum, filters, penalties, a teacher and running means


def drop_flawed(filters: Filters) -> Filters:
    return filters.model_copy(update={"truncated": "drop"})


def add_step_of_no_token(record: BatchRecord) -> None:
    record.rollouts[0].token_rewards.append(np.zeros(3, np.float32))


def change_first_mean(means: np.ndarray) -> np.ndarray:
    return np.concatenate([means[:1] + 0.25, means[1:]])


RICH_FAULTS: dict[str, Fault] = {
    "the length was not punished": (put(3, "rules.length_penalty", None), 3, "in `advantages`"),
    "a step's reward is of no token": (edit(3, add_step_of_no_token), 3, "`token_rewards` for"),
    "a running mean is another": (put(3, "state.baselines.a", 0.125), 3, "state.baselines.a is 0.125"),
    "one should be gone": (change(3, "rules.filters", drop_flawed), 3, "masked is .truncated|dropped for is nothing"),
    "a group moves too little": (put(3, "rules.advantage_range", (-9.0, 9.0)), 3, "there is little advantage"),
    "a group says too little": (put(3, "rules.least_variance", 100.0), 3, "is trained, and there is little signal"),
    "a score is another": (change(3, "state.scores.a.means", change_first_mean), 3, r"state.scores.a.means\[0\] is"),
}
