"""`trireme train VERB ...`: the same as `trireme VERB ...`, for those who are used to it."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP

VERBS = ("submit", "status", "logs", "cancel")


def train(argv: list[str]) -> int:
    """Raises: ConfigError where the verb is not one of these."""
    if not argv or argv[0] in HELP:
        print("usage: trireme train submit FILE ...\n\nAlso: trireme train status|logs|cancel RUN.")
        raise SystemExit(0 if argv else 2)
    verb, *rest = argv
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        raise ConfigError(
            f"there is no `trireme train {verb}` - expected one of {', '.join(VERBS)}. "
            + (f"Did you mean `trireme train {near[0]}`?" if near else "To train on this machine, type `rl @ FILE`.")
        )
    code: int = getattr(import_module(f"trireme.cli.{verb}"), verb)(rest) or 0
    return code
