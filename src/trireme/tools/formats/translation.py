"""Files of other systems that hold a whole run: their rows, their defaults, and what they set without a key.

Example:
    Format("vf-rl", rows=(Row("trainer.args.beta", "trainer.loss.beta"),), defaults={"trainer": {"args": {"beta": 0}}})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.arguments import TypedFlag
from trireme.config.compatibility import keys_for
from trireme.config.files import toml_value
from trireme.config.nested import KeyPath, value_at, with_value
from trireme.config.problems import raise_together
from trireme.config.rows.rules import on_machine
from trireme.config.run import RunConfig
from trireme.config.section import as_flag, as_key, fields_of, find, read_structure
from trireme.config.translation import (
    Line,
    Row,
    Settings,
    Translated,
    is_known,
    names_below,
    renamed,
    translate_over,
)

Table = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of run files.

    Attributes:
        system: its name, for messages.
        defaults: its values of keys that were not given, as far as they set something here.
        required: keys that every file has.
        switches: keys that are true or false.
        presets: our keys that the format sets without a key of its own, and those that it sets on GPUs only.
    """

    system: str
    rows: tuple[Row, ...]
    defaults: Table = field(default_factory=dict)
    required: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    presets: Settings = field(default_factory=dict)
    presets_on_gpus: Settings = field(default_factory=dict)


def translate(
    format: Format, table: Table, devices: Devices, *, where: str = "the file", flags: Sequence[TypedFlag] = ()
) -> Translated:
    """Translate a file that was read already.

    Args:
        where: the file's name, for messages.
        flags: keys of this format that were typed on top of the file.

    Raises: ConfigError with all keys that the format does not have, that cannot have that value, or that disagree.
    """
    table = _lifted(table, format.rows)
    typed = {path: (flag, value) for flag in flags for path, value in [_read_flag(flag, format.rows)]}
    for path, (flag, value) in typed.items():
        if path[:2] == ("env", "0") and isinstance(table.get("env"), dict):
            table = table | {"env": [table["env"]]}
        around = (path[:depth] for depth in range(1, len(path)))
        inside = next((above for above in around if isinstance(value_at(table, above), list)), None)
        if inside and not path[len(inside)].isdigit():
            raise ConfigError(
                f"`{flag.name}` points into an array, `{as_key(inside)}` - expected the number of an item, counted "
                f"from 0. Write `{as_flag(inside)}.0.…`."
            )
        table = with_value(table, path, value)
    engine = value_at(table, ("inference", "args"))
    if isinstance(engine, dict):  # vLLM takes its flags with hyphens and with underscores
        plain = {name.replace("-", "_"): value for name, value in engine.items()}
        table = with_value(table, ("inference", "args"), plain)

    # A rule may look at any of the required keys.
    missing = [key for key in format.required if value_at(table, path_of(key)) is None]
    raise_together(
        f"{where}: `{key}` is missing - expected it in each file of `{format.system}`. Write "
        f"`{f'[{key}]' if key == 'env' else f'{key} = …'}`."
        for key in missing
    )
    with on_machine(devices):
        made = translate_over(format.defaults, table, format.rows, where=where, system=format.system, root=RunConfig)
    problems = [
        _unknown(path, format, f"`{typed[path][0].name}`" if path in typed else where, path in typed)
        for path in made.unknown
    ]
    problems += [
        f"{where}: `{key} = {toml_value(value)}` - expected true or false. Write one of them."
        for key in format.switches
        if not isinstance(value := value_at(table, path_of(key), False), bool)
    ]
    raise_together([*problems, *made.problems])

    # Keys of the file come after the presets, and override them.
    presets = format.presets | (format.presets_on_gpus if devices.gpus else {"device": "cpu"})
    free = {path_of(key): value for key, value in presets.items() if path_of(key) not in made.settings}
    made.lines.append(Line((format.system,), ..., free, "set without a key", where))
    made.settings = free | made.settings
    return made


def path_of(key: str) -> KeyPath:
    return tuple(key.split("."))


def knows(format: Format, flag: TypedFlag) -> bool:
    """Return whether a flag is a key of the format, and not one of ours alone."""
    path, _ = _read_flag(flag, format.rows)
    has_row = any(row.theirs == ".".join(path) for row in format.rows)
    return has_row or (find(RunConfig, path) is None and is_known(path, format.rows, RunConfig))


def _read_flag(flag: TypedFlag, rows: tuple[Row, ...]) -> tuple[KeyPath, Any]:
    """Return the key of a flag, without its `no-`, and the value that its words stand for."""
    path = flag.path
    for at in (0, len(path) - 1):
        positive = (*path[:at], path[at].removeprefix("no_"), *path[at + 1 :])
        if positive != path and not is_known(path, rows, RunConfig) and is_known(positive, rows, RunConfig):
            return positive, False
    ours = renamed(path, rows, RunConfig)
    found = find(RunConfig, ours) if ours else None
    words = " ".join(flag.values)
    if found and found.kind == "text":
        return path, words
    if len(flag.values) > 1:
        return path, list(flag.values)
    return path, read_structure(words) if flag.values else True


def _unknown(path: KeyPath, format: Format, label: str, is_flag: bool) -> str:
    names = names_below(path[:-1], format.rows)
    near = get_close_matches(path[-1], names, n=1) or [name for name in names if name in keys_for(path[-1])]
    guess = (*path[:-1], near[0]) if near else ()
    if below := names_below(path, format.rows):
        return f"{label}: `{as_key(path)}` is a table. Write its keys one by one: `{as_flag((*path, below[0]))} …`."
    advice = f"Did you mean `{as_flag(guess) if is_flag else as_key(guess)}`?" if guess else "Remove it."
    key = "unknown flag" if is_flag else f"unknown key `{as_key(path)}`"
    return f"{label}: {key} - `{format.system}` has none of that name, and neither has `rl`. {advice}"


def _lifted(table: Table, rows: tuple[Row, ...]) -> Table:
    """Move keys of the whole run out of the tables below which the guide shows them. TOML takes them for keys of those
    tables.

    Example:
        _lifted({"wandb": {"env_file": ["secrets.env"]}}, HOSTED.rows)  # {"wandb": {}, "env_file": ["secrets.env"]}
    """
    lifted, of_run = dict(table), {*names_below((), rows), *fields_of(RunConfig)}
    for name, below in table.items():
        if isinstance(below, dict):
            # A key stays in its table if the table has it, and it never overwrites one of the top level.
            strays = {key for key in below.keys() & of_run - table.keys() if not is_known((name, key), rows, RunConfig)}
            lifted |= {key: below[key] for key in strays}
            lifted[name] = {key: value for key, value in below.items() if key not in strays}
    return lifted
