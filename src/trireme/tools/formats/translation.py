"""What a run of another format is in ours: our keys, and for each of theirs a line on what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.config.files import to_toml, toml_value
from trireme.config.problems import raise_together
from trireme.config.section import Section


@dataclass(frozen=True)
class Translation:
    """A run in our keys.

    Example:
        Translation(table={"max_steps": 100}, notes=("trainer.args.max_steps = 100 -> max_steps = 100",),
                    origins={"max_steps": "trainer.args.max_steps"})
    """

    table: dict[str, Any]  # as our TOML would be read
    notes: tuple[str, ...] = ()  # what became of each key
    env_files: tuple[Path, ...] = ()  # files of environment variables that the run is to have
    origins: Mapping[str, str] = field(default_factory=dict)  # our key -> theirs, for messages


def as_toml(translation: Translation) -> str:
    """A file for `rl @`, with its notes as comments on top."""
    comments = "".join(f"# {line}\n" for note in translation.notes for line in note.splitlines())
    return f"{comments}\n{to_toml(translation.table)}"


class Sheet:
    """A translation that is being written. Only what is put on it gets into the run, and nothing without a note."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {}
        self.problems: list[str] = []
        self._notes: list[str] = []
        self._origins: dict[str, str] = {}

    def put(self, ours: str, value: Any, *, theirs: str, said: str = "", why: str = "") -> None:
        """
        Args:
            ours: dotted key.
            theirs: dotted key of the other format.
            said: their value as it is to be shown, with its `=`.
        """
        self.set(ours, value)
        self._origins[ours] = theirs
        self._notes.append(f"{theirs}{said} -> {ours} = {toml_value(value)}" + (f"; {why}" if why else ""))

    def set(self, ours: str, value: Any) -> None:
        """Without a note: for what a note has said already."""
        *tables, key = ours.split(".")
        here = self.table
        for table in tables:
            here = here.setdefault(table, {})
        here[key] = value

    def note(self, text: str) -> None:
        self._notes.append(text)

    def refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def finish(self, *, env_files: tuple[Path, ...] = ()) -> Translation:
        """Raises: ConfigError with everything that was refused."""
        raise_together(self.problems)
        return Translation(self.table, tuple(self._notes), env_files, self._origins)


class Reader:
    """One table of theirs and the sheet: each key is read, shown with its value and where that comes from, and put."""

    def __init__(self, sheet: Sheet, section: Section, above: str = "") -> None:
        """
        Args:
            above: the table's name with a dot, for keys as people write them: "trainer.args.".
        """
        self.sheet = sheet
        self.section = section
        self.above = above

    def given(self, key: str) -> bool:
        return key in self.section.model_fields_set

    def said(self, key: str) -> str:
        """ " = 0.7 (default)": their value as notes show it."""
        value = getattr(self.section, key)
        shown = toml_value(list(map(_plain, value)) if isinstance(value, tuple) else value)
        return f" = {shown}" + ("" if self.given(key) else " (default)")

    def take(self, key: str, ours: str, value: Any = None, *, why: str = "") -> None:
        """Puts a key of theirs at a place of ours; with another value where one is given. None is left out."""
        value = getattr(self.section, key) if value is None else value
        value = list(value) if isinstance(value, tuple) else value
        if value is not None:
            self.sheet.put(ours, value, theirs=f"{self.above}{key}", said=self.said(key), why=why)

    def tell(self, key: str, text: str) -> None:
        """Of a key that leads to none of ours."""
        self.sheet.note(f"{self.above}{key}{self.said(key)}: {text}")

    def refuse(self, key: str, text: str) -> None:
        self.sheet.refuse(f"`{self.above}{key}{self.said(key)}` - {text}")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
