"""Functions of users, named in the configuration by `module:function` or `file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import symtable
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError


def load_function(path: str, *, key: str) -> Callable[..., Any]:
    """Import the function that a key of the configuration names.

    Raises: ConfigError if there is no such function, or its module cannot be imported.
    """
    if problem := function_problem(path, key=key):
        raise ConfigError(problem)

    where, _, name = path.rpartition(":")
    try:
        if where.endswith(".py"):
            # The prefix lets the file have the name of an existing module.
            unique = f"trireme_user_{Path(where).stem}"
            spec = importlib.util.spec_from_file_location(unique, where)
            assert spec is not None, where
            assert spec.loader is not None, where
            module = importlib.util.module_from_spec(spec)
            sys.modules[unique] = module  # dataclasses look their own module up
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f'`{key} = "{path}"`: importing {where} raised {type(error).__name__}: {error}. '
            "A module that can be imported by the trainer was expected. Correct it."
        ) from error

    # The rules saw the name in the source. What it is bound to is known only now.
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(_no_function(path, key, f"{where} has no" if function is None else "no function is called"))
    return function


def function_problem(path: str, *, key: str) -> str | None:
    """Return what is wrong with a path, as far as it shows without importing anything; None if nothing is."""
    where, _, name = path.rpartition(":")
    module = where.partition(".")[0]
    if not where or not name.isidentifier():
        return (
            f'`{key} = "{path}"` names no function - expected `module:function` or `file.py:function`. '
            f'Write for example `{key} = "my_module:my_function"`.'
        )

    # Only the top-level package is looked up: `find_spec` of a submodule would import its parents.
    if not where.endswith(".py"):
        with suppress(ValueError):  # `__main__`, or an empty name
            if importlib.util.find_spec(module) is not None:
                return None
        return (
            f'`{key} = "{path}"`: there is no module {module} - expected one that Python can import here. Install it, '
            "put its folder into PYTHONPATH, or name a file: `file.py:function`."
        )

    if not os.path.isfile(where):  # `Path.is_file` raises if the name is too long
        return f'`{key} = "{path}"`: {where} does not exist (looked in {Path.cwd()}) - expected a file. Check the path.'

    # The symbol table lists the names at the top level without running the file.
    code: Any = Path(where).read_bytes()  # Python decodes it as on import; typeshed knows of texts only
    try:
        symbols = symtable.symtable(code, where, "exec").get_symbols()
    except SyntaxError as error:
        return f'`{key} = "{path}"`: {where}, line {error.lineno}: {error.msg}. Python was expected. Correct it.'
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return None if name in names else _no_function(path, key, f"{where} has no")


def _no_function(path: str, key: str, what: str) -> str:
    name = path.rpartition(":")[2]
    return (
        f'`{key} = "{path}"`: {what} `{name}` - expected a function of that name at its top level. '
        "Correct the name, or define it."
    )
