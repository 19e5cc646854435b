"""Functions of users, named in the configuration by `module:function` or `file.py:function`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trireme.base.errors import ConfigError


def load_function(path: str, *, key: str) -> Callable[..., Any]:
    """Import the function.

    Args:
        key: the configuration key that has this path, for errors.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
    """
    if problem := function_problem(path, key=key):
        raise ConfigError(problem)
    where, _, name = path.rpartition(":")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(
            f'`{key} = "{path}"`: importing {where} raised {type(error).__name__}: {error}. '
            "A module that can be imported by the trainer was expected. Correct it."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(_no_function(path, key, f"{where} has no" if function is None else "no function is called"))
    return function


def function_problem(path: str, *, key: str) -> str | None:
    """Return what is wrong with a path, as far as it shows without importing anything; None where nothing is."""
    where, _, name = path.rpartition(":")
    if not where or not name.isidentifier():
        return (
            f'`{key} = "{path}"` names no function - expected `module:function` or `file.py:function`. '
            f'Write for example `{key} = "my_module:my_function"`.'
        )
    if where.endswith(".py"):
        return _file_problem(path, Path(where), name, key)
    if importlib.util.find_spec(where.partition(".")[0]) is None:
        return (
            f'`{key} = "{path}"`: there is no module {where.partition(".")[0]} - expected one that Python can import '
            "here. Install it, put its folder into PYTHONPATH, or name a file: `file.py:function`."
        )
    return None


def _file_problem(path: str, file: Path, name: str, key: str) -> str | None:
    if not file.is_file():
        return (
            f'`{key} = "{path}"`: {file} does not exist (looked in {Path.cwd()}) - expected a Python file. '
            "Check the path."
        )
    try:
        body = ast.parse(file.read_bytes()).body
    except SyntaxError as error:
        return f'`{key} = "{path}"`: {file}, line {error.lineno}: {error.msg}. Python was expected. Correct it.'
    if name in names_at_the_top(body):
        return None
    return _no_function(path, key, f"{file} has no")


def names_at_the_top(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module defines, imports or assigns at its top level."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def _no_function(path: str, key: str, what: str) -> str:
    name = path.rpartition(":")[2]
    return (
        f'`{key} = "{path}"`: {what} `{name}` - expected a function of that name at its top level. '
        "Correct the name, or define it."
    )


def _from_file(file: Path) -> ModuleType:
    """Import a file under a unique module name, so that it may be called like an existing module."""
    name = f"trireme_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module
