"""Configuration files: read TOML and JSON, write a resolved run and read it back."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, atomic_write
from trireme.config.orchestrator import SOURCE_TABLES
from trireme.config.run import RunConfig
from trireme.config.section import NONE, AnySection, Section, fields_of

ProcessName = Literal["trainer", "orchestrator", "inference"]
PROCESSES: tuple[ProcessName, ...] = ("trainer", "orchestrator", "inference")


def read_table(path: Path) -> dict[str, Any]:
    """Return the content of a TOML or JSON file.

    Raises: ConfigError if it is missing, unreadable, or not what its name says.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        where = path.parent if path.parent.is_dir() else f"{path.parent}, a folder that does not exist either"
        files = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else sorted(Path("configs").rglob("*.toml"))
        advice = files_near(path, files) or f"There are no TOML files in {where}."
        raise ConfigError(f"{path} does not exist - expected a TOML file. {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}) - expected a TOML file. Check its permissions.") from None

    kind, read = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        table = read(text)
        if kind == "JSON":
            # JSON can write half a character ("\ud800"), which no file or message could hold later.
            json.dumps(table, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        # Show the line itself. An error at the end of the file names none: show the last one.
        place = re.search(r"line (\d+)", str(error))
        number = int(place[1]) if place else text.count("\n") + 1
        lines = text.splitlines() or [""]
        line = lines[min(number, len(lines)) - 1].strip()[:200]
        hint = " Text needs quotes." if "Invalid value" in str(error) else ""
        raise ConfigError(
            f"{path}, line {number}: not valid {kind} ({error}) - the line reads `{line}`. Correct it.{hint}"
        ) from None

    # A JSON file may hold anything.
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds {type(table).__name__} - expected an object with keys. Correct it.")
    return table


def files_near(path: Path, files: list[Path]) -> str:
    """Return a sentence with the files whose names are like that of `path`, or with the first; empty without files."""
    names = {file.name: file for file in files}
    near = [names[name] for name in get_close_matches(path.name, names, n=3, cutoff=0.5)] or files[:5]
    return f"Near it: {', '.join(map(str, near))}." if near else ""


SECRET = re.compile(r"(^|[_-])(key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
SECRET_IN_TEXT = re.compile(
    r"""((?:^|[^a-z])(?:key|token|secret|password|passwd|credentials?)["']?\s*[=:]\s*)"""
    r"""("(?:[^"\\]|\\.)*"|'[^']*'|[^\s,}\]]+)""",
    re.IGNORECASE,
)
HIDDEN = "…"


def without_secrets(value: Any) -> Any:
    """Return a table without what its keys call a secret (`judge_api_key = "…"`), for pages, logs and messages."""
    if isinstance(value, dict):
        hidden = {key: HIDDEN for key, item in value.items() if isinstance(item, str) and SECRET.search(key)}
        return {key: without_secrets(item) for key, item in value.items()} | hidden
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def command_without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of secrets, given as `--a.judge-api-key VALUE` or in a table."""
    # Each word with the one before it, which may be the flag that calls it a secret.
    before = ["", *words]
    return [
        HIDDEN
        if flag.startswith("--") and SECRET.search(flag.rpartition(".")[2])
        else SECRET_IN_TEXT.sub(rf'\1"{HIDDEN}"', word)
        for flag, word in zip(before, words, strict=False)
    ]


def _write_table(table: Any, text: str, file: Path) -> None:
    """Write a file, which only its owner may read if there are secrets in it."""
    with atomic_write(file) as out:
        # Before the content is written, so that no other user can read it meanwhile.
        if without_secrets(table) != table:
            os.fchmod(out.fileno(), 0o600)
        out.write(text.encode())


def write_run(config: Section, file: Path) -> None:
    table = config.model_dump(mode="json")
    _write_table(table, json.dumps(table, indent=2) + "\n", file)


def read_run(root: type[AnySection], file: Path) -> AnySection:
    """Return exactly what `write_run` wrote. Nothing is derived again."""
    table = read_table(file)
    if "orchestrator" in root.model_fields and "orchestrator" not in table and "data" in table:
        raise ConfigError(
            f"{file} is that of an `sft` run - expected one of `rl`. `trireme dashboard`, `diff` and `export` "
            "take such runs."
        )
    try:
        return root.model_validate(table)
    except ValidationError as error:
        raise ConfigError(
            f"{file} is not a resolved configuration of this version ({error.error_count()} problems, the first: "
            f"{error.errors()[0]['msg']} at {error.errors()[0]['loc']}). "
            "It was written by another version, or by hand: start the run from its TOML file again."
        ) from None


def write_process_files(config: RunConfig, folder: Path, names: tuple[ProcessName, ...] = PROCESSES) -> list[Path]:
    """Write `trainer.toml` and so on: each starts its process alone, as `uv run trainer @ trainer.toml`."""
    whole = to_table(config)
    # A key that is off in a source's own table must not be taken from the run's.
    for table, source in zip(whole["orchestrator"]["env"], config.orchestrator.env, strict=True):
        own = {name: each for name in (*SOURCE_TABLES, "loss") if (each := getattr(source, name)) is not None}
        table |= {name: to_table(each, every=True) for name, each in own.items()}

    shared = {key: value for key, value in whole.items() if key not in PROCESSES}
    files = []
    for name in names:
        table = shared | whole[name]  # the run's keys, and over them those of its own table, without its name
        table["env_vars"] = shared["env_vars"] | whole[name]["env_vars"]
        if name == "trainer" and len(config.losses) > 1:  # it needs the losses of sources too
            losses = [
                {key: each[key] for key in ("id", "name", "loss") if key in each}
                for each in whole["orchestrator"]["env"]
            ]
            table = shared | {"trainer": whole["trainer"], "orchestrator": {"env": losses}}
        files.append(folder / f"{name}.toml")
        _write_table(table, to_toml(table), files[-1])
    return files


def to_table(value: Any, *, every: bool = False) -> Any:
    """Return a section as plain values. None is left out if it is the default, and "none" otherwise.

    Args:
        every: write "none" for defaults too, but in keys that would take it as text.
    """
    if isinstance(value, Section):
        items = ((field, getattr(value, name)) for name, field in fields_of(type(value)).items())
        return {
            field.name: NONE if item is None else to_table(item, every=every)
            for field, item in items
            if item is not None
            or field.default is not None
            or (every and field.kind != "text" and NONE not in field.words.split(" | "))
        }
    if isinstance(value, tuple):
        return [to_table(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def given_values(value: Any) -> Any:
    """Return the values that the user gave, as TOML has them. Defaults are left out, as some are derived if nothing
    was given."""
    if isinstance(value, Section):
        names = [name for name in type(value).model_fields if name in value.model_fields_set]
        return {name: given_values(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [given_values(item) for item in value]
    return NONE if value is None else to_table(value)


def to_toml(table: dict[str, Any], above: str = "") -> str:
    """Return a table as TOML, the inverse of `tomllib.loads`. None, which TOML cannot express, is left out.

    Example:
        to_toml({"a": 1, "b": {"c": "x"}})  # 'a = 1\n\n[b]\nc = "x"\n'
    """
    # Plain keys come first: after a table's header they would belong to that table.
    lines = tables = ""
    for key, value in table.items():
        name = f"{above}{toml_key(key)}"
        if isinstance(value, dict):
            tables += f"\n[{name}]\n{to_toml(value, f'{name}.')}"
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables += "".join(f"\n[[{name}]]\n{to_toml(item, f'{name}.')}" for item in value)
        elif value is not None:
            lines += f"{toml_key(key)} = {toml_value(value)}\n"
    return lines + tables


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def toml_value(value: Any) -> str:
    """Return a value as files and messages write it."""
    if isinstance(value, bool | str | Path):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return NONE if value is None else str(value)


def find_run_file(run: Path, name: ProcessName) -> Path:
    """Return the resolved configuration in a run's folder: that of `rl` or of a process started alone, whichever is
    newer.

    Raises: ConfigError if the folder is not a run's.
    """
    configs = RunPaths(run).configs
    files = [file for file in (configs / "run.json", configs / f"{name}.json") if file.is_file()]
    if not files:
        raise ConfigError(
            f"{run} is not a run's folder - expected {configs / 'run.json'} or {configs / f'{name}.json'}. "
            "Give the folder that `rl` names at its end, with `journal/` in it."
        )
    return max(files, key=lambda file: file.stat().st_mtime_ns)
