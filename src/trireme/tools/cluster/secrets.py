"""Secrets of a submission: the variables of `env_file`, and the token that the processes of a run share.

Their values go to a file that only its owner can read, or to a Secret. They are in no script, argument or message.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.token import TOKEN

SECRETS = "secrets.sh"


def read_env_files(files: Sequence[Path]) -> dict[str, str]:
    """Return the variables of all files. Later files win.

    Raises: ConfigError for a file that is missing, or a line that is not `NAME=value`. Messages contain no values.
    """
    from dotenv.parser import parse_stream

    variables: dict[str, str] = {}
    for file in files:
        try:
            with open(file) as stream:
                bindings = list(parse_stream(stream))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'env_file = "{file}" cannot be read ({getattr(error, "strerror", None) or "no text"}; looked in '
                f"{Path.cwd()}) - expected a file with lines `NAME=value`. Check the path."
            ) from None
        for binding in bindings:
            if binding.key is None and not binding.error:
                continue  # a comment, or an empty line
            is_name = binding.key is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", binding.key)
            if binding.error or binding.value is None or not is_name:
                raise ConfigError(
                    f"env_file {file}, line {binding.original.line}: not `NAME=value` - expected a name of letters, "
                    "digits and `_`, and a value, in quotes where it holds spaces. Correct the line."
                )
            variables[str(binding.key)] = binding.value
    return variables


def write_secrets(file: Path, variables: Mapping[str, str]) -> None:
    """Write the variables for a shell to read. The file is private from its first byte on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        for name, value in variables.items():
            out.write(f"export {name}={shlex.quote(value)}\n")


def read_token(file: Path) -> str | None:
    """Return the token from what `write_secrets` wrote, or None where the file is gone."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    prefix = f"export {TOKEN}="
    return next((shlex.split(line.removeprefix(prefix))[0] for line in lines if line.startswith(prefix)), None)
