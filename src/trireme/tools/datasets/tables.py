"""The data sets that are made of a run's rollouts: for each file its columns, and how a row gets its values. Pure.

Tokens are in the order of the journal. `loss_mask` has many names, and means the same under each: 1 where the policy
sampled the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from trireme.journal.message_text import content_text, picture_of, pictures_in
from trireme.journal.pictures import PictureFiles
from trireme.journal.records import Rollout
from trireme.journal.targets import by_group
from trireme.tools.conversation import tool_calls

# messages

FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
OPTIONAL = {
    "reasoning_content": pa.string(),
    "tool_calls": pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)])),
    "tool_call_id": pa.string(),
    "name": pa.string(),
}
"""Keys of a message besides `role` and `content`. Chat templates ask whether a key is there, so a column of messages
has only the keys that some message of the run has."""


@dataclass
class MessageKeys:
    """The optional keys that some prompt, and some completion, has."""

    prompt: set[str]
    completion: set[str]
    has_pictures: bool = False

    def add(self, rollout: Rollout) -> None:
        self.has_pictures |= bool(pictures_in([*rollout.prompt, *rollout.completion]))
        # pyarrow needs one type per column: keys of any message of the run
        self.prompt |= {key for message in rollout.prompt for key in OPTIONAL if message.get(key)}
        self.completion |= {key for message in rollout.completion for key in OPTIONAL if message.get(key)}

    def type_of(self, kind: str, content: pa.DataType) -> pa.DataType:
        """Return the type of a list of messages: of a "prompt", a "completion" or "both"."""
        keys = {"prompt": self.prompt, "completion": self.completion, "both": self.prompt | self.completion}[kind]
        fields = [("role", pa.string()), ("content", content)]
        return pa.list_(pa.struct(fields + [(key, kind) for key, kind in OPTIONAL.items() if key in keys]))


def message_rows(messages: Sequence[dict[str, Any]], content: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Convert messages to one type, with JSON as text for the arguments of tool calls.

    Args:
        content: what the content of a message becomes.
    """
    rows = []
    for message in messages:
        row: dict[str, Any] = {"role": str(message.get("role", "")), "content": content(message.get("content"))}
        row |= {key: str(message[key]) for key in ("reasoning_content", "tool_call_id", "name") if message.get(key)}
        # calls in other forms are brought into OpenAI's
        calls = []
        for call in tool_calls(message):
            given = call.arguments
            arguments = given if isinstance(given, str) else json.dumps(given or {})
            calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
        rows.append(row | ({"tool_calls": calls} if calls else {}))
    return rows


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Return content in TRL's form, next to `images`: parts, of which `{"type": "image"}` takes the next picture."""
    parts = content if isinstance(content, list) else [content]
    texts = (None if picture_of(part) else content_text([part] if isinstance(part, dict) else part) for part in parts)
    return [{"type": "image" if text is None else "text", "text": text} for text in texts]


def tagged_text(content: Any) -> str:
    """Return content in verl's form, next to `images`: text, in which `<image>` takes the next picture."""
    return "".join("<image>" if part["text"] is None else part["text"] for part in parts_of(content))


PARTS = pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())]))
IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
IMAGE_FEATURES = {"info": {"features": {"images": {"feature": {"_type": "Image"}, "_type": "List"}}}}
"""Metadata by which the library `datasets` decodes the pictures."""


# rows


class Item(NamedTuple):
    """The source of a row: a rollout, one of its samples, or the best and the worst rollout of a group."""

    step: int
    rollout: Rollout
    sample: Any = None  # `Tokens`, in tables of samples
    worst: Any = None  # `Rollout`, in tables of pairs


def each_rollout(step: int, rollouts: list[Rollout]) -> Iterator[Item]:
    return (Item(step, rollout) for rollout in rollouts)


def each_sample(step: int, rollouts: list[Rollout]) -> Iterator[Item]:
    """Yield the samples that are trained on."""
    trained = (rollout for rollout in rollouts if rollout.masked is None)
    return (Item(step, rollout, sample=sample) for rollout in trained for sample in rollout.samples)


def each_pair(step: int, rollouts: list[Rollout]) -> Iterator[Item]:
    """Yield the best and the worst rollout of each group, the first of equals; nothing if all are equal."""
    for group in by_group(rollouts).values():
        best, worst = (pick(group, key=lambda rollout: rollout.reward) for pick in (max, min))
        if best.reward > worst.reward:
            yield Item(step, best, worst=worst)


Column = tuple[pa.DataType | str, Callable[[Item], Any]]
"""A type, or a kind of `MessageKeys.type_of` for messages of the journal, and the value of a row."""


