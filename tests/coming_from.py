"""Reads `docs/coming-from.md`, and shows what its rows say: through the loaders, the doors, the list of metrics."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from parsing import parse
from trireme.base.devices import Devices
from trireme.config.elsewhere import flat, hosted, vf_rl
from trireme.config.gepa import GepaConfig
from trireme.config.load import load_run_config, read_as
from trireme.config.resolve import resolve
from trireme.config.rules import check
from trireme.config.run import RunConfig
from trireme.config.section import Section
from trireme.config.written import to_toml

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "coming-from.md"
EIGHT_GPUS = Devices(gpus=tuple("01234567"), cores=64)
"""What the documents' authors have in mind."""

TITLES = {
    "The tutorial of vf.RLTrainer": "tutorial",
    "The guide to vf-rl": "vf-rl guide",
    "The reference of RLTrainer": "RLTrainer",
    "The guide to prime-rl and evaluation": "prime-rl guide",
    "The guide to hosted training, prime-rl and GEPA": "RL guide",
}
VERDICTS = ("works as written", "works as ", "does not apply because ")
NESTED = {
    "trireme": {"env": ("init", "install", "list", "check"), "eval": ("run", "tui"), "gepa": ("run",)}
    | {"train": ("submit",), "lab": ("setup",)}
}

ENV = {"id": "reverse-text"}
SMALL: dict[str, dict[str, Any]] = {
    "rl": {"orchestrator": {"env": [ENV]}},
    "rl orchestrator": {},
    "vf-rl": {"model": "models/reverse-text-tiny", "env": ENV, "inference": {"gpus": 1}, "trainer": {"gpus": 1}},
    "prime-rl": {"model_name": "models/reverse-text-tiny", "env": ENV},
    "hosted": {"model": "models/reverse-text-tiny", "env": [ENV]},
    "gepa": {"env_id": "reverse-text", "model": "models/reverse-text-tiny"},
}
"""The smallest file of each format: what a row's TOML is put into."""


