"""The reference of all keys, generated from the models: `--help`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from trireme.config.files import PROCESSES, toml_value
from trireme.config.section import Field, Section, fields_of, find

_WIDTH = 110


def manual(root: type[Section], invocation: type[Section], *, section: str | None, program: str) -> str:
    blocks = [_usage(program, section), _block("the command itself", "", fields_of(invocation), "--")]
    room = find(root, (section,)) if section else None
    if room and room.section:
        blocks += _tables(room.section, "")
        blocks.append("The rest is shared by the whole run; `rl --help` lists the other processes' tables.")
        blocks += _tables(root, "", leave_out=(*PROCESSES, *fields_of(room.section)))
    else:
        blocks += _tables(root, "")
    return "\n\n".join(blocks)


def _usage(program: str, section: str | None) -> str:
    own = "" if section else " [--trainer @ file.toml …]" if program == "rl" else ""
    return textwrap.dedent(f"""\
        usage: {program} [@ file.toml …]{own} [--key value …]

        Defaults, then files from left to right, then flags; the last one wins. Tables merge, lists are replaced.
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
