"""`trireme VERB ...`: commands for a machine, environments, and runs on disk. Each is at the top of its tool."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from trireme.cli.command import run_command
from trireme.config.arguments import choose_verb


@dataclass(frozen=True)
class Verb:
    """One of the commands. Its module is imported when it is called."""

    module: str  # below `trireme`
    line: str  # description in the list of verbs
    function: str = "command"  # takes the words behind the verb, and returns the exit code
    abruptly: bool = False  # see `run_command`


VERBS = {
    "audit": Verb("tools.audit.audit", "proves from disk that a run lost nothing and trained nothing twice"),
    "cancel": Verb("tools.cluster.cancel", "ends a run, here or on a cluster"),
    "dashboard": Verb(
        "tools.dashboard.dashboard",
        "shows runs in the browser: metrics, lanes, rollouts token by token, logs, warnings",
    ),
    "diff": Verb("tools.diff.report", "compares two runs to the bit and names what differed first, and why"),
    "doctor": Verb("tools.doctor.doctor", "checks whether a run would work on this machine, and what to do if not"),
    "env": Verb("tools.environments.env", "writes, installs, lists and checks environments"),
    "eval": Verb(
        "cli.eval", "evaluates a model, or the checkpoints of a run one after the other", "eval", abruptly=True
    ),
    "eval-view": Verb("tools.viewer.app", "shows rewards and conversations of runs and evaluations in the terminal"),
    "export": Verb(
        "tools.export.export", "writes a checkpoint as a model that transformers and vLLM load", abruptly=True
    ),
    "from-trl": Verb("tools.formats.from_trl", "turns a script of TRL's GRPOTrainer or SFTTrainer into a run"),
    "gepa": Verb("tools.gepa.gepa", "improves an environment's system prompt by reflection, without training"),
    "lab": Verb("tools.workspace", "sets up a folder to work in: example configurations, environments, tiny models"),
    "login": Verb("cli.trireme", "explains where keys of other services go; there is nothing to log in to", "login"),
    "logs": Verb("tools.cluster.logs", "shows the logs of a run, here or on a cluster"),
    "plan": Verb(
        "tools.plan.plan", "predicts what a run will need and how long a step will take, before anything starts"
    ),
    "replay": Verb(
        "tools.replay_command", "trains a run again from its journal and compares its weights to the bit", abruptly=True
    ),
    "rollouts": Verb(
        "tools.datasets.write", "writes the rollouts of a run as data sets for TRL, verl, or anything else"
    ),
    "status": Verb("tools.cluster.status", "shows the state of a run, here or on a cluster"),
    "submit": Verb("tools.cluster.submit", "submits a run to a cluster: Slurm or Kubernetes"),
    "train": Verb("cli.trireme", "`train submit` is `submit`; so are `train status|logs|cancel`", "train"),
}

KEYS = """\
There is nothing to log in to: everything runs on your own machines, without an account.
What other services ask for goes where their own tools look:

  models on a hub         HF_TOKEN, or `hf auth login`
  Weights & Biases        WANDB_API_KEY, or `wandb login`
  models at an endpoint   configs/endpoints.py or .toml, one entry each; `trireme lab setup` writes one
  judges of environments  OPENAI_API_KEY and the like; `env_file` of a job
  a run on several hosts  TRIREME_TOKEN, or `hosts.token_file`"""


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


def login(argv: list[str]) -> int:
    ArgumentParser(prog="trireme login", description="Says where keys of other services go.").parse_args(argv)
    print(KEYS)
    return 0


def _call(program: str, verbs: dict[str, Verb], argv: list[str], advice: str = "") -> int:
    name = choose_verb(program, {name: verb.line for name, verb in verbs.items()}, argv, advice)
    verb = verbs[name]
    command: Callable[[list[str]], int] = getattr(import_module(f"trireme.{verb.module}"), verb.function)
    return command(argv[1:])


if __name__ == "__main__":
    main()
