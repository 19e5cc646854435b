"""Tables of the configuration: the base class of all models, and what each of their fields accepts.

The command line, error messages, `--help`, `docs/configuration/` and the JSON schema are made from these models, so
nothing is declared twice.
"""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

NONE = "none"  # the word for nothing in files and flags, as TOML has none; "null" is read too


AnySection = TypeVar("AnySection", bound="Section")


class Section(BaseModel):
    """A table of a configuration file. Unknown keys are refused; values never change after loading.

    The sentence under each field is its documentation.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        return fields_of(cls)[info.field_name].read(value) if info.field_name else value


Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
"""A seed that numpy and vLLM accept."""

EnvVars = dict[str, Annotated[str, BeforeValidator(lambda value: as_text(value))]]
"""Environment variables by name. Numbers, and true or false, are taken as the text that they are written as."""


def as_text(value: Any) -> Any:
    """Return a number or a truth value as text; anything else as it is."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Kind = Literal["section", "sections", "list", "table", "choice", "bool", "integer", "number", "text"]

_SCALARS: dict[Any, Kind] = {bool: "bool", int: "integer", float: "number", str: "text", Path: "text"}
_WORDS: dict[Kind, str] = {"section": "table", "sections": "array of tables", "table": "table", "bool": "true or false"}
_BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}


@dataclass(frozen=True)
class Field:
    """One key of a table.

    Example:
        fields_of(OrchestratorConfig)["batch_size"]  # Field(name="batch_size", kind="integer", words="integer > 0", …)
    """

    name: str
    kind: Kind
    words: str  # description of the values that it accepts
    optional: bool  # None is allowed
    section: type[Section] | None  # the model of its table, or of each of its tables
    required: bool
    default: Any
    doc: str

    @property
    def is_text_list(self) -> bool:
        return self.words == "list of text"

    def read(self, value: Any) -> Any:
        """Return a value in the form that pydantic validates.

        Files, flags and environment variables may write "none" for nothing, a single table for an array of one, tables
        as JSON or TOML, and lists with commas. Everything else, also what is wrong, is left to pydantic.

        Example:
            trainer_gpu_ids.read("0,1")  # ["0", "1"]; from "[0, 1]" it is [0, 1]
        """
        if isinstance(value, bool) and self.kind in ("integer", "number"):
            # Pydantic would take true and false as 1 and 0. It refuses them as text.
            return str(value).lower()
        if isinstance(value, str) and self.kind != "text":
            if self.optional and value.lower() in (NONE, "null") and NONE not in self.words.split(" | "):
                return None
            if self.kind in ("section", "sections", "table", "list"):
                structure = read_structure(value)
                value = structure if isinstance(structure, dict | list) else value
            if isinstance(value, str) and self.kind == "list":
                parts = [part.strip() for part in value.split(",")]
                if len(parts) > 2 and not parts[-1]:  # "a,b,"; "a," alone may be an item
                    parts.pop()
                if self.is_text_list and value and not (len(parts) > 1 and all(parts)):
                    value = [value]  # "\n\n" and ", " are items themselves
                else:
                    value = [part for part in parts if part]
        return [value] if isinstance(value, dict) and self.kind == "sections" else value


def read_structure(text: str) -> Any:
    """Return the value that a text holds as JSON or TOML, or the text itself."""
    for read in (json.loads, lambda text: tomllib.loads(f"value = {text}")["value"]):
        try:
            return read(text)
        except (ValueError, RecursionError):
            continue
    return text


@cache
def fields_of(section: type[Section]) -> dict[str, Field]:
    found = {}
    for name, info in section.model_fields.items():
        annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        kind, words, optional, below = _read_type(annotation)
        doc = info.description or (below.__doc__ if below else "")
        doc = doc or next((item.doc for item in info.metadata if hasattr(item, "doc")), "")  # tables of other formats
        found[name] = Field(
            name, kind, words, optional, below, info.is_required(), info.get_default(), (doc or "").strip()
        )
    return found


def _read_type(annotation: Any) -> tuple[Kind, str, bool, type[Section] | None]:
    """Return the kind of a type, its words, whether None is allowed, and the section below."""
    origin, arguments = get_origin(annotation), get_args(annotation)

    # Unions and annotations wrap a type: describe the inner one, and add that None is allowed, or the bounds.
    if origin in (Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        kind, words, _, section = _read_type(inner)
        return kind, words, True, section
    if origin is Annotated:
        kind, words, optional, section = _read_type(arguments[0])
        return kind, " ".join([words, *_bounds(arguments[1:])]), optional, section

    # One of several values, or a list of them. A list of sections is an array of tables.
    if origin is Literal:
        return "choice", " | ".join(map(str, arguments)), False, None
    if origin is tuple:
        kind, words, _, section = _read_type(arguments[0])
        if kind == "section":
            return "sections", _WORDS["sections"], False, section
        length = "" if arguments[-1] is Ellipsis else f"{len(arguments)} x "
        return "list", f"list of {length}{words}", False, None

    # A single value.
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section", _WORDS["section"], False, annotation
    kind = "table" if origin is dict else _SCALARS[annotation]
    words = "path" if annotation is Path else _WORDS.get(kind, kind)
    return kind, words, False, None


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(tuple(item.metadata))
        elif isinstance(item, Interval):
            yield from _bounds(tuple(item))
        elif type(item) in _BOUNDS:
            attribute, sign = _BOUNDS[type(item)]
            yield f"{sign} {getattr(item, attribute):.10g}"


def walk(section: type[Section], above: str = "") -> Iterator[tuple[str, Field]]:
    """Yield every field with its dotted path, each table right before its fields.

    Items of an array of tables go by the array's own name: `orchestrator.env.id`.
    """
    for name, field in fields_of(section).items():
        yield f"{above}{name}", field
        if field.section:
            yield from walk(field.section, f"{above}{name}.")


def find(section: type[Section], path: tuple[str, ...]) -> Field | None:
    """Return the field at a path. Numbers, which pick items of an array of tables, are skipped."""
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


def merged(table: Any, own: Any) -> Any:
    """Return a table with the keys that another one of its kind gives over its own, tables below key by key.

    One of another `type` replaces the whole table, as the keys of one kind mean nothing to another. To merge again
    changes nothing.

    Example:
        merged(Sampling(temperature=0.7, top_k=20), Sampling(top_k=50))  # Sampling(temperature=0.7, top_k=50)
    """
    if isinstance(table, dict) and isinstance(own, dict):
        return table | own
    if not isinstance(table, Section) or not isinstance(own, Section):
        return table if own is None else own
    given = own.model_fields_set
    values = {name: (getattr(table, name), getattr(own, name)) for name in given}
    if "type" in values and values["type"][0] != values["type"][1]:
        return own
    both = {name: None if now is None else merged(before, now) for name, (before, now) in values.items()}
    return table.model_copy(update=both)


def as_key(path: tuple[str | int, ...]) -> str:
    """Return a path as people write it.

    Example:
        as_key(("orchestrator", "env", "0", "id"))  # "orchestrator.env[0].id"
    """
    key = ".".join(f"[{part}]" if str(part).isdigit() else str(part) for part in path)
    return key.replace(".[", "[")


def as_flag(path: tuple[str, ...]) -> str:
    return "--" + ".".join(path).replace("_", "-")
