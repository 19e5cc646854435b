"""`trireme VERB ...`: what can be done with a run that is on disk. Each verb has its own door."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from trireme.base.errors import ConfigError
from trireme.cli.door import run_door
from trireme.config.arguments import HELP


@dataclass(frozen=True)
class Verb:
    """One of the commands. Its module is imported when it is called, and holds a function of its name."""

    line: str  # what it does, for the list
    abruptly: bool = False  # see `run_door`

    @staticmethod
    def door(name: str) -> Callable[[list[str]], int | None]:
        door: Callable[[list[str]], int | None] = getattr(import_module(f"trireme.cli.{name}"), name)
        return door


VERBS = {
    "audit": Verb("proves from disk that a run lost nothing and trained nothing twice"),
    "replay": Verb("trains a run again from its journal and compares its weights to the bit", abruptly=True),
}


def main() -> None:
    verb = VERBS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    run_door("trireme", trireme, abruptly=verb is not None and verb.abruptly)


def trireme(argv: list[str]) -> int:
    """Raises: ConfigError where the verb is not one of ours."""
    if not argv or argv[0] in HELP:
        print(_manual())
        return 0 if argv else 2
    name = argv[0]
    if name not in VERBS:
        near = get_close_matches(name, VERBS, n=1)
        raise ConfigError(
            f"there is no `trireme {name}` - expected one of {', '.join(VERBS)}. "
            + (f"Did you mean `trireme {near[0]}`?" if near else "See `trireme --help`.")
        )
    return Verb.door(name)(argv[1:]) or 0


def _manual() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.line}" for name, verb in VERBS.items()]
    return "\n".join(["usage: trireme VERB ...", "", *lines, "", "`trireme VERB --help` tells more of each."])


if __name__ == "__main__":
    main()
