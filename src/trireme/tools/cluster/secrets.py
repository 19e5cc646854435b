"""What must not be seen: the variables of `env_file`, and the token that the processes of a run share.

Values go to a file that only its owner reads, or to a Secret. They are in no script, no argument and no message.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.token import TOKEN

HIDDEN = "(hidden)"


def new_token() -> str:
    return secrets.token_urlsafe(32)


def read_env_files(files: Sequence[Path]) -> dict[str, str]:
    """Their variables; what a later file says counts.

    Raises: ConfigError where one is missing or a line is no `NAME=value`. Values are left out of the message.
    """
    found: dict[str, str] = {}
    for file in files:
        found |= _read(file)
    return found


def _read(file: Path) -> dict[str, str]:
    from dotenv.parser import parse_stream

    try:
        with open(file) as stream:
            bindings = list(parse_stream(stream))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'env_file = "{file}" cannot be read ({getattr(error, "strerror", None) or "no text"}; looked in '
            f"{Path.cwd()}) - expected a file with lines `NAME=value`. Check the path."
        ) from None
    variables: dict[str, str] = {}
    for binding in bindings:
        if binding.key is None and not binding.error:
            continue  # a comment, or nothing
        if binding.error or binding.value is None or not _is_name(binding.key):
            raise ConfigError(
                f"env_file {file}, line {binding.original.line}: not `NAME=value` - expected a name of letters, digits "
                "and `_`, and a value, in quotes where it holds spaces. Correct the line."
            )
        variables[str(binding.key)] = binding.value
    return variables


def _is_name(key: str | None) -> bool:
    return key is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key) is not None


def write_secrets(file: Path, variables: Mapping[str, str]) -> None:
    """For a shell to read; nobody else may from the first byte on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        for name, value in variables.items():
            out.write(f"export {name}={shlex.quote(value)}\n")


def read_token(file: Path) -> str | None:
    """The token in what `write_secrets` wrote; None where it is gone."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    prefix = f"export {TOKEN}="
    return next((shlex.split(line.removeprefix(prefix))[0] for line in lines if line.startswith(prefix)), None)
