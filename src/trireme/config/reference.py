"""The reference of all keys, generated from the models: `--help`, `docs/configuration/` and a JSON schema.

`scripts/configuration_reference.py` writes the latter two.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator

from trireme.config.files import PROCESSES, toml_value
from trireme.config.section import NONE, Field, Section, fields_of, find

_WIDTH = 110


def help_text(
    root: type[Section] | None,
    invocation: type[Section],
    *,
    section: str | None = None,
    program: str,
    keys: list[Field] | None = None,
) -> str:
    """Return what a command prints for `--help`.

    Args:
        invocation: the flags of the command itself.
        keys: those of another format, in place of a configuration of ours.
        section: for a process's own command, the table whose keys come first and without its name.
    """
    files = " [--trainer @ file.toml …]" if program == "rl" else ""
    usage = textwrap.dedent(f"""\
        usage: {program} [@ file.toml …]{files} [--key value …]

        Defaults, then environment variables (TRIREME_MAX_STEPS, TRIREME_TRAINER__OPTIM__LR), then files from left to
        right, then flags; the last one wins. Tables merge, lists are replaced.
        In a file, `--a.b-c value` is `b_c = value` under `[a]`. `--no-x` switches off.
        Lists: `--x 1 2`, `--x 1,2` or `--x "[1, 2]"`. Tables: `--x '{{"a": 1}}'` or `--x.a 1`.""")
    blocks = [usage, _block("the command itself", "", "", list(fields_of(invocation).values()))]

    if root is None:
        return "\n\n".join([*blocks, _block("the file", "", "", keys or [])])

    # A process's own keys come first, without their table's name; the run's follow, without other processes' tables.
    own = find(root, (section,)) if section else None
    leave_out: tuple[str, ...] = ()
    if own and own.section:
        blocks += [_block(*table) for table in _tables(own.section) if table[-1]]
        blocks.append("The rest is shared by the whole run; `rl --help` lists the other processes' tables.")
        leave_out = (*PROCESSES, *fields_of(own.section))
    blocks += [_block(*table) for table in _tables(root, leave_out=leave_out) if table[-1]]
    return "\n\n".join(blocks)


Table = tuple[str, str, str, list[Field]]
"""A table's header in a file, what stands before its keys on the command line, its meaning, and its plain keys."""


def _tables(
    section: type[Section], above: str = "", leave_out: tuple[str, ...] = (), optional: bool = False
) -> Iterator[Table]:
    fields = [field for name, field in fields_of(section).items() if name not in leave_out]
    title = above.replace(".0.", ".").removesuffix(".")
    header = f"[[{title}]]" if above.endswith(".0.") else f"[{title}]" if title else ""
    doc = (section.__doc__ or "").partition("\n")[0] + (" Off unless given." if optional else "")
    yield header, above, doc.partition(": ")[2] if title else doc, [each for each in fields if each.section is None]
    for field in fields:
        if field.section:
            below = f"{above}{field.name}{'.0' if field.kind == 'sections' else ''}."
            yield from _tables(field.section, below, optional=field.optional)


def _block(title: str, above: str, about: str, fields: list[Field]) -> str:
    lines = [f"{title}  {about}".strip()]
    for field in fields:
        default = "required" if field.required else f"default: {toml_value(field.default)}"
        lines.append(f"  --{f'{above}{field.name}'.replace('_', '-')}  <{field.words}>  ({default})")
        lines.append(textwrap.indent(textwrap.fill(" ".join(field.doc.split()), _WIDTH), " " * 8))
    return "\n".join(lines)


# the page and the schema

_UNITS = {"_s": "s", "_mib": "MiB", "_gib": "GiB", "_tokens": "tokens", "_steps": "steps", "_chars": "characters"}
_UNITS |= {"seq_len": "tokens", "max_model_len": "tokens", "max_length": "tokens", "_gpus": "GPUs", "_step": "step"}
_UNITS |= {"interval": "steps", "every": "steps"}


def key_tables(root: type[Section]) -> Iterator[tuple[str, str, str]]:
    """Yield each table of a configuration: its header in a file, its meaning, and a Markdown table of its keys."""
    for header, _, about, fields in _tables(root):
        heading = "| key | type | default | meaning |\n|---|---|---|---|"
        rows = "\n".join([heading, *map(_row, fields)]) if fields else ""
        yield header, f"{about[0].upper()}{about[1:]}" if about else "", rows


def _row(field: Field) -> str:
    unit = next((unit for ending, unit in _UNITS.items() if field.name.endswith(ending)), "")
    words = field.words.replace(" | ", ", ").replace("true or false", "boolean")
    words = re.sub(r"(integer|number) > 0", r"positive \1", words)
    kind = f"{words}, {unit}" if unit and words != "boolean" else words
    shown = "" if field.default is None else f"`{toml_value(field.default)}`"
    default = "required" if field.required else shown
    cells = [f"`{field.name}`", kind, default, " ".join(field.doc.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def json_schema(root: type[Section]) -> str:
    """Return the JSON schema of a file, by which editors complete and check it, with a line for each table."""
    schema = root.model_json_schema()
    tables = schema.pop("$defs")
    # One line for each table, so that a changed key is a small change of the generated file.
    lines = [f"{json.dumps(name)}: {json.dumps(table, ensure_ascii=False)}" for name, table in tables.items()]
    whole = json.dumps(schema, ensure_ascii=False)[:-1] + ', "$defs": {\n' + ",\n".join(lines) + "\n}}\n"
    return whole.replace('{"type": "null"}', f'{{"const": "{NONE}"}}')  # TOML has no null