@dataclass(frozen=True)
class Row:
    document: str
    first: int  # line of the document
    last: int
    there: str
    here: str
    shown_by: str

    def __str__(self) -> str:
        return f"{self.document} {self.first}-{self.last}"

    @property
    def lines(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def means(self) -> str:
        """The first words of the last column, without `block`."""
        return re.sub(r" (block|refuses)$", "", self.shown_by.strip("`"))

    @property
    def has_block(self) -> bool:
        return self.shown_by.strip("`").endswith(" block")

    @property
    def is_refused(self) -> bool:
        return self.shown_by.strip("`").endswith(" refuses")

    @property
    def said(self) -> list[str]:
        """What the third column says that a message has."""
        return [quoted for part in self.here.split("says")[1:] for quoted in quotes(part)]

    @property
    def command(self) -> str:
        """As it is typed here."""
        place = self.there if self.here.startswith("works as written") else self.here
        found = [quoted for quoted in quotes(place) + quotes(self.here) if is_command(quoted)]
        assert found, f"{self} names no command of ours"
        return found[0].removeprefix("uv run ")


def quotes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def programs() -> Mapping[str, str]:
    """From `[project.scripts]`: name -> `module:function`."""
    scripts: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    return scripts


def is_command(quoted: str) -> bool:
    words = quoted.removeprefix("uv run ").split()
    return (len(words) > 1 and words[0] in programs()) or quoted.removeprefix("uv run ") in programs()


def program(name: str) -> Any:
    module, _, function = programs()[name].partition(":")
    return getattr(import_module(module), function)


def verbs(words: list[str]) -> list[str]:
    """The program, and the verbs after it."""
    found, below = words[:1], NESTED.get(words[0], {})
    if words[0] == "trireme":
        found = words[:2]
        if len(words) > 2 and words[2] in below.get(words[1], ()):
            found = words[:3]
    return found


@cache
def rows() -> tuple[Row, ...]:
    return tuple(_rows(PAGE.read_text()))


def _rows(text: str) -> Iterator[Row]:
    document = None
    for line in text.splitlines():
        if line.startswith("## "):
            document = TITLES.get(line.removeprefix("## "))
        found = re.fullmatch(r"\| (\d+)(?:-(\d+))? \| (.+) \| (.+) \| (\S.*) \|", line)
        if found and document:
            yield Row(document, int(found[1]), int(found[2] or found[1]), *map(str, found.groups()[2:]))


@cache
def documents() -> Mapping[str, Any]:
    """What stands in the documents: see `scripts/names_of_documents.py`."""
    listed: dict[str, Any] = json.loads((REPOSITORY / "tests" / "data" / "documents.json").read_text())
    return listed


def content_lines(document: str) -> set[int]:
    runs = [run.partition("-") for run in documents()[document]["content"].split()]
    return {number for first, _, last in runs for number in range(int(first), int(last or first) + 1)}


def blocks(document: str) -> dict[int, dict[str, Any]]:
    return {int(first): table for first, table in documents()[document]["toml"].items()}


# TOML of a row, through the loader of its format


def table_of(row: Row) -> dict[str, Any]:
    typed = block_of(row) if row.has_block else fragment(row.there)
    return merged(SMALL[row.means], typed)


def block_of(row: Row) -> dict[str, Any]:
    (table,) = (table for first, table in blocks(row.document).items() if first in row.lines)
    return table


def fragment(cell: str) -> dict[str, Any]:
    """The quoted lines of TOML after the cell's last colon, in their order; `key = none` stays a word of its own."""
    typed = re.split(r": (?=[^`]*(?:`[^`]*`[^`]*)*$)", cell)[-1]
    lines = [quoted for quoted in quotes(typed) if re.fullmatch(r"\[+[\w.]+\]+|[\w.]+ = \S.*", quoted)]
    text = "\n".join(re.sub(r"= none$", '= "none"', line) for line in lines)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AssertionError(f"no TOML: {text}") from error


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A key that is "none" at the top of a row's TOML is taken away."""
    result = deepcopy(dict(below))
    for key, value in above.items():
        if value == "none" and key in result:
            del result[key]
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def load(row: Row, folder: Path) -> Section:
    """As the command does, up to what it would start.

    Raises: ConfigError
    """
    table = table_of(row)
    if row.means == "gepa":
        return read_as(GepaConfig, table, where="the row")
    config = resolve(_translated(row.means, table, folder), EIGHT_GPUS)
    check(config, EIGHT_GPUS)
    return config


def _translated(kind: str, table: dict[str, Any], folder: Path) -> RunConfig:
    translate = {"vf-rl": vf_rl.translate, "prime-rl": flat.translate, "hosted": hosted.translate}.get(kind)
    file = folder / "row.toml"
    file.write_text(to_toml(translate(table, EIGHT_GPUS).table if translate else table))
    argv = ["--orchestrator", "@", str(file)] if kind == "rl orchestrator" else ["@", str(file)]
    return load_run_config(argv, program="rl")[0]


def expected(cell: str, root: type[Section]) -> dict[str, Any]:
    """The keys of ours that a cell gives a value to."""
    pairs = [quoted.partition(" = ") for quoted in quotes(cell) if re.fullmatch(r"[a-z][\w.]* = .+", quoted)]
    ours = [(key, value) for key, _, value in pairs if key.split(".")[0] in root.model_fields]
    return {key: None if value == "none" else tomllib.loads(f"x = {value}")["x"] for key, value in ours}


def value_at(config: Section, key: str) -> Any:
    here: Any = config.model_dump(mode="json")
    for part in key.split("."):
        if here is None:
            return None
        here = here[int(part)] if part.isdigit() else here[part]
    return here


@cache
def metrics() -> set[str]:
    """Names in `docs/metrics.md`, of warnings too. A test of its own holds it against what runs write."""
    cells = re.findall(r"^\| (`[^|]*`) \|", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return {name for cell in cells for name in quotes(cell)}


# tests that rows name


def tests_named(name: str) -> list[Path]:
    file = name.partition("::")[0]
    return [path for folder in ("unit", "processes", "e2e") if (path := REPOSITORY / "tests" / folder / file).is_file()]


def functions_of(path: Path) -> set[str]:
    nodes = ast.walk(parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
