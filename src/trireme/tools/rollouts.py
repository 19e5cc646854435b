"""Rollouts as rows and records, read from a batch in the journal or from a file of evaluation results.

A `Row` is what a list shows of a rollout, a `Record` is all of it, and `open_rollouts` reads either kind of file.
Viewer, dashboard and report use these types, so a field that is added here can be shown, filtered and sorted in all.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trireme.base.errors import JournalCorrupt
from trireme.base.safe_text import one_line
from trireme.journal.entry import read_entry
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.tools.conversation import Message, blocks, content_text, last_message_text, messages_of
from trireme.tools.record_differences import counted

TRAINED, MASKED, DROPPED = "trained", "masked", "dropped"
"""Fates of a rollout of training."""
PREVIEW = 200  # characters of a text that a row keeps
CHUNK = 8 << 20  # bytes of a results file that are read at once
MOST_DAMAGED = 100  # line numbers that are kept
REPAIR_HINT = "`trireme audit` lists what is lost with it."

KNOWN_KEYS = {
    *("example_id", "reward", "prompt", "completion", "answer", "info", "metrics", "example", "rollout"),
    *("tokens", "turns", "truncated", "stop", "error", "is_truncated", "stop_condition"),
}


class Row(msgspec.Struct):
    """A line of a list of rollouts, and where the rest of the rollout is."""

    number: int  # in its file, from 0
    example: str
    rollout: int
    reward: float | None  # None for a failed rollout, or if the file has none
    env: str = ""
    step: int | None = None  # number of the batch; None for an evaluation
    group: int | None = None
    attempt: int | None = None
    fate: str = ""  # "trained", "masked" or "dropped" for a rollout of training
    tokens: int = 0  # sampled
    turns: int = 0  # number of model turns
    advantage: float | None = None  # mean over the tokens that are trained on
    truncated: bool = False
    stop: str = ""
    error: str = ""
    flaws: str = ""
    question: str = ""  # how the last message of the prompt begins
    last_message: str = ""  # beginning of the model's last message
    offset: int = 0  # byte in its file
    length: int = 0  # bytes there


class Record(msgspec.Struct):
    """All of a rollout."""

    row: Row
    prompt: list[Message] = []
    completion: list[Message] = []
    answer: str = ""
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}  # information about the example, or how an agent program ended
    more: dict[str, Any] = {}  # keys of the file that have no field here
    rollout: Rollout | None = None  # the journal's record, with tokens, and an agent program's conversations

    @property
    def text(self) -> str:
        """All text that a search looks through."""
        texts = "\n".join(f"{block.name} {block.text}" for block in blocks(self.prompt + self.completion))
        return f"{texts}\n{self.answer}\n{self.row.error}"

    @property
    def facts(self) -> list[str]:
        """Length and ending of the rollout, in words."""
        row = self.row
        facts = [counted(row.tokens, "token"), counted(row.turns, "turn")]
        facts += [f"ended by {row.stop}"] if row.stop else []
        if self.rollout and len(self.rollout.branches) > 1:
            facts.append(f"{len(self.rollout.branches)} branches")
        facts += ["truncated"] if row.truncated else []
        facts += [f"flaws: {row.flaws}"] if row.flaws else []
        return facts + ([f"temperature {self.rollout.temperature:g}"] if self.rollout else [])


# one line of an evaluation


def record_of(value: Mapping[str, Any], *, number: int, rollout: int = 0) -> Record:
    """Convert a line of results, of ours or of another tool that writes our first keys.

    Values of an unexpected type are kept in `more` and shown as they are.

    Args:
        number: Index of the line among the rollouts of its file.
        rollout: Index of the rollout, for files that do not number them.
    """
    # fields in the forms of several tools; what has no field is kept and shown as it is
    prompt, completion = messages_of(value.get("prompt"), "user"), messages_of(value.get("completion"), "assistant")
    metrics, info = _dict(value.get("metrics")), _dict(value.get("info"))
    more = {name: item for name, item in value.items() if name not in KNOWN_KEYS and item not in (None, "", [], {})}
    for name in [name for name, item in more.items() if name != "version" and _number(item) is not None]:
        metrics[name] = more.pop(name)  # other tools write metrics next to the reward
    more |= {name: value[name] for name in ("info", "metrics") if not isinstance(value.get(name), dict | None)}
    # a row has the beginning of a long error, and the record all of it
    if len(error := str(value.get("error") or "")) > PREVIEW:
        more["error"] = error
    answer = value.get("answer")

    row = Row(
        number=number,
        example=str(value.get("example_id", value.get("example", number))),
        rollout=_whole(value.get("rollout"), rollout),
        reward=_number(value.get("reward")),
        tokens=_whole(value.get("tokens"), 0),
        turns=_whole(value.get("turns"), sum(message.get("role") == "assistant" for message in completion)),
        truncated=bool(value.get("truncated", value.get("is_truncated", False))),
        stop=one_line(value.get("stop") or value.get("stop_condition") or "", PREVIEW),
        error=one_line(error, PREVIEW),
        question=_question(prompt),
        last_message=one_line(last_message_text(completion), PREVIEW),
    )

    return Record(
        row=row,
        prompt=prompt,
        completion=completion,
        answer="" if answer is None else answer if isinstance(answer, str) else repr(answer),
        metrics={name: found for name, item in metrics.items() if (found := _number(item)) is not None},
        info=info,
        more=more,
    )


def _question(prompt: list[Message]) -> str:
    return one_line(content_text(prompt[-1].get("content")), PREVIEW) if prompt else ""


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float) and abs(value) < 1e300:  # not NaN, and not too large for a float
        return float(value)
    return None


def _whole(value: Any, otherwise: int) -> int:
    number = _number(value)
    return otherwise if number is None else int(number)


def _dict(value: Any) -> dict[str, Any]:
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}


# rollouts of a batch


def record_of_rollout(step: int, number: int, rollout: Rollout) -> Record:
    # only tokens in the loss have an advantage
    trained = [sample.advantages[sample.loss_mask == 1] for sample in rollout.samples]
    advantages = np.concatenate(trained) if trained else np.zeros(0)
    row = _row_of(
        rollout,
        step,
        number,
        reward=rollout.reward,
        fate=MASKED if rollout.masked else TRAINED,
        tokens=len(advantages),
        turns=rollout.num_turns,
        advantage=float(advantages.mean()) if len(advantages) else None,
        truncated=rollout.truncated,
        stop=one_line(rollout.stop or "", PREVIEW),
        flaws=", ".join(rollout.flaws),
        question=_question(rollout.prompt),
        last_message=one_line(last_message_text(rollout.completion), PREVIEW),
    )

    more: dict[str, object] = {"group": rollout.group, "attempt": rollout.attempt}
    if rollout.masked:
        more["masked"] = f"{rollout.masked}: none of its tokens is trained on"
    return Record(
        row=row,
        prompt=rollout.prompt,
        completion=rollout.completion,
        answer=rollout.answer or "",
        metrics=rollout.metrics,
        info=rollout.info,
        more=more,
        rollout=rollout,
    )


def record_of_dropped(step: int, number: int, dropped: Dropped) -> Record:
    """Return all that is known of a rollout that was dropped: the reason."""
    error = one_line(dropped.reason, PREVIEW)
    row = _row_of(dropped, step, number, reward=None, fate=DROPPED, stop=DROPPED, error=error)
    return Record(row, more={"error": dropped.reason} if len(dropped.reason) > PREVIEW else {})


def _row_of(one: Rollout | Dropped, step: int, number: int, **known: Any) -> Row:
    return Row(
        number=number,
        example=str(one.example),
        rollout=one.place,
        env=one.env,
        step=step,
        group=one.group,
        attempt=one.attempt,
        **known,
    )


# files


def open_rollouts(path: Path) -> BatchFile | ResultsFile:
    """Open a batch of the journal or a file of results, by its name. Nothing is read before `read_more`."""
    return BatchFile(path) if path.suffix == ".msgpack" else ResultsFile(path)


def identity_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written again; None if there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class BatchFile:
    """A batch of training: the rollouts that are trained on, then those that were dropped and why.

    The file is complete when it appears and is only ever replaced as a whole, so it is read once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batch: BatchRecord | None = None  # None before it was read
        self.rows: list[Row] = []
        self.damaged: list[int] = []
        self.trouble = ""  # why the file cannot be read
        self._records: list[Record] = []
        self._identity: tuple[int, int, int] | None = None

    def read_more(self) -> bool:
        """Read the batch if it is new. Return False: there is never a second part."""
        # a batch is replaced as a whole, for example by a rewind and another start
        identity, self.trouble = identity_of(self.path), ""
        if identity is not None and identity == self._identity:
            return False
        step = int(self.path.stem.removeprefix("batch_"))
        try:
            batch = read_entry(self.path, step, BatchRecord, ways_out=REPAIR_HINT)
        except (OSError, JournalCorrupt) as error:
            self.trouble = str(error)
            return False

        self.batch, self._identity = batch, identity
        self._records = [record_of_rollout(step, number, rollout) for number, rollout in enumerate(batch.rollouts)]
        dropped = enumerate(batch.dropped, len(self._records))
        self._records += [record_of_dropped(step, number, each) for number, each in dropped]
        self.rows = [record.row for record in self._records]
        return False

    def record(self, row: Row) -> Record:
        return self._records[row.number]


