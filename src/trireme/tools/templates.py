"""Render the Jinja templates that lie as files next to the tools that use them (`templates/*.j2`)."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(folder: Path, file: str, /, **values: Any) -> str:
    """Return `folder/file.j2` filled in with `values`; a value that is missing is an error.

    Filters: `sh` quotes a value as one word of a shell; `json` writes it as JSON, which is YAML too.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sh": lambda value: shlex.quote(str(value)), "json": json.dumps}
    return environment.get_template(f"{file}.j2").render(values)
