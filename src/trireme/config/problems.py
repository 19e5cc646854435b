"""Error messages about keys and values: what was given, what was expected, and what to type instead."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.compatibility import keys_for
from trireme.config.files import PROCESSES, toml_key, toml_value
from trireme.config.nested import KeyPath
from trireme.config.rows.by_command import rows_for
from trireme.config.rows.elsewhere import WORDS
from trireme.config.section import Field, Section, as_flag, as_key, fields_of, find, walk
from trireme.config.translation import Line, is_known, names_below, renamed

_LONGEST = 200  # characters of a value in a message
_MOST = 30  # problems that are shown together


@dataclass(frozen=True)
class Source:
    """The origin of a value, for messages."""

    label: str  # "a.toml", "TRIREME_MAX_STEPS", or the flag as typed
    hidden: KeyPath = ()  # the table that the file fills, which is left out of the keys in messages
    typed: str | None = None  # the words after a flag
    line: Line | None = None  # the translated key that gave the value
    ours: KeyPath = ()  # our key that the translation set

    @property
    def is_flag(self) -> bool:
        return self.typed is not None

    def shown(self, path: KeyPath) -> KeyPath:
        """Return the path of a key as the user wrote it in this source."""
        if self.line and path[: len(self.ours)] == self.ours:
            path = (*self.line.theirs, *path[len(self.ours) :])
        inside = self.hidden and path[: len(self.hidden)] == self.hidden
        return path[len(self.hidden) :] if inside else path


def raise_together(found: Iterable[str]) -> None:
    """Raises: ConfigError with all problems, numbered, if there are any."""
    problems = list(dict.fromkeys(found))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = [f"{number}. {problem}" for number, problem in enumerate(problems[:_MOST], 1)]
        lines += [f"… and {len(problems) - _MOST} more."] if len(problems) > _MOST else []
        raise ConfigError(f"{len(problems)} problems in the configuration.\n" + "\n".join(lines))


def explain(root: type[Section], error: dict[str, Any], path: KeyPath, found: Field | None, source: Source) -> str:
    """Put one of pydantic's errors into words.

    Args:
        error: one of `ValidationError.errors()`.
        path: the known key that it is about; for an unknown key, that key.
        found: the field at that path.
    """
    if found is None:
        return unknown_key(root, path, source, value=error["input"])
    if error["type"] == "missing":
        shown = source.shown(path)
        words = f"{source.label}: `{as_key(shown)}` is missing - expected {found.words}. {found.doc}"
        # In a source of prime-rl's it is inside of a table whose name may be misspelt.
        theirs = ".".join(part for part in shown[:-1] if not part.isdigit())
        return f"{words} Of prime-rl's sources, `[{theirs}.env.taskset]` has it." if "source" in shown else words

    shown = source.shown(path)
    value = source.line.value if source.line and path == source.ours else error["input"]
    # A flag is shown as the user typed it; a value in a file as TOML, cut to a readable length.
    if source.is_flag:
        given = f"`{source.label} {textwrap.shorten(source.typed or '', _LONGEST)}`"
    else:
        text = toml_value(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        given = f"{source.label}: `{as_key(shown)} = {text}`"
    finite = "finite " if error["type"] == "finite_number" else ""
    return f"{given} - expected {finite}{found.words}. {_advice(found, shown, value, source.is_flag)}"


def unknown_key(
    root: type[Section], path: KeyPath, source: Source, why: str = "no such key exists", value: Any = None
) -> str:
    """Return the message for an unknown key, with what does the same here; for a table, about each of its keys."""
    whole = tuple(part for part in path if not part.isdigit())
    answers = dict(_answers(root, whole, value))
    prefix = ".".join([*source.hidden, ""])

    def typed(keys: list[KeyPath], between: str) -> str:
        # A slip in a table of theirs is corrected there, under the table's name as it was written.
        written, join = source.shown(path)[:-1], ".".join if source.is_flag else as_key
        own = [key[:-1] == whole[:-1] for key in keys]
        names = [
            join((*written, key[-1])) if is_own else ".".join(key).removeprefix(prefix)
            for key, is_own in zip(keys, own, strict=True)
        ]
        return between.join(f"`{as_flag((name,)) if source.is_flag else name}`" for name in names)

    # One answer about the key itself, or one for each key of an unknown table.
    if answers.keys() == {whole}:
        found = answers[whole]
        advice = found if isinstance(found, str) else f"Did you mean {typed(found, ' or ')}?"
    else:
        said = {where: f if isinstance(f, str) else f"write {typed(f, ' or ')}." for where, f in answers.items()}
        advice = " ".join(f"`{as_key(source.shown(where))}`: {words}" for where, words in said.items())

    if source.is_flag:
        return f"unknown flag `{source.label}` - {why}. {advice}"
    return f"{source.label}: unknown key `{as_key(source.shown(path))}` - {why}. {advice}"


def _answers(root: type[Section], path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, list[KeyPath] | str]]:
    """Yield an unknown key with what does the same here; of a table also those of its keys that differ."""
    tables = [table for table in (value if isinstance(value, list) else [value]) if isinstance(table, dict) and table]
    found = counterpart(root, path, value)
    if found or not tables:
        yield path, found or NOTHING
    ours = find(root, found[0]) if isinstance(found, list) and found else None
    if ours is not None and ours.section is None:
        return  # a table that takes any key, or no table

    # Of a table that is known under another name, only keys that do not move along need an answer.
    for table in tables:
        for name, inside in table.items():
            below = (*path, str(name))
            moves_along = isinstance(found, list) and found and find(root, (*found[0], str(name)))
            if not moves_along and not isinstance(found, str):
                yield from _answers(root, below, inside)


def _advice(field: Field, path: KeyPath, value: Any, is_flag: bool) -> str:
    if field.kind == "choice":
        near = get_close_matches(str(value), field.words.split(" | "), n=1, cutoff=0.7)
        return f"Did you mean `{near[0]}`?" if near else field.doc
    if field.section:
        # Show a table with one key in it, as an example that can be copied.
        key = next(key for key in fields_of(field.section).values() if key.section is None)  # often its name
        if is_flag and field.kind == "section":
            return f"Write its keys one by one: `{as_flag((*path, key.name))} …`."
        # An item of an array is written under the header of its array, without a number.
        header = ".".join(toml_key(part) for part in path if not part.isdigit())
        is_one = field.kind == "section"
        header, what = (f"[{header}]", "a table") if is_one else (f"[[{header}]]", "an array of tables")
        example = value if key.kind == "text" and isinstance(value, str) else "…" if key.required else key.default
        table = textwrap.indent(f"{header}\n{key.name} = {toml_value(example)}  # {key.doc}", "    ")
        return f"Write {what}:\n{table}"
    if field.default is None or field.required or is_flag:
        return field.doc
    return f"For example `{path[-1]} = {toml_value(field.default)}`. {field.doc}"


# what does the same here

NOTHING = "Nothing here is set by that name: leave it out only if the run may go without it. `--help` lists all keys."
OF_VLLM = "An argument of vLLM goes into `[inference.args]`, by vLLM's own name. Nothing else is set by that name."
NEAR = 0.75  # share of letters that a name has in common with a key of the same table, from which on it is a slip


def counterpart(root: type[Section], path: KeyPath, value: Any = None) -> list[KeyPath] | str:
    """Return our key that does what an unknown one does, as a list of one, or a sentence about it; [] for neither.

    A wrong key is worse than none: a user who follows the advice trains something else. So a key of another table is
    suggested only if a table of `config/compatibility.py` says so, or if nothing else has its name.
    """
    # What a row says, then keys of the same name, what is known of the name itself, and slips of the keyboard.
    if (moved := renamed(path, rows_for(root), root)) and moved != path:
        return [moved]
    fits = [key for key in _named_alike(root, path) if not (isinstance(value, dict) and _is_leaf(root, key))]
    if found := fits or WORDS.get(path[-1], "") or _slips(root, path):
        return found
    # A slip in a table that is renamed.
    if (
        len(path) > 1
        and (table := renamed(path[:-1], rows_for(root), root))
        and (found := _slips(root, (*table, path[-1])))
    ):
        return found
    return OF_VLLM if path[0] == "inference" and find(root, path[:1]) else []


def _is_leaf(root: type[Section], key: KeyPath) -> bool:
    """Return whether a key holds no table."""
    field = find(root, key)
    return field is not None and field.section is None and field.kind != "table"


def _named_alike(root: type[Section], path: KeyPath) -> list[KeyPath]:
    """Return the key that goes by a name elsewhere, or by the same name in a table above or below."""
    known = [tuple(key.split(".")) for key, _ in walk(root)]
    table, name = path[:-1], path[-1]

    # The names of other systems. Under `eval`, a key for training means the evaluation's key of that name.
    ours = [tuple(key.split(".")) for key in keys_for(name)]
    ours = [each for key in ours for each in (key, key[1:] if key[0] == "trainer" else key)]
    if "eval" in path:
        ours = [("orchestrator", "eval", *key[1:]) for key in ours if key[0] == "orchestrator"]
    of_process = [key for key in ours if not table or len(key) == 1 or key[0] == table[0] or table[0] not in PROCESSES]
    if elsewhere := [key for key in of_process if key in known][:1]:
        return elsewhere

    # Our own names in another table: `tokenizer.name` is `trainer.tokenizer.name`, `orchestrator.seq_len` is `seq_len`.
    known = [key for key in known if all(table in path or table not in key[:-1] for table in ("eval", "agent"))]
    # A source's own tables are meant only by keys under `env`: elsewhere the run's are.
    if "env" not in path:
        of_run = set(known)
        known = [key for key in known if key[1:2] != ("env",) or not {(p, *key[2:]) for p in PROCESSES} & of_run]
    whole = [key for key in known if key[-len(path) :] == path]
    tables = [key for key in whole if (found := find(root, key)) and found.section and len(key) == len(path) + 1]
    if len(whole) == 1 or len(tables) == 1:
        return tables or whole
    if whole:
        return []
    same = [key for key in known if key[-1] == name]
    around = [key for key in same if key[:-1] == table[: len(key) - 1] or key[: len(table)] == table]
    return around if len(same) == len(around) == 1 else []


def _slips(root: type[Section], path: KeyPath) -> list[KeyPath]:
    """Return the key of the same table, ours or one that is translated, whose name differs by a slip of the keyboard in
    one part of the path; on a process's own command, where the run's keys are typed together with its own, also one of
    the run."""
    rows = rows_for(root)
    if is_known(path, rows, root):
        return []
    known = [find(root, path[:depth]) is not None or names_below(path[:depth], rows) for depth in range(len(path) + 1)]
    at = next((depth - 1 for depth in range(1, len(path) + 1) if not known[depth]), len(path) - 1)
    above = find(root, path[:at]) if at else None
    inside = above.section if above else root if not at else None
    names = [*(fields_of(inside) if inside else ()), *names_below(path[:at], rows)]
    for name in get_close_matches(path[at], names, n=1, cutoff=NEAR):
        corrected = (*path[:at], name, *path[at + 1 :])
        return [corrected] if is_known(corrected, rows, root) else []
    of_run = [name for name in fields_of(root) if path[0] in PROCESSES and _is_leaf(root, (name,))]
    return [(name,) for name in get_close_matches(path[1], of_run, n=1, cutoff=NEAR)] if len(path) == 2 else []
