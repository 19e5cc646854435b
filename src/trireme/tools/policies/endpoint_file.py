"""Servers of models: a name, an address and a key, from `configs/endpoints.py` or `.toml`.

A Python file is read, never run: literals, and `os.getenv("X")`, `os.environ["X"]`. A key in capitals, such as
`"OPENAI_API_KEY"`, names the variable that has it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trireme.base.errors import ConfigError
from trireme.base.network import is_loopback
from trireme.config.files import read_table

PLACES = tuple(Path(name) for name in ("configs/endpoints.toml", "configs/endpoints.py", "endpoints.toml"))
DEFAULT = "default"
"""The entry that takes all models which have none of their own."""

KEY_VARIABLE = "OPENAI_API_KEY"

_KEYS = {"model": "model", "url": "url", "base_url": "url", "key": "key", "api_key": "key"}
_MAX_SHOWN = 12
_GETENV = ("os.getenv", "getenv", "os.environ.get", "environ.get")


@dataclass(frozen=True)
class Endpoint:
    """One entry.

    Example:
        Endpoint("small", "Qwen/Qwen2.5-7B-Instruct", "http://127.0.0.1:8007/v1", "local")
    """

    name: str
    model: str | None  # None: whichever is asked for
    url: str
    key: str | None = field(repr=False)  # secret, which logs and tracebacks must not show
    variable: str | None = None  # variable that should hold the key and is not set


def find_key(flag: str, variable: str | None, *, url: str | None, otherwise: str | None = None) -> str | None:
    """Return the key for a server: from the variable that the user named, else `otherwise`, else from KEY_VARIABLE.

    The last is only for an address that was typed, and if the connection is encrypted (https). Another address gets a
    key only if the user names its variable.

    Args:
        flag: with which a variable is named.

    Raises: ConfigError if the named variable is not set.
    """
    if not variable:
        is_encrypted = url is not None and urlsplit(url).scheme == "https"
        return otherwise or (os.environ.get(KEY_VARIABLE) if is_encrypted else None)
    if key := os.environ.get(variable):
        return key
    raise ConfigError(
        f"{flag} {variable}: this variable is not set - expected the server's key in it. Type `export {variable}=…`, "
        f"or leave the flag out for {KEY_VARIABLE}."
    )


def is_local(url: str) -> bool:
    """Return whether a server is on this machine: no proxy leads there, and it may get our own token."""
    host = urlsplit(url).hostname or ""
    return is_loopback(host) or host == "0.0.0.0"


def find_endpoint(model: str, *, base_url: str | None = None, path: Path | None = None) -> Endpoint:
    """Return the entry of that name, the one that has that model, or `default`.

    Args:
        model: as typed, the name of an entry or of a model.
        base_url: takes precedence over the file's address; an entry's key is for its own address only.
        path: of the file; else the first of `PLACES` that exists.

    Raises: ConfigError if there is no such entry, or its key is in a variable that is not set.
    """
    file = path or next((place for place in PLACES if place.is_file()), None)
    endpoints = read_endpoints(file) if file else {}
    # a name of an entry, a model of an entry, or the entry for all others
    by_model = (endpoint for endpoint in endpoints.values() if endpoint.model == model)
    found = endpoints.get(model) or next(by_model, None) or endpoints.get(DEFAULT)
    # a key goes to its own address only
    if base_url and (found is None or found.url.rstrip("/") != base_url.rstrip("/")):
        found = Endpoint(model, found.model if found else None, base_url, None)

    if found is None and file is None:
        raise ConfigError(
            f"no server is named for {model!r}: there is no {PLACES[1]} here - expected one, or an address. Add "
            "`-b URL` (such as http://127.0.0.1:8000/v1), name a folder with a model (an engine is started with it), "
            "or write the file: see docs/evaluation.md."
        )
    if found is None:
        near = get_close_matches(model, endpoints, n=3, cutoff=0.6)
        has = ", ".join(near or list(endpoints)[:_MAX_SHOWN]) or "nothing"
        raise ConfigError(
            f"{file} has no endpoint {model!r} and none called {DEFAULT!r} - "
            f"{'did you mean' if near else 'it has'} {has}{'?' if near else '.'} Add an entry, or `-b URL`."
        )
    # servers on this machine mostly need no key, others would answer 401
    if found.variable and not is_local(found.url):
        raise ConfigError(
            f"{file}: the key of endpoint {found.name!r} ({found.url}) is in the variable {found.variable}, which is "
            f"not set - expected the key there. Type `export {found.variable}=…` first, or name another endpoint."
        )
    return Endpoint(found.name, found.model or model, found.url, found.key)


def read_endpoints(path: Path) -> dict[str, Endpoint]:
    """Return all entries, in the file's order.

    Raises: ConfigError if the file is missing, or has something else.
    """
    entries = _read_python(path) if path.suffix == ".py" else _read_toml(path)
    return {name: _to_endpoint(path, name, values) for name, values in entries}


def _to_endpoint(path: Path, name: str, values: Any) -> Endpoint:
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: endpoint {name!r} is {values!r} - expected a table with `url`, and `model` and `key` where they "
            'are needed. Write `{"model": …, "url": …, "key": …}`.'
        )
    # both spellings of a key are accepted
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            raise ConfigError(
                f"{path}: endpoint {name!r} has {key!r} - expected model, url (or base_url) and key (or api_key). "
                + (f"Did you mean {near[0]!r}?" if near else "Remove it.")
            )
        given[_KEYS[key]] = value

    url, key = _text(given.get("url")), given.get("key")
    if not url or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(
            f"{path}: endpoint {name!r} has the address {url!r} - expected one such as http://127.0.0.1:8000/v1. "
            "Correct its `url`."
        )
    # a key in capitals is the name of a variable
    if isinstance(key, str) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", key):
        key = _variable(key)
    return Endpoint(name, _text(given.get("model")), url, _text(key), str(key) if isinstance(key, _Unset) else None)


class _Unset(str):
    """The name of a variable that is not set, in place of its value: an error only once its endpoint is asked for."""


def _variable(name: str, default: str = "") -> str:
    return os.environ.get(name) or default or _Unset(name)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value and not isinstance(value, _Unset) else None


def _read_toml(path: Path) -> Iterator[tuple[str, Any]]:
    """Read `["NAME"]` tables, or `[[endpoint]]` tables with an `endpoint_id`."""
    table = read_table(path)
    if set(table) != {"endpoint"} or not isinstance(table["endpoint"], list):
        yield from table.items()
        return
    for each in table["endpoint"]:
        name = each.pop("endpoint_id", None) if isinstance(each, dict) else None
        if not name:
            raise ConfigError(
                f'{path}: an [[endpoint]] has no endpoint_id ({each!r}) - expected one. Add `endpoint_id = "…"`, under '
                "which `-m` finds it."
            )
        yield name, each


def _read_python(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        statements = ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist - expected a file of endpoints. Correct the path.") from None
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Python: {error} - correct it.") from None
    # the first ENDPOINTS at the top level counts
    for statement in statements:
        match statement:
            case (
                ast.Assign(targets=[ast.Name("ENDPOINTS")], value=value)
                | ast.AnnAssign(target=ast.Name("ENDPOINTS"), value=ast.expr() as value)
            ):
                table = _evaluate(path, value)
                if not isinstance(table, dict):
                    raise ConfigError(
                        f"{path}: ENDPOINTS is {table!r} - expected a dict of endpoints by name. Correct it."
                    )
                yield from table.items()
                return
    raise ConfigError(
        f"{path} has no ENDPOINTS - expected `ENDPOINTS = {{name: {{…}}}}` at its top level. Add it: see "
        "docs/evaluation.md."
    )


def _evaluate(path: Path, node: ast.expr) -> Any:
    """Return the value of an expression without running it. Raises: ConfigError."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Dict() if all(node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {_evaluate(path, key): _evaluate(path, value) for key, value in pairs if key}
        case ast.Call(func=function, args=words, keywords=[]) if words and ast.unparse(function) in _GETENV:
            return _variable(*(str(_evaluate(path, word) or "") for word in words[:2]))
        case ast.Subscript(value=value, slice=word) if ast.unparse(value) in ("os.environ", "environ"):
            return _variable(str(_evaluate(path, word)))
    raise ConfigError(
        f"{path}, line {node.lineno}: `{ast.unparse(node)}` is no literal - expected text, or os.getenv(…): the file "
        "is read and not run. Write the value itself, or put it into a variable of the environment."
    )
