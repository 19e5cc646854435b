"""Tables of the configuration: the base class of all models, and what each of their fields accepts."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A table of the configuration file. Unknown keys are refused; values never change after loading.

    The sentence under each field is its documentation: `rl --help` prints it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


Kind = Literal["section", "sections", "list", "table", "choice", "bool", "integer", "number", "text"]

_SCALARS: dict[Any, Kind] = {bool: "bool", int: "integer", float: "number", str: "text", Path: "text"}
_WORDS: dict[Kind, str] = {
    "section": "table",
    "sections": "array of tables",
    "table": "table",
    "bool": "true or false",
    "text": "text",
}
_BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}


@dataclass(frozen=True)
class Field:
    """One key of a table.

    Example:
        fields_of(OrchestratorConfig)["batch_size"]  # Field(name="batch_size", kind="integer", words="integer > 0", …)
    """

    name: str
    kind: Kind
    words: str  # what it accepts, in words
    optional: bool  # None is allowed
    section: type[Section] | None  # what its table, or each of its tables, consists of
    required: bool
    default: Any
    doc: str

    def accepts(self, value: Any) -> bool:
        """Whether the value has the right shape. Bounds and choices are left to the schema itself."""
        if value is None:
            return self.optional
        match self.kind:
            case "section" | "table":
                return isinstance(value, dict)
            case "sections":
                return isinstance(value, list) and all(isinstance(item, dict) for item in value)
            case "list":
                return isinstance(value, list)
            case "bool":
                return isinstance(value, bool)
            case "integer":
                return isinstance(value, int) and not isinstance(value, bool)
            case "number":
                return isinstance(value, int | float) and not isinstance(value, bool)
            case "text":
                return isinstance(value, str)
        return True


@cache
def fields_of(section: type[Section]) -> dict[str, Field]:
    return {name: _to_field(name, info) for name, info in section.model_fields.items()}


def _to_field(name: str, info: FieldInfo) -> Field:
    annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
    kind, words, optional, section = _read(annotation)
    doc = (info.description or (section.__doc__ if section else "") or "").strip()
    return Field(name, kind, words, optional, section, info.is_required(), info.get_default(), doc)


def _read(annotation: Any) -> tuple[Kind, str, bool, type[Section] | None]:
    """Kind, words, whether None is allowed, and the section below, of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        kind, words, _, section = _read(inner)
        return kind, words, True, section
    if origin is Annotated:
        kind, words, optional, section = _read(arguments[0])
        return kind, " ".join([words, *_bounds(arguments[1:])]), optional, section
    if origin is Literal:
        return "choice", " | ".join(map(str, arguments)), False, None
    if origin is tuple:
        return _read_list(arguments)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section", _WORDS["section"], False, annotation
    kind = "table" if origin is dict else _SCALARS[annotation]
    words = "path" if annotation is Path else _WORDS.get(kind, kind)
    return kind, words, False, None


def _read_list(arguments: tuple[Any, ...]) -> tuple[Kind, str, bool, type[Section] | None]:
    kind, words, _, section = _read(arguments[0])
    if kind == "section":
        return "sections", _WORDS["sections"], False, section
    if arguments[-1] is Ellipsis:
        return "list", f"list of {words}", False, None
    return "list", f"list of {len(arguments)} x {words}", False, None


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(tuple(item.metadata))
        elif isinstance(item, Interval):
            yield from _bounds(tuple(item))
        elif type(item) in _BOUNDS:
            attribute, sign = _BOUNDS[type(item)]
            yield f"{sign} {getattr(item, attribute):g}"


def walk(section: type[Section], above: str = "") -> Iterator[tuple[str, Field]]:
    """Every field with its dotted path, each table right before what is in it.

    Items of an array of tables go by the array's own name: `orchestrator.env.id`.
    """
    for name, field in fields_of(section).items():
        yield f"{above}{name}", field
        if field.section:
            yield from walk(field.section, f"{above}{name}.")


def find(section: type[Section], path: tuple[str, ...]) -> Field | None:
    """The field at a path; numbers pick items of an array of tables and are passed over."""
    found: Field | None = None
    inside: type[Section] | None = section
    for part in path:
        if part.isdigit() and found and found.kind == "sections":
            continue
        found = fields_of(inside).get(part) if inside else None
        if found is None:
            return None
        inside = found.section
    return found


def as_key(path: tuple[str | int, ...]) -> str:
    """A path as people write it.

    Example:
        as_key(("orchestrator", "env", "0", "id"))  # "orchestrator.env[0].id"
    """
    key = ".".join(f"[{part}]" if str(part).isdigit() else str(part) for part in path)
    return key.replace(".[", "[")


def as_flag(path: tuple[str, ...]) -> str:
    return "--" + ".".join(path).replace("_", "-")
