"""Where models are asked: a name, an address and a key, from `configs/endpoints.py` or `.toml`.

A Python file is read, never run: literals, names bound to literals above, f-strings of those, and `os.getenv("X")`,
`os.environ["X"]`. A key in capitals, such as `"OPENAI_API_KEY"`, names the variable that has it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trireme.base.errors import ConfigError
from trireme.config.files import read_table

PLACES = tuple(Path(name) for name in ("configs/endpoints.toml", "configs/endpoints.py", "endpoints.toml"))
DEFAULT = "default"
"""The entry that takes all models which have none of their own."""

_KEYS = {"model": "model", "url": "url", "base_url": "url", "key": "key", "api_key": "key"}
_HERE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_SHOWN = 12


@dataclass(frozen=True)
class Endpoint:
    """One entry.

    Example:
        Endpoint("small", "Qwen/Qwen2.5-7B-Instruct", "http://127.0.0.1:8007/v1", "local")
    """

    name: str
    model: str | None  # None: whichever is asked for
    url: str
    key: str | None
    variable: str | None = None  # of the environment, where the key was to come from one that is not set

    def __repr__(self) -> str:
        """Without the key, which logs and tracebacks must not have."""
        return f"Endpoint({self.name!r}, {self.model!r}, {self.url!r}, key={'...' if self.key else None})"


KEY_VARIABLE = "OPENAI_API_KEY"


def key_for_address(url: str | None) -> str | None:
    """Return the key of KEY_VARIABLE for an address that was typed, if the connection is encrypted (https).

    Another address gets a key only where the user names its variable.
    """
    return os.environ.get(KEY_VARIABLE) if url is not None and urlsplit(url).scheme == "https" else None


def find_endpoint(model: str, *, base_url: str | None = None, path: Path | None = None) -> Endpoint:
    """Where `model` is asked: the entry of that name, the one that has that model, or `default`.

    Args:
        model: as typed, the name of an entry or of a model.
        base_url: goes before the file's address; an entry's key is for its own address only.
        path: of the file; else the first of `PLACES` that is there.

    Raises: ConfigError where none is meant, or its key is in a variable that is not set.
    """
    file = path or next((place for place in PLACES if place.is_file()), None)
    endpoints = read_endpoints(file) if file else {}
    found = _meant(model, endpoints)
    if base_url:
        same = found is not None and found.url.rstrip("/") == base_url.rstrip("/")
        found = found if same else Endpoint(model, found.model if found else None, base_url, None)
    if found is None:
        raise ConfigError(_no_entry(model, endpoints, file))
    _check_key(found, file)
    return Endpoint(found.name, found.model or model, found.url, found.key)


def read_endpoints(path: Path) -> dict[str, Endpoint]:
    """All entries, in the file's order.

    Raises: ConfigError where it is missing, or says something else.
    """
    entries = _of_python(path) if path.suffix == ".py" else _of_toml(path)
    return {name: _entry(path, name, values) for name, values in entries}


def _meant(model: str, endpoints: dict[str, Endpoint]) -> Endpoint | None:
    by_model = (endpoint for endpoint in endpoints.values() if endpoint.model == model)
    return endpoints.get(model) or next(by_model, None) or endpoints.get(DEFAULT)


def _no_entry(model: str, endpoints: dict[str, Endpoint], file: Path | None) -> str:
    if file is None:
        return (
            f"nothing says where {model!r} is asked: there is no {PLACES[1]} here - expected one, or an address. "
            "Add `-b URL` (such as http://127.0.0.1:8000/v1), name a folder with a model (an engine is started with "
            "it), or write the file: see docs/evaluation.md."
        )
    near = get_close_matches(model, endpoints, n=3, cutoff=0.6)
    has = ", ".join(near or list(endpoints)[:_SHOWN]) or "nothing"
    return (
        f"{file} has no endpoint {model!r} and none called {DEFAULT!r} - "
        f"{'did you mean' if near else 'it has'} {has}{'?' if near else '.'} Add an entry, or `-b URL`."
    )


def _check_key(found: Endpoint, file: Path | None) -> None:
    if found.variable and urlsplit(found.url).hostname not in _HERE:
        raise ConfigError(
            f"{file}: the key of endpoint {found.name!r} ({found.url}) is in the variable {found.variable}, which is "
            f"not set - expected the key there. Type `export {found.variable}=…` first, or name another endpoint."
        )


def _entry(path: Path, name: str, values: Any) -> Endpoint:
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: endpoint {name!r} is {values!r} - expected a table with `url`, and `model` and `key` where they "
            'are needed. Write `{"model": …, "url": …, "key": …}`.'
        )
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            raise ConfigError(
                f"{path}: endpoint {name!r} has {key!r} - expected model, url (or base_url) and key (or api_key). "
                + (f"Did you mean {near[0]!r}?" if near else "Remove it.")
            )
        given[_KEYS[key]] = value
    return _of_values(path, name, given)


def _of_values(path: Path, name: str, given: dict[str, Any]) -> Endpoint:
    key, variable = _key(given.get("key"))
    url, model = _text(given.get("url")), _text(given.get("model"))
    if not url or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(
            f"{path}: endpoint {name!r} has the address {url!r} - expected one such as http://127.0.0.1:8000/v1. "
            "Correct its `url`."
        )
    return Endpoint(name, model, url, key, variable)


@dataclass(frozen=True)
class _FromVariable:
    """What `os.getenv("X")` stands for. Unset variables are no error until their endpoint is asked for."""

    name: str
    default: str | None = None

    @property
    def value(self) -> str | None:
        return os.environ.get(self.name) or self.default


def _text(value: Any) -> str | None:
    value = value.value if isinstance(value, _FromVariable) else value
    return value if isinstance(value, str) else None


def _key(value: Any) -> tuple[str | None, str | None]:
    """The key, or the variable that should have it."""
    if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", value):
        value = _FromVariable(value)
    if isinstance(value, _FromVariable):
        return (value.value, None) if value.value else (None, value.name)
    return (value or None, None) if isinstance(value, str) else (None, None)


# files in TOML


def _of_toml(path: Path) -> Iterator[tuple[str, Any]]:
    """`["NAME"]` tables, all of them inside `[endpoints]` perhaps; or `[[endpoint]]` with a `name`."""
    table = read_table(path)
    for around in ("ENDPOINTS", "endpoints", "endpoint"):
        table = table[around] if set(table) == {around} else table
    if isinstance(table, dict):
        yield from table.items()
        return
    for each in table:
        named = each.get("name") or each.get("endpoint_id") if isinstance(each, dict) else None
        if not named:
            raise ConfigError(
                f'{path}: an [[endpoint]] has no name ({each!r}) - expected one. Add `name = "…"`, under which '
                "`-m` finds it."
            )
        yield named, {key: value for key, value in each.items() if key not in ("name", "endpoint_id")}


# files in Python


def _of_python(path: Path) -> Iterator[tuple[str, Any]]:
    known: dict[str, Any] = {}
    for statement in _statements(path):
        for target, node in _assigned(statement):
            if target == "ENDPOINTS":
                yield from _table(path, _value(path, node, known))
                return
            with suppress(ConfigError):  # whatever else the file computes
                known[target] = _value(path, node, known)
    raise ConfigError(
        f"{path} has no ENDPOINTS - expected `ENDPOINTS = {{name: {{…}}}}` at its top level. Add it: see "
        "docs/evaluation.md."
    )


def _statements(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist - expected a file of endpoints. Correct the path.") from None
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Python: {error} - correct it.") from None


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        yield from ((target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name))
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        yield statement.target.id, statement.value


def _table(path: Path, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: ENDPOINTS is {value!r} - expected a dict of endpoints by name. Correct it.")
    yield from value.items()


def _value(path: Path, node: ast.expr, known: dict[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Dict() if all(node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {_value(path, key, known): _value(path, value, known) for key, value in pairs if key}
        case ast.Name() if node.id in known:
            return known[node.id]
        case ast.JoinedStr():
            return "".join(_text(_value(path, part, known)) or "" for part in node.values)
        case ast.FormattedValue(format_spec=None):
            return _value(path, node.value, known)
    if (variable := _variable(path, node, known)) is not None:
        return variable
    raise ConfigError(
        f"{path}, line {node.lineno}: `{ast.unparse(node)}` is no literal - expected text, or os.getenv(…): the file "
        "is read and not run. Write the value itself, or put it into a variable of the environment."
    )


def _variable(path: Path, node: ast.expr, known: dict[str, Any]) -> _FromVariable | None:
    """`os.getenv("X")`, `os.getenv("X", "else")`, `os.environ.get(…)`, `os.environ["X"]`."""
    if isinstance(node, ast.Call) and not node.keywords:
        function, words = ast.unparse(node.func), node.args
    elif isinstance(node, ast.Subscript):
        function, words = f"{ast.unparse(node.value)}[]", [node.slice]
    else:
        return None
    if function not in ("os.getenv", "getenv", "os.environ.get", "environ.get", "os.environ[]", "environ[]"):
        return None
    values = [_value(path, word, known) for word in words]
    return _FromVariable(str(values[0]), _text(values[1]) if len(values) > 1 else None) if values else None
