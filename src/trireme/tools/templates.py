"""Render the Jinja templates that lie as files next to the tools that use them (`templates/*.j2`)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(folder: Path, file: str, /, **values: Any) -> str:
    """Return `folder/file.j2` with `values` filled in, escaped if `file` is HTML. A value that is missing is an error.

    Filters: `sh` quotes a value as one word of a shell, `yaml` as one line of YAML, and `yaml_lines` as a block of it.
    """
    # a name that a template lacks is an error, and not an empty text in a script
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=file.endswith(".html"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sh": lambda value: shlex.quote(str(value)), "yaml": _to_yaml}
    environment.filters["yaml_lines"] = lambda value: _to_yaml(value, style="|")
    return environment.get_template(f"{file}.j2").render(values)


def _to_yaml(value: object, style: str = '"') -> str:
    """Return a text as a scalar of YAML. Texts that a block cannot hold are quoted instead."""
    import yaml

    scalar = yaml.dump(str(value), default_style=style, width=float("inf"), allow_unicode=style == "|")
    return scalar.removesuffix("...\n").removesuffix("\n")  # without the end of a document
