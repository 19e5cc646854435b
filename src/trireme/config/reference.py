"""The reference of all keys, generated from the models: `--help`, `docs/configuration.md` and a JSON schema.

`scripts/configuration_reference.py` writes the latter two.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from trireme.config.files import PROCESSES, toml_value
from trireme.config.section import NONE, Field, Section, fields_of, find

_WIDTH = 110


def help_text(root: type[Section], invocation: type[Section], *, section: str | None, program: str) -> str:
    """Return what a command prints for `--help`.

    Args:
        invocation: the flags of the command itself.
        section: for a process's own command, the table whose keys come first and without its name.
    """
    blocks = [_usage(program, section), _block("the command itself", "", fields_of(invocation), "--")]
    own = find(root, (section,)) if section else None
    if own and own.section:
        blocks += _tables(own.section, "")
        blocks.append("The rest is shared by the whole run; `rl --help` lists the other processes' tables.")
        blocks += _tables(root, "", leave_out=(*PROCESSES, *fields_of(own.section)))
    else:
        blocks += _tables(root, "")
    return "\n\n".join(blocks)


def _usage(program: str, section: str | None) -> str:
    own = "" if section else " [--trainer @ file.toml …]" if program == "rl" else ""
    return textwrap.dedent(f"""\
        usage: {program} [@ file.toml …]{own} [--key value …]

        Defaults, then environment variables (TRIREME_MAX_STEPS, TRIREME_TRAINER__OPTIM__LR), then files from left to
        right, then flags; the last one wins. Tables merge, lists are replaced.
        In a file, `--a.b-c value` is `b_c = value` under `[a]`. `--no-x` switches off.
        Lists: `--x 1 2`, `--x 1,2` or `--x "[1, 2]"`. Tables: `--x '{{"a": 1}}'` or `--x.a 1`.""")


def _tables(
    section: type[Section], above: str, leave_out: tuple[str, ...] = (), optional: bool = False
) -> Iterator[str]:
    fields = {name: field for name, field in fields_of(section).items() if name not in leave_out}
    plain = {name: field for name, field in fields.items() if field.section is None}
    doc = (section.__doc__ or "").splitlines()[0] + (" Off unless given." if optional else "")
    many = above.endswith(".0.")
    title = above.removesuffix(".").removesuffix(".0")
    if plain:
        yield _block(f"[[{title}]]" if many else f"[{title}]" if title else "", doc, plain, f"--{above}")
    for name, field in fields.items():
        if field.section:
            below = f"{above}{name}.0." if field.kind == "sections" else f"{above}{name}."
            yield from _tables(field.section, below, optional=field.optional)


def _block(title: str, doc: str, fields: dict[str, Field], prefix: str) -> str:
    about = doc.partition(": ")[2] if title and ": " in doc else "" if title else doc
    lines = [f"{title}  {about}".strip()]
    for field in fields.values():
        lines.append(f"  {prefix.replace('_', '-')}{field.name.replace('_', '-')}  {_type_and_default(field)}")
        lines.append(textwrap.indent(textwrap.fill(" ".join(field.doc.split()), _WIDTH), " " * 8))
    return "\n".join(lines)


def _type_and_default(field: Field) -> str:
    default = "required" if field.required else f"default: {toml_value(_to_plain(field.default))}"
    return f"<{field.words}>  ({default})"


def _to_plain(value: object) -> object:
    return value if isinstance(value, int | float | str | tuple | dict | None) else str(value)


# the page and the schema

_UNITS = {"_s": "s", "_mib": "MiB", "_gib": "GiB", "_tokens": "tokens", "_steps": "steps", "_chars": "characters"}
_UNITS |= {"seq_len": "tokens", "max_model_len": "tokens", "max_length": "tokens", "_gpus": "GPUs", "_step": "step"}
_UNITS |= {"interval": "steps", "every": "steps"}


def keys_page(root: type[Section]) -> str:
    """Return a Markdown section for each table of a configuration, with a row for each key."""
    return "\n".join(_markdown(root, root.__doc__ or "", "", ""))


def _markdown(section: type[Section], about: str, path: str, heading: str) -> Iterator[str]:
    about = about.partition("\n")[0]
    about = about.partition(": ")[2] if heading else about
    yield from [f"### `{heading}`\n"] if heading else []
    yield from [f"{about[0].upper()}{about[1:]}\n"] if about else []
    if plain := [field for field in fields_of(section).values() if field.section is None]:
        yield "| key | type | unit | default | meaning |\n|---|---|---|---|---|"
        yield from map(_row, plain)
        yield ""
    for name, field in fields_of(section).items():
        if field.section:
            below = f"{path}.{name}".removeprefix(".")
            heading = f"[[{below}]]" if field.kind == "sections" else f"[{below}]"
            about = (field.section.__doc__ or "").partition("\n")[0] + (" Off unless given." if field.optional else "")
            yield from _markdown(field.section, about, below, heading)


def _row(field: Field) -> str:
    unit = next((unit for ending, unit in _UNITS.items() if field.name.endswith(ending)), "")
    shown = "not set" if field.default is None else f"`{toml_value(_to_plain(field.default))}`"
    default = "required" if field.required else shown
    cells = [f"`{field.name}`", field.words, unit, default, " ".join(field.doc.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def json_schema(root: type[Section]) -> str:
    """Return the JSON schema of a file, by which editors complete and check it, with a line for each table."""
    schema = root.model_json_schema()
    tables = schema.pop("$defs")
    lines = [f"{json.dumps(name)}: {json.dumps(table, ensure_ascii=False)}" for name, table in tables.items()]
    whole = json.dumps(schema, ensure_ascii=False)[:-1] + ', "$defs": {\n' + ",\n".join(lines) + "\n}}\n"
    return whole.replace('{"type": "null"}', f'{{"const": "{NONE}"}}')  # TOML has no null
