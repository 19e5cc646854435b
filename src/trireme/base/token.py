"""The secret that the machines of a run share, and what is derived of it.

It is in the environment of each process and nowhere else: in no argument, no configuration on disk, no log.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from trireme.base.errors import ConfigError

TOKEN = "TRIREME_TOKEN"
SHORTEST = 16  # characters; it is hard to guess only where it was made at random


def adopt_token(file: Path | None) -> None:
    """Takes what `file` holds, unless the environment has a token already.

    Raises: ConfigError where the file cannot be read, or holds none that would do.
    """
    if problem := token_problem(file):
        raise ConfigError(problem)
    if not os.environ.get(TOKEN) and file is not None:
        os.environ[TOKEN] = file.read_text().strip()


def token_problem(file: Path | None) -> str | None:
    """Why the token that was given will not do; None where it does, or where there is none."""
    given = os.environ.get(TOKEN, "")
    where = TOKEN
    if not given and file is not None:
        where = f"hosts.token_file = {file}"
        try:
            given = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            return f"{where} cannot be read ({error}) - expected a file with the shared token. {HOW}"
        if not given:
            return f"{where} is empty - expected the shared token. {HOW}"
    if not given:
        return None
    if len(given) < SHORTEST or not given.isascii() or not given.isprintable() or " " in given:
        return (
            f"the token in {where} has {len(given)} characters, or some that a header cannot carry - expected "
            f"{SHORTEST} or more, letters and digits, made at random. {HOW}"
        )
    return None


HOW = f"Make one with `openssl rand -hex 32`, and give every machine the same: `export {TOKEN}=…`."


def token() -> str | None:
    """Of this process. None where everything is on one machine and nobody gave one."""
    return os.environ.get(TOKEN) or None


def bearer(secret: str | None = None) -> dict[str, str]:
    """The header that opens a route of ours; none without a token."""
    secret = secret or token()
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def derive(secret: str, purpose: str) -> bytes:
    """32 bytes that tell nothing of the token, nor of what was derived for another purpose."""
    return hmac.digest(secret.encode(), f"trireme {purpose}".encode(), "sha256")


def sealed(name: str) -> str:
    """A name that only those who know the token can make; the name itself without one."""
    secret = token()
    return f"{name}/{derive(secret, f'name {name}').hex()[:32]}" if secret else name


def is_same(ours: str, theirs: str) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(ours.encode(), theirs.encode())