@dataclass(frozen=True)
class Table:
    """One file of a data set. If rollouts show pictures it has a column `images`, with those of a row in order."""

    name: str
    items: Callable[[int, list[Rollout]], Iterator[Item]]
    columns: dict[str, Column]
    once: tuple[str, ...] = ()  # columns by which later rows that are the same are left out
    is_tagged: bool = False  # pictures are `<image>` in texts, rather than parts

    def without(self, name: str) -> Table:
        return replace(self, columns={column: of for column, of in self.columns.items() if column != name})

    def schema(self, keys: MessageKeys) -> pa.Schema:
        content = PARTS if keys.has_pictures and not self.is_tagged else TEXT
        kinds = {name: kind for name, (kind, _) in self.columns.items()}
        fields = [
            (name, keys.type_of(kind, content) if isinstance(kind, str) else kind) for name, kind in kinds.items()
        ]
        if not keys.has_pictures:
            return pa.schema(fields)
        return pa.schema([*fields, ("images", IMAGES)], {"huggingface": json.dumps(IMAGE_FEATURES)})

    def rows(self, step: int, rollouts: list[Rollout], pictures: PictureFiles | None) -> Iterable[dict[str, Any]]:
        """Yield the rows of a batch.

        Args:
            pictures: the run's pictures; None if no rollout shows one.
        """
        shown = (tagged_text if self.is_tagged else parts_of) if pictures else content_text
        for item in self.items(step, rollouts):
            row = {name: value(item) for name, (_, value) in self.columns.items()}
            messages = {name: row[name] for name, (kind, _) in self.columns.items() if isinstance(kind, str)}
            row |= {name: message_rows(each, shown) for name, each in messages.items()}
            if pictures:
                digests = [digest for each in messages.values() for digest in pictures_in(each)]
                if item.sample is not None:
                    digests = [picture.digest for picture in item.sample.pictures]
                row["images"] = [{"bytes": pictures.read(each), "path": f"{each}.png"} for each in digests]
            yield row


def of_rollout(name: str, kind: pa.DataType) -> Column:
    return kind, lambda item: getattr(item.rollout, name)


def of_sample(name: str, kind: pa.DataType) -> Column:
    return pa.list_(kind), lambda item: getattr(item.sample, name)


INT, FLOAT, MASK, TEXT = pa.int32(), pa.float32(), pa.uint8(), pa.string()
PROMPT: Column = ("prompt", lambda item: item.rollout.prompt)
COMPLETION: Column = ("completion", lambda item: item.rollout.completion)
REWARD = of_rollout("reward", pa.float64())
ANSWER = of_rollout("answer", TEXT)
PLACE: dict[str, Column] = {
    "env": of_rollout("env", TEXT),
    "example": of_rollout("example", pa.int64()),
    "step": (pa.int64(), lambda item: item.step),
    "group": of_rollout("group", pa.int64()),
}
"""Columns that identify the rollout of a row."""


# the data sets

SAMPLE = {"ids": INT, "loss_mask": MASK, "logprobs": FLOAT, "advantages": FLOAT, "versions": INT, "oldest": INT}
SAMPLE |= {"ce_weights": FLOAT}

ALL = Table(
    "rollouts",
    each_rollout,
    {
        **PLACE,
        "place": of_rollout("place", pa.int64()),
        "attempt": of_rollout("attempt", pa.int64()),
        "reward": REWARD,
        "prompt": PROMPT,
        "completion": COMPLETION,
        "answer": ANSWER,
        "metrics": (
            pa.list_(pa.struct([("name", TEXT), ("value", pa.float64())])),
            lambda item: [{"name": name, "value": value} for name, value in item.rollout.metrics.items()],
        ),
        "truncated": of_rollout("truncated", pa.bool_()),
        "stop": of_rollout("stop", TEXT),
        "num_turns": of_rollout("num_turns", pa.int64()),
        "flaws": of_rollout("flaws", pa.list_(TEXT)),
        "masked": of_rollout("masked", TEXT),
        "model": of_rollout("model", TEXT),
        "temperature": of_rollout("temperature", pa.float64()),
        "samples": (
            pa.list_(pa.struct([(name, pa.list_(kind)) for name, kind in SAMPLE.items()])),
            lambda item: [{name: getattr(sample, name) for name in SAMPLE} for sample in item.rollout.samples],
        ),
    },
)

TRL = (
    Table("prompt_only", each_rollout, {"prompt": PROMPT, "answer": ANSWER, **PLACE}, once=("env", "example")),
    Table("prompt_completion", each_rollout, {"prompt": PROMPT, "completion": COMPLETION, "reward": REWARD, **PLACE}),
    Table(
        "preference",
        each_pair,
        {
            "prompt": PROMPT,
            "chosen": COMPLETION,
            "rejected": ("completion", lambda item: item.worst.completion),
            "score_chosen": REWARD,
            "score_rejected": (pa.float64(), lambda item: item.worst.reward),
            "margin": (pa.float64(), lambda item: item.rollout.reward - item.worst.reward),
            **PLACE,
        },
    ),
    Table(
        "tokens",
        each_sample,
        {
            "input_ids": of_sample("ids", INT),
            "completion_mask": of_sample("loss_mask", MASK),
            "logprobs": of_sample("logprobs", FLOAT),
            "advantages": of_sample("advantages", FLOAT),
            "versions": of_sample("versions", INT),
            "reward": REWARD,
            **PLACE,
        },
    ),
)

VERL = (
    Table(
        "train",
        each_rollout,
        {
            "data_source": of_rollout("env", TEXT),
            "prompt": PROMPT,
            "ability": of_rollout("env", TEXT),
            "reward_model": (
                pa.struct([("style", TEXT), ("ground_truth", TEXT)]),
                lambda item: {"style": "rule", "ground_truth": item.rollout.answer or ""},
            ),
            "extra_info": (
                pa.struct([("split", TEXT), ("index", pa.int64())]),
                lambda item: {"split": "train", "index": item.rollout.example},
            ),
        },
        once=("data_source", "extra_info"),
        is_tagged=True,
    ),
    Table(
        "sft",
        each_rollout,
        {
            "messages": ("both", lambda item: [*item.rollout.prompt, *item.rollout.completion]),
            "data_source": of_rollout("env", TEXT),
            "reward": REWARD,
            **PLACE,
        },
        is_tagged=True,
    ),
)

TABLES: dict[str, tuple[Table, ...]] = {"trl": TRL, "verl": VERL, "jsonl": (ALL,), "parquet": (ALL,)}
"""Tables by the argument of `--to`."""
