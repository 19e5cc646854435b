"""`trireme env init|install|list|check`: environments are written, installed, found, and tried before training."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP
from trireme.orchestrator.environments.venv import installed_venv
from trireme.tools.environments.catalog import ROOT, Entry, build, find_source, list_environments
from trireme.tools.environments.progress import Progress
from trireme.tools.environments.template import KINDS, write_environment

WIDTH = 150  # of the list where it does not go to a terminal


def env(argv: list[str]) -> int:
    """Raises: ConfigError where the verb is not one of ours."""
    if not argv or argv[0] in HELP:
        print(_manual())
        if argv:
            raise SystemExit(0)
        return 2
    name = argv[0]
    if name not in VERBS:
        near = get_close_matches(name, VERBS, n=1)
        raise ConfigError(
            f"there is no `trireme env {name}` - expected one of {', '.join(VERBS)}. "
            + (f"Did you mean `trireme env {near[0]}`?" if near else "See `trireme env --help`.")
        )
    return VERBS[name].run(argv[1:])


def init(argv: list[str]) -> int:
    parser = _parser("init", "Writes a new environment package that works at once; nothing is overwritten.")
    parser.add_argument("name", metavar="NAME", help="its name, such as my-env")
    kinds = "plain: a data set and a function, no framework; the others are of verifiers"
    parser.add_argument("--kind", choices=KINDS, default="verifiers", help=kinds)
    _add_path(parser)
    arguments = parser.parse_args(argv)
    folder = write_environment(arguments.name, kind=arguments.kind, root=arguments.path)
    name = folder.name.replace("_", "-")
    print(f"{folder} is written: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    print(f"Next: trireme env check {_id(name, arguments.path)}")
    return 0


def install(argv: list[str]) -> int:
    parser = _parser(
        "install", "Builds an environment's own virtual environment now; from then on it is used without a network."
    )
    parser.add_argument("name", metavar="NAME", help="an environment, `owner/name`, or the folder of a package")
    parser.add_argument(
        "--again", action="store_true", help="anew, also where it is installed; not while a run uses it"
    )
    _add_path(parser)
    arguments = parser.parse_args(argv)
    source = find_source(arguments.name, arguments.path)
    if source.folder is None:
        print(f"{source.id} needs no virtual environment of its own: it runs with this interpreter ({source.kind}).")
        return 0
    there = installed_venv(source)
    if there and not arguments.again:
        print(f"{source.id} is installed already, in {there} (--again to build it anew)")
        return 0
    took_s = build(source, Progress(), again=arguments.again)
    print(f"{source.id} installed in {took_s:.1f} s, in {installed_venv(source)}")
    return 0


def list_all(argv: list[str]) -> int:
    parser = _parser("list", "The environments that are here. Imports none of them.")
    parser.add_argument("--json", action="store_true", help="for machines")
    _add_path(parser)
    arguments = parser.parse_args(argv)
    entries = list_environments(arguments.path)
    if arguments.json:
        print(json.dumps([entry.as_json() for entry in entries], indent=1))
        return 0
    if not entries:
        print(f"There are no environments in {arguments.path}. `trireme env init my-env` writes one.")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(to_table(entries))
    for entry in entries:
        if entry.trouble:
            console.print(f"{entry.id}: {entry.trouble}", markup=False)
    return 0


def check(argv: list[str]) -> int:
    from trireme.cli.env_check import env_check  # it needs more than a list does

    return env_check(argv)


@dataclass(frozen=True)
class EnvVerb:
    line: str  # what it does, for the list
    run: Callable[[list[str]], int]


VERBS = {
    "init": EnvVerb("writes a new environment that works at once", init),
    "install": EnvVerb("builds an environment's virtual environment now, for use without a network", install),
    "list": EnvVerb("what is here, which verifiers each runs with, and what is installed", list_all),
    "check": EnvVerb("runs a few rollouts: does it work, and how hard is it for a model?", check),
}


def to_table(entries: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "kind", "where", "installed", "verifiers", "description"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        installed = "yes" if entry.venv else "not yet" if entry.kind == "package" else "-"
        shown = "broken" if entry.trouble else installed
        table.add_row(entry.id, entry.kind, entry.where, shown, entry.verifiers or "-", entry.description)
    return table


def _id(name: str, root: Path) -> str:
    """As a run's configuration has to call it."""
    return name if root == ROOT else str(root / name.replace("-", "_"))


def _parser(verb: str, description: str) -> ArgumentParser:
    return ArgumentParser(prog=f"trireme env {verb}", description=description, allow_abbrev=False)


def _add_path(parser: ArgumentParser) -> None:
    parser.add_argument("--path", metavar="DIR", type=Path, default=ROOT, help="where environments are; ./environments")


def _manual() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.line}" for name, verb in VERBS.items()]
    return "\n".join(["usage: trireme env VERB ...", "", *lines, "", "`trireme env VERB --help` tells more of each."])
