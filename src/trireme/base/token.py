"""The secret that the processes of a run share, and the keys that are derived from it.

It travels in the environment of each process, never in an argument, a configuration or a log. `rl` makes one for each
run on one machine. A run's folder holds a key for its readers, in a file that only its owner may read.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from trireme.base.errors import ConfigError

TOKEN = "TRIREME_TOKEN"
SHORTEST = 16  # characters; it is hard to guess only if it was made at random
KEY_FILE = ".token"  # in the folder of a run


def adopt_token(file: Path | None) -> None:
    """Read the token from `file`, unless the environment has one already.

    Raises: ConfigError if the file cannot be read, or its token is unsuitable.
    """
    if problem := token_problem(file):
        raise ConfigError(problem)
    if not os.environ.get(TOKEN) and file is not None:
        os.environ[TOKEN] = file.read_text().strip()


def make_token() -> bool:
    """Give this process and its children a random token. Return False if there is one already."""
    if token():
        return False
    os.environ[TOKEN] = secrets.token_hex(32)
    return True


def write_key(folder: Path, key: str | None) -> None:
    """Write a key into a run's folder for `trireme status`, the dashboard and curl; remove an old one if it is None.

    Args:
        key: the token if it was made for this run alone; else `status_key`, which opens only the status.
    """
    file = folder / KEY_FILE
    if key is None:
        file.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)

    # The file appears whole, as a client may read it at any time, and with its mode, as other users must never.
    partial = file.with_name(f"{KEY_FILE}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as opened:
            opened.write(key)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def read_key(folder: Path) -> str | None:
    """Return the key in a run's folder; None if there is none that this user may read.

    Only this key, never a token of the environment, is sent to an address that the folder names: a folder from another
    person could name any address. A link is not followed, as it could lead to any secret of the user.
    """
    with suppress(OSError, UnicodeDecodeError):
        # A link is refused, and a named pipe of that name does not block.
        with open(
            folder / KEY_FILE, opener=lambda *how: os.open(how[0], how[1] | os.O_NOFOLLOW | os.O_NONBLOCK)
        ) as file:
            key = file.read(200).strip()
        return key if key.isascii() and key.isprintable() and key else None
    return None


def status_key() -> str | None:
    """Return the key that opens only the status and the metrics of an orchestrator; None without a token."""
    secret = token()
    return derive(secret, "status").hex() if secret else None


def token_problem(file: Path | None) -> str | None:
    """Return why the given token is unsuitable; None if it is suitable or absent."""
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
    """Return the token of this process; None if none was given, which a run on one machine allows."""
    return os.environ.get(TOKEN) or None


def bearer(secret: str | None) -> dict[str, str]:
    """Return the authorization header; empty without a secret."""
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def derive(secret: str, purpose: str) -> bytes:
    """Derive a 32-byte key for a purpose (HMAC-SHA256), which reveals neither the token nor other keys."""
    return hmac.digest(secret.encode(), f"trireme {purpose}".encode(), "sha256")


def sealed(name: str) -> str:
    """Return a name that only processes with the token can compute; the name itself without a token."""
    secret = token()
    return f"{name}/{derive(secret, f'name {name}').hex()[:32]}" if secret else name


def is_same(ours: str, theirs: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(ours.encode(), theirs.encode())