class ResultsFile:
    """A file of results with a rollout on each line, read in parts from where the last part ended.

    Rows stay in memory and conversations do not: `record` reads its line again. Lines that are no JSON object are
    counted in `damaged`, and an unfinished last line is left for later. A replaced file is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.rows: list[Row] = []
        self.damaged: list[int] = []  # numbers of lines, from 1
        self.trouble = ""  # why the file cannot be read
        self._identity: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._num_lines = 0
        self._num_rollouts: Counter[str] = Counter()  # rollouts so far, by example

    def read_more(self) -> bool:
        """Read about `CHUNK` bytes of whole lines. Return whether there is more."""
        try:
            with open(self.path, "rb") as file:
                # another file has taken its place, or this one was cut off: all rows are of the old one
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if self._identity not in (None, identity) or stat.st_size < self._offset:
                    self._reset()
                self._identity, self.trouble = identity, ""
                file.seek(self._offset)
                end = self._offset + CHUNK
                # a writer may be in the middle of its last line, which is read again next time
                while self._offset < end and (line := file.readline()):
                    value = _parse(line)
                    if value is None and not line.endswith(b"\n"):
                        return False  # its writer has not finished it
                    self._add(line, value)
                return self._offset < stat.st_size
        except OSError as error:
            self.trouble = f"{self.path} cannot be read: {error.strerror or error}"
            return False

    def _add(self, line: bytes, value: dict[str, Any] | None) -> None:
        self._num_lines += 1
        # results of other tools do not number the rollouts of an example
        if value is not None:
            example = str(value.get("example_id", value.get("example", len(self.rows))))
            row = record_of(value, number=len(self.rows), rollout=self._num_rollouts[example]).row
            row.offset, row.length = self._offset, len(line)
            self._num_rollouts[example] += 1
            self.rows.append(row)
        elif line.strip() and len(self.damaged) < MOST_DAMAGED:
            self.damaged.append(self._num_lines)
        self._offset += len(line)

    def record(self, row: Row) -> Record:
        """Read all of a rollout from disk; the row alone if its line is gone."""
        try:
            with open(self.path, "rb") as file:
                file.seek(row.offset)
                value = _parse(file.read(row.length))
        except OSError:
            value = None
        if value is None:
            return Record(row, more={"gone": f"line at byte {row.offset} of {self.path} is not there any more"})
        record = record_of(value, number=row.number)
        record.row = row
        return record


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
