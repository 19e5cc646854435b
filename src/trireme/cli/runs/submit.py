"""`trireme submit FILE`: the same run on a cluster, by Slurm or Kubernetes."""

from __future__ import annotations

from argparse import ArgumentParser
from difflib import get_close_matches
from typing import Any, get_args

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP, count
from trireme.config.run import RunConfig
from trireme.config.section import find
from trireme.tools.cluster.job import Scheduler, SubmitOptions
from trireme.tools.cluster.submit import PROGRAM, submit_run


def submit(argv: list[str]) -> int:
    """Submit a run, and return the exit code.

    Raises: ConfigError if the run is wrong, or the cluster rejects it.
    """
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} FILE [--on slurm|kubernetes] [options] [--key value …]",
        description="Submits a run to a cluster as one job. A single machine runs `rl`. Several run the inference "
        "servers, the orchestrator and the trainer's ranks. FILE is one of `rl`, of `prime-rl` or `vf-rl`, or of "
        "hosted training; its keys can be given as flags, too.",
        epilog="Then: `trireme status RUN`, `trireme logs RUN -f`, `trireme cancel RUN`.",
        allow_abbrev=False,
    )

    # One flag per field, so that a new option of `submit` is one line in its class.
    for name, field in SubmitOptions.model_fields.items():
        settings: dict[str, Any] = {"help": field.description, "default": field.default}
        if name == "on":
            settings["choices"] = get_args(Scheduler)
        elif isinstance(field.default, bool):
            settings["action"] = "store_true"
        elif isinstance(field.default, tuple):
            settings |= {"action": "append", "default": []}
        elif "int" in str(field.annotation):
            settings["type"] = count
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)

    if not argv or any(word in HELP for word in argv):
        parser.print_help()
        raise SystemExit(0 if argv else 2)

    # What is left are keys of the run. A misspelt option of `submit` would pass as one, so look for near names.
    options, words = parser.parse_known_args(argv)
    flags = [f"--{name.replace('_', '-')}" for name in SubmitOptions.model_fields]
    for word in words:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, flags, n=1, cutoff=0.8) if flag.startswith("--") else []
        if near and find(RunConfig, tuple(flag.removeprefix("--").replace("-", "_").split("."))) is None:
            raise ConfigError(f"unknown flag `{flag}` - it is no key of a run either. Did you mean `{near[0]}`?")

    submit_run(words, SubmitOptions(**vars(options)))
    return 0
