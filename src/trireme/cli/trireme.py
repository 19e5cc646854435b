"""`trireme VERB ...`: what can be done with environments, and with a run on disk. Each verb has a module of its name:
in `runs` for what works on a run, in `workspace` for what comes before one: the machine, a folder, environments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from trireme.cli.command import run_command
from trireme.config.arguments import choose_verb


@dataclass(frozen=True)
class Verb:
    """One of the commands. Its module is imported when it is called, and holds a function of its name."""

    module: str  # below `trireme.cli`
    line: str  # description in the list of verbs
    abruptly: bool = False  # see `run_command`


VERBS = {
    "audit": Verb("runs.audit", "proves from disk that a run lost nothing and trained nothing twice"),
    "cancel": Verb("runs.cancel", "ends a run, here or on a cluster"),
    "dashboard": Verb(
        "runs.dashboard", "shows runs in the browser: metrics, lanes, rollouts token by token, logs, warnings"
    ),
    "diff": Verb("runs.diff", "compares two runs to the bit and names what differed first, and why"),
    "doctor": Verb("workspace.doctor", "checks whether a run would work on this machine, and what to do if not"),
    "env": Verb("workspace.env", "writes, installs, lists and checks environments"),
    "eval": Verb("eval", "evaluates a model, or the checkpoints of a run one after the other", abruptly=True),
    "eval-view": Verb("runs.eval_view", "shows rewards and conversations of runs and evaluations in the terminal"),
    "export": Verb("runs.export", "writes a checkpoint as a model that transformers and vLLM load", abruptly=True),
    "gepa": Verb("workspace.gepa", "improves an environment's system prompt by reflection, without training"),
    "lab": Verb("workspace.lab", "sets up a folder to work in: example configurations, environments, tiny models"),
    "login": Verb("workspace.login", "explains where keys of other services go; there is nothing to log in to"),
    "logs": Verb("runs.logs", "shows the logs of a run, here or on a cluster"),
    "plan": Verb("runs.plan", "predicts what a run will need and how long a step will take, before anything starts"),
    "replay": Verb(
        "runs.replay", "trains a run again from its journal and compares its weights to the bit", abruptly=True
    ),
    "rollouts": Verb("runs.rollouts", "writes the rollouts of a run as data sets for TRL, verl, or anything else"),
    "status": Verb("runs.status", "shows the state of a run, here or on a cluster"),
    "submit": Verb("runs.submit", "submits a run to a cluster: Slurm or Kubernetes"),
    "train": Verb("trireme", "`train submit` is `submit`; so are `train status|logs|cancel`"),
}


def main() -> None:
    verb = VERBS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    run_command("trireme", trireme, abruptly=verb is not None and verb.abruptly)


def trireme(argv: list[str]) -> int:
    """Call a verb, and return its exit code.

    Raises: ConfigError if the verb is not one of ours.
    """
    if argv == ["--version"]:
        print(f"trireme {version('trireme')}")
        return 0
    return _call("trireme", VERBS, argv)


def train(argv: list[str]) -> int:
    """Call `trireme train VERB ...`, the same as `trireme VERB ...`, for those who are used to it.

    Raises: ConfigError if the verb is not one of these.
    """
    verbs = {name: VERBS[name] for name in ("submit", "status", "logs", "cancel")}
    return _call("trireme train", verbs, argv, "To train on this machine, type `rl @ FILE`.")


def _call(program: str, verbs: dict[str, Verb], argv: list[str], advice: str = "") -> int:
    name = choose_verb(program, {name: verb.line for name, verb in verbs.items()}, argv, advice)
    module = import_module(f"trireme.cli.{verbs[name].module}")
    main: Callable[[list[str]], int | None] = getattr(module, name.replace("-", "_"))
    return main(argv[1:]) or 0


if __name__ == "__main__":
    main()
