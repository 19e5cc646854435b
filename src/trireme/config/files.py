"""Configuration files: read TOML and JSON, write a resolved run and read it back."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, atomic_write
from trireme.config.run import RunConfig
from trireme.config.section import NONE, Section, fields_of

ProcessName = Literal["trainer", "orchestrator", "inference"]
PROCESSES: tuple[ProcessName, ...] = ("trainer", "orchestrator", "inference")


AnyConfig = TypeVar("AnyConfig", bound=Section)


def read_table(path: Path) -> dict[str, Any]:
    """The content of a TOML or JSON file.

    Raises: ConfigError where it is missing, unreadable, or not what its name says.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist - expected a TOML file. {_near(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}) - expected a TOML file. Check its rights.") from None
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(_syntax_error(path, text, error)) from None


def _near(path: Path) -> str:
    beside = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else sorted(Path("configs").rglob("*.toml"))
    names = {entry.name: entry for entry in beside}
    near = [names[name] for name in get_close_matches(path.name, names, n=3, cutoff=0.5)] or beside[:5]
    where = path.parent if path.parent.is_dir() else f"{path.parent}, a folder that does not exist either"
    return f"Near it: {', '.join(map(str, near))}." if near else f"There are no TOML files in {where}."


def _syntax_error(path: Path, text: str, error: Exception) -> str:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    place = re.search(r"line (\d+)", str(error))
    number = int(place[1]) if place else text.count("\n") + 1
    lines = text.splitlines() or [""]
    line = lines[min(number, len(lines)) - 1].strip()
    hint = " Text needs quotes." if "Invalid value" in str(error) else ""
    return f"{path}, line {number}: not valid {kind} ({error}) - the line reads `{line}`. Correct it.{hint}"


SECRET = re.compile(r"(^|[_-])(key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
HIDDEN = "…"


def without_secrets(value: Any) -> Any:
    """Return a table without what its keys call a secret (`judge_api_key = "…"`), for pages, logs and messages."""
    if isinstance(value, dict):
        return {key: HIDDEN if _is_secret(key, item) else without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and SECRET.search(key) is not None


def _write_table(table: Any, text: str, file: Path) -> None:
    """Only its owner may read a file with secrets in it."""
    with atomic_write(file) as out:
        if without_secrets(table) != table:
            os.fchmod(out.fileno(), 0o600)
        out.write(text.encode())


def write_run(config: Section, file: Path) -> None:
    table = config.model_dump(mode="json")
    _write_table(table, json.dumps(table, indent=2) + "\n", file)


def read_run(root: type[AnyConfig], file: Path) -> AnyConfig:
    """What `write_run` wrote; exactly that, nothing is derived again."""
    try:
        return root.model_validate(read_table(file))
    except ValidationError as error:
        raise ConfigError(
            f"{file} is not a resolved configuration of this version ({error.error_count()} problems, the first: "
            f"{error.errors()[0]['msg']} at {error.errors()[0]['loc']}). "
            "It was written by another version, or by hand: start the run from its TOML file again."
        ) from None


def write_process_files(config: RunConfig, folder: Path, rooms: tuple[ProcessName, ...] = PROCESSES) -> list[Path]:
    """`trainer.toml` and so on: each starts its process alone, as `uv run trainer @ trainer.toml`."""
    tables = {folder / f"{room}.toml": process_table(config, room) for room in rooms}
    for file, table in tables.items():
        _write_table(table, to_toml(table), file)
    return list(tables)


def process_table(config: RunConfig, room: ProcessName) -> dict[str, Any]:
    """One process's view: its own table on top, the run's keys beside it where it has none of that name."""
    whole = to_table(config)
    shared = {key: value for key, value in whole.items() if key not in PROCESSES}
    return shared | whole[room]


def to_table(value: Any) -> Any:
    """A section as plain values. None is left out where it is the default, and "none" where it is not."""
    if isinstance(value, Section):
        items = {name: getattr(value, name) for name in fields_of(type(value))}
        said = {name: item for name, item in items.items() if item is not None or _default(value, name) is not None}
        return {name: NONE if item is None else to_table(item) for name, item in said.items()}
    if isinstance(value, tuple):
        return [to_table(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _default(section: Section, name: str) -> Any:
    return fields_of(type(section))[name].default


def to_toml(table: dict[str, Any], above: str = "") -> str:
    """The inverse of `tomllib.loads`. None, which TOML cannot say, is left out.

    Example:
        to_toml({"a": 1, "b": {"c": "x"}})  # 'a = 1\n\n[b]\nc = "x"\n'
    """
    present = {key: value for key, value in table.items() if value is not None}
    lines = [f"{toml_key(key)} = {toml_value(value)}\n" for key, value in present.items() if not _is_table(value)]
    return "".join(lines) + "".join(
        text for key, value in present.items() if _is_table(value) for text in _tables(f"{above}{toml_key(key)}", value)
    )


def _tables(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield f"\n[{name}]\n" + to_toml(value, f"{name}.")
        return
    for item in value:
        yield f"\n[[{name}]]\n" + to_toml(item, f"{name}.")


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
    )


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def toml_value(value: Any) -> str:
    """As it would stand in a file; also how messages show a value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return NONE if value is None else str(value)


def find_run_file(run: Path, room: ProcessName) -> Path:
    """What `rl` wrote, or `room` where it was started alone; the newer one where there are both.

    Raises: ConfigError where the folder is not a run's.
    """
    configs = RunPaths(run).configs
    files = [file for file in (configs / "run.json", configs / f"{room}.json") if file.is_file()]
    if not files:
        raise ConfigError(
            f"{run} is not a run's folder - expected {configs / 'run.json'}, or {room}.json beside it. "
            "Give the folder that `rl` names at its end, with `journal/` in it."
        )
    return max(files, key=lambda file: file.stat().st_mtime_ns)
