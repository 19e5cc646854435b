"""Read the words that are typed behind a script's name, as its own parser would."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from trireme.base.errors import ConfigError
from trireme.config.arguments import TypedFlag, parse_arguments
from trireme.tools.formats.yaml_file import load, read_yaml

SCRIPT_DEFAULTS: dict[str, dict[str, Any]] = {
    "ScriptArguments": {
        **{"dataset_name": None, "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test"},
        "dataset_streaming": False,
    },
    "ModelConfig": {
        **{"model_name_or_path": None, "model_revision": "main", "dtype": "float32", "attn_implementation": None},
        **{"use_peft": False, "load_in_8bit": False, "load_in_4bit": False},
    },
}
"""Defaults of TRL's classes that scripts read by name; those of a trainer's configuration are in `trl.py`."""

TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": bool, "Path": str}
ACTIONS = {"argparse.BooleanOptionalAction": argparse.BooleanOptionalAction}


def read_with_argparse(
    arguments: list[tuple[list[Any], dict[str, Any]]], words: list[str], *, where: str
) -> dict[str, Any]:
    """Return what a parser with these arguments makes of the words.

    Args:
        arguments: what `add_argument` is called with, with the names of types and actions.
        where: the script, for messages.

    Raises: ConfigError if the words are none of its arguments.
    """
    parser = _Parser(add_help=False)
    try:
        for names, kwargs in arguments:
            known = {"action": ACTIONS.get(kwargs["action"], kwargs["action"])} if "action" in kwargs else {}
            if "type" in kwargs:
                known["type"] = TYPES.get(kwargs["type"].rpartition(".")[2]) or _unknown(kwargs["type"])
            parser.add_argument(*names, **(kwargs | known))
        return vars(parser.parse_args(words))
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: its own arguments {words} cannot be read ({error}) - expected those that the script takes. "
            "Type them behind `--`."
        ) from None


def _unknown(name: str) -> Callable[[str], Any]:
    def convert(text: str) -> NoReturn:
        raise argparse.ArgumentTypeError(f"{name}({text!r}) is known only when the script runs")

    return convert


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def read_typed(words: list[str]) -> dict[str, Any]:
    """Return `--key value --flag --config FILE` as a table, as TRL's parser reads it."""
    table: dict[str, Any] = {}
    for typed in parse_arguments(words):
        if not isinstance(typed, TypedFlag):
            raise ConfigError(f"`{typed.name}` is no argument of a script - expected `--key value`. Correct it.")
        read = [load(value.strip(",")) for value in typed.values]
        table[".".join(typed.path)] = True if not read else read[0] if len(read) == 1 else read
    config = table.pop("config", None)
    return (read_yaml(Path(str(config))) if config else {}) | table
