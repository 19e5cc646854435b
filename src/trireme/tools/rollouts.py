"""Rollouts as the tools show them: a row of a list, all of one rollout, and text that is safe to show.

The viewer, the dashboard and the report build both from a batch of the journal or from a line of results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trireme.base.errors import JournalCorrupt
from trireme.journal.entry import read_entry
from trireme.journal.records import BatchRecord, Dropped, Rollout
from trireme.messages import Tokens
from trireme.tools.conversation import last_said, messages_of, searchable, text_of

REPAIR_HINT = "`trireme audit` lists what is lost with it."
SHOWN_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}
SHOWN_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), "�")
SHOWN_CONTROLS |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x2028, 0x2029), "�")
SHOWN_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000), "�")  # halves of a character: no terminal takes them
DROPPED = "dropped"  # how a rollout ended that is not trained on
PREVIEW = 200  # characters kept of a text, for the list


class Row(msgspec.Struct):
    """What the list shows of a rollout, and where the rest is."""

    number: int  # in its source, from 0
    example: str
    rollout: int
    reward: float | None  # None where it failed, or the file has none
    env: str = ""
    tokens: int = 0  # sampled
    turns: int = 0  # of the model
    advantage: float | None = None  # mean over the tokens that are trained on
    truncated: bool = False
    stop: str = ""
    error: str = ""
    flaws: str = ""
    question: str = ""  # how it begins
    said: str = ""  # what the model said last
    offset: int = 0  # in its file
    length: int = 0  # bytes there


class Record(msgspec.Struct):
    """All of a rollout."""

    row: Row
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []
    answer: str = ""
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}  # of the example
    more: dict[str, Any] = {}  # what else was said of it
    samples: list[Tokens] = []
    temperature: float = 1.0
    token_rewards: list[Any] = []  # per sample [T], NaN where there is none


KNOWN = {
    *("example_id", "reward", "prompt", "completion", "answer", "info", "metrics", "example", "rollout"),
    *("tokens", "turns", "truncated", "stop", "error", "is_truncated", "stop_condition"),
}


def record_of(value: Mapping[str, Any], *, number: int, seen: Mapping[str, int] | None = None) -> Record:
    """From a line of results, ours or another's that has our first keys. What is not as expected is shown as it is.

    Args:
        seen: rollouts before it per example, for files that do not number them.
    """
    example = str(value.get("example_id", value.get("example", number)))
    prompt, completion = messages_of(value.get("prompt"), "user"), messages_of(value.get("completion"), "assistant")
    others = {name: item for name, item in value.items() if name not in KNOWN}
    numbers = {name: item for name, item in others.items() if _number(item) is not None}
    metrics = _dict(value.get("metrics")) | {name: item for name, item in numbers.items() if name != "version"}
    row = Row(
        number=number,
        example=example,
        rollout=_whole(value.get("rollout"), (seen or {}).get(example, 0)),
        reward=_number(value.get("reward")),
        tokens=_whole(value.get("tokens"), 0),
        turns=_whole(value.get("turns"), sum(message.get("role") == "assistant" for message in completion)),
        truncated=bool(value.get("truncated", value.get("is_truncated", False))),
        stop=one_line(value.get("stop") or value.get("stop_condition") or "", PREVIEW),
        error=one_line(value.get("error") or "", PREVIEW),
        question=preview(text_of(prompt[-1]) if prompt else ""),
        said=preview(last_said(completion)),
    )
    return Record(
        row=row,
        prompt=prompt,
        completion=completion,
        answer=_text(value.get("answer")),
        metrics={name: found for name, item in metrics.items() if (found := _number(item)) is not None},
        info=_dict(value.get("info")),
        more=_more(value, others, numbers),
    )


def _more(value: Mapping[str, Any], others: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    rest = {name: item for name, item in others.items() if name not in numbers or name == "version"}
    odd = {name: value[name] for name in ("info", "metrics") if name in value and not _is_dict_or_nothing(value[name])}
    if (error := value.get("error")) and len(str(error)) > PREVIEW:
        odd["error"] = error
    return odd | {name: item for name, item in rest.items() if item not in (None, "", [], {})}


def _is_dict_or_nothing(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def preview(text: str) -> str:
    return one_line(text, PREVIEW)


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        number = float(value) if abs(value) < 1e300 else math.inf
        return number if math.isfinite(number) else None
    return None


def _whole(value: Any, otherwise: int) -> int:
    number = _number(value)
    return otherwise if number is None else int(number)


def _dict(value: Any) -> dict[str, Any]:
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else repr(value)


def read_batch(path: Path) -> tuple[BatchRecord | None, str]:
    """Return a batch of the journal and an empty text, or None and what is wrong with the file."""
    try:
        step = int(path.stem.removeprefix("batch_"))
        return read_entry(path, step, BatchRecord, ways_out=REPAIR_HINT), ""
    except (OSError, JournalCorrupt) as error:
        return None, str(error)


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


def as_json(record: Record) -> str:
    """What was said and how it was rewarded; no tokens."""
    row = msgspec.to_builtins(record.row)
    head = {name: row[name] for name in ("env", "example", "rollout", "reward", "tokens", "turns", "stop", "error")}
    body = {"prompt": record.prompt, "completion": record.completion, "answer": record.answer}
    text = json.dumps(head | body | {"metrics": record.metrics, "info": record.info}, default=str, indent=1)
    return text.encode(errors="replace").decode()


def clean(text: str) -> str:
    """Control characters become pictures of themselves, tabs spaces; line ends stay."""
    return text.replace("\r\n", "\n").translate(SHOWN_CONTROLS).expandtabs(4)


def one_line(value: Any, longest: int) -> str:
    """The beginning of a text, on one line."""
    text = value if isinstance(value, str) else str(value)
    return clean(" ".join(text[: 2 * longest].split())[:longest])


def decimal(value: float | None, digits: int = 3) -> str:
    """0.5 -> "0.500"; "-" where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"
