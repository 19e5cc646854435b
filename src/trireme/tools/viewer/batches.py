"""A batch of training as a list of rollouts: those that are trained on, then those that were dropped, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trireme.base.errors import TriremeError
from trireme.journal.entry import read_entry
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.tools.viewer.conversation import last_said, messages_of, searchable, text_of
from trireme.tools.viewer.pictures import one_line
from trireme.tools.viewer.rows import DROPPED, PREVIEW, Record, Row, preview

WAYS_OUT = "`trireme audit` tells what is lost with it."


class BatchFile:
    """An entry of the journal. It is whole when it appears and does not change, so it is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.damaged: list[int] = []
        self.trouble = ""
        self._rollouts: list[Rollout] = []
        self._file: tuple[int, int, int] | None = None

    def read_on(self) -> bool:
        """Returns False: it is read at once, or not at all."""
        try:
            found = self.path.stat()
            file = (found.st_ino, found.st_size, found.st_mtime_ns)
            if file != self._file:
                number = int(self.path.stem.removeprefix("batch_"))
                self._take(read_entry(self.path, number, BatchRecord, ways_out=WAYS_OUT))
                self._file, self.trouble = file, ""
        except (OSError, TriremeError) as error:
            self.trouble = str(error)
        return False

    def _take(self, batch: BatchRecord) -> None:
        self._rollouts = batch.rollouts
        trained = [row_of(number, rollout) for number, rollout in enumerate(batch.rollouts)]
        dropped = [dropped_row_of(len(trained) + number, fate) for number, fate in enumerate(batch.dropped)]
        self.rows = trained + dropped

    def record(self, row: Row) -> Record:
        if row.number >= len(self._rollouts):
            return Record(row=row)
        return record_of_rollout(row, self._rollouts[row.number])

    def text(self, row: Row) -> str:
        return text_to_search(self.record(row))


def record_of_rollout(row: Row, rollout: Rollout) -> Record:
    more: dict[str, object] = {"group": rollout.group, "attempt": rollout.attempt}
    more |= {"masked": f"{rollout.masked}: none of its tokens is trained on"} if rollout.masked else {}
    return Record(
        row=row,
        prompt=messages_of(rollout.prompt, "user"),
        completion=messages_of(rollout.completion, "assistant"),
        answer=rollout.answer or "",
        metrics=rollout.metrics,
        more=more,
        samples=rollout.samples,
        temperature=rollout.temperature,
        token_rewards=rollout.token_rewards,
    )


def text_to_search(record: Record) -> str:
    return searchable(record.prompt + record.completion) + f"\n{record.answer}\n{record.row.error}"


def row_of(number: int, rollout: Rollout) -> Row:
    return Row(
        number=number,
        example=str(rollout.example),
        rollout=rollout.place,
        reward=rollout.reward,
        env=rollout.env,
        tokens=sum(int(sample.loss_mask.sum()) for sample in rollout.samples),
        turns=rollout.num_turns,
        advantage=mean_advantage(rollout),
        truncated=rollout.truncated,
        stop=one_line(rollout.stop or "", PREVIEW),
        flaws=", ".join(rollout.flaws),
        question=preview(text_of(rollout.prompt[-1]) if rollout.prompt else ""),
        said=preview(last_said(rollout.completion)),
    )


def mean_advantage(rollout: Rollout) -> float | None:
    """Over the tokens that are trained on; None where there is none."""
    parts = [sample.advantages[sample.loss_mask == 1] for sample in rollout.samples]
    values = np.concatenate(parts) if parts else np.zeros(0)
    return float(values.mean()) if len(values) else None


def dropped_row_of(number: int, fate: Dropped) -> Row:
    return Row(
        number=number,
        example=str(fate.example),
        rollout=fate.place,
        reward=None,
        env=fate.env,
        stop=DROPPED,
        error=one_line(fate.reason, PREVIEW),
    )
