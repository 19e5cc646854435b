"""`trireme VERB ...`: what can be done with environments, and with a run on disk. Each has a module of its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from trireme.base.errors import ConfigError
from trireme.cli.command import run_command
from trireme.config.arguments import HELP


@dataclass(frozen=True)
class Verb:
    """One of the commands. Its module is imported when it is called, and holds a function of its name."""

    line: str  # what it does, for the list
    abruptly: bool = False  # see `run_command`


VERBS = {
    "audit": Verb("proves from disk that a run lost nothing and trained nothing twice"),
    "cancel": Verb("ends a run, here or on a cluster"),
    "dashboard": Verb("shows runs in the browser: metrics, lanes, rollouts token by token, logs, warnings"),
    "diff": Verb("compares two runs to the bit and says what differed first, and why"),
    "doctor": Verb("says whether a run would work on this machine, and what to do where not"),
    "env": Verb("writes, installs, lists and checks environments"),
    "eval": Verb("evaluates a model, or the checkpoints of a run one after the other", abruptly=True),
    "eval-view": Verb("shows rewards and conversations of runs and evaluations in the terminal"),
    "export": Verb("writes a checkpoint as a model that transformers and vLLM load", abruptly=True),
    "gepa": Verb("improves an environment's system prompt by reflection, without training"),
    "lab": Verb("sets up a folder to work in: example configurations, environments, tiny models"),
    "login": Verb("says that there is nothing to log in to, and where keys of other services go"),
    "logs": Verb("shows what a run says, here or on a cluster"),
    "plan": Verb("says what a run will need and how long a step will take, before anything starts"),
    "replay": Verb("trains a run again from its journal and compares its weights to the bit", abruptly=True),
    "report": Verb("writes one page about a run, with plots, for a colleague"),
    "rollouts": Verb("writes the rollouts of a run as data sets for TRL, verl, or anything else"),
    "status": Verb("says how a run stands, here or on a cluster"),
    "submit": Verb("submits a run to a cluster: Slurm or Kubernetes"),
    "train": Verb("`train submit` is `submit`; so are `train status|logs|cancel`"),
}


def main() -> None:
    verb = VERBS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    run_command("trireme", trireme, abruptly=verb is not None and verb.abruptly)


def trireme(argv: list[str]) -> int:
    """Raises: ConfigError where the verb is not one of ours."""
    if not argv or argv[0] in HELP:
        width = max(map(len, VERBS))
        lines = [f"  {name:{width}}  {verb.line}" for name, verb in VERBS.items()]
        print("usage: trireme VERB ...", "", *lines, "", "`trireme VERB --help` describes each.", sep="\n")
        return 0 if argv else 2
    name = argv[0]
    if name not in VERBS:
        near = get_close_matches(name, VERBS, n=1)
        raise ConfigError(
            f"there is no `trireme {name}` - expected one of {', '.join(VERBS)}. "
            + (f"Did you mean `trireme {near[0]}`?" if near else "See `trireme --help`.")
        )
    word = name.replace("-", "_")
    main: Callable[[list[str]], int | None] = getattr(import_module(f"trireme.cli.{word}"), word)
    return main(argv[1:]) or 0


if __name__ == "__main__":
    main()
