"""`trireme gepa [run] ENV --model M`: improve a system prompt by reflection, without training.

A reflection model reads what went wrong in a few rollouts and rewrites the prompt. What is better there is scored on
validation examples, and the best on any of these are improved further (a Pareto frontier), until the budget is spent.
"""

from __future__ import annotations

import textwrap

from trireme.config.arguments import HELP
from trireme.config.files import to_table, to_toml
from trireme.config.load import Invocation, load_config
from trireme.config.section import find
from trireme.tools.gepa.config import GepaConfig

SHORT = {
    "-m": "--model",
    "-M": "--reflection-model",
    "-B": "--max-calls",
    "-n": "--num-train",
    "-N": "--num-val",
    "-a": "--env-args",
    "-b": "--base-url",
    "-k": "--api-key-var",
    "--env-dir-path": "--environments",
}
USAGE = """\
usage: trireme gepa [run] ENV --model MODEL [--reflection-model MODEL] [--max-calls 500] ...
       trireme gepa [run] FILE.toml ...

Improves the system prompt of an environment by reflection; no weights change. Results go to
environments/ENV/outputs/gepa: best_prompt.txt, pareto_frontier.jsonl, metadata.json.
After Ctrl-C the same command resumes the search."""


def command(argv: list[str]) -> int:
    """Return 0 if the search came to its end, whether or not it found a better prompt.

    Raises: ConfigError for what was typed; TriremeError if a model or the environment is gone. What was found until
    then is in the folder, and the same command resumes the search.
    """
    short = ", ".join(f"{short} {long}" for short, long in SHORT.items() if not short.startswith("--"))
    usage = "\n".join([USAGE, *textwrap.wrap(f"Short: {short}.", 110)])
    if not argv or argv == ["run"]:
        print(usage)
        return 2
    if any(word in HELP for word in argv):
        print(usage, end="\n\n")

    config, invocation = load_config(to_flags(argv), GepaConfig, program="trireme gepa")
    from trireme.tools.gepa.optimize import places_of, run_search

    if invocation.dry_run:
        places_of(config)
        print(to_toml(to_table(config)), end="")
    else:
        print(run_search(config))
    return 0


def to_flags(argv: list[str]) -> list[str]:
    """Translate the words of this command to flags. The environment or the file may be anywhere among them.

    Example:
        to_flags(["run", "-m", "my-model", "wordle"])  # ["--env-id", "wordle", "--model", "my-model"]
        to_flags(["run", "gepa.toml"])  # ["@", "gepa.toml"]
    """
    left = argv[1:] if argv[:1] == ["run"] else list(argv)
    flags: list[str] = []
    bare: list[str] = []
    while left:
        word = left.pop(0)
        if not word.startswith(("-", "@")):
            bare.append(word)
            continue

        # Take as many words as the flag's field accepts, so that the bare word is not mistaken for a value.
        name, equals, value = word.partition("=")
        name = SHORT.get(name, name)
        flags.append(f"{name}{equals}{value}")
        count = 0 if equals else _num_values(name, left)
        while count and left and not left[0].startswith(("--", "@")) and left[0] not in (*SHORT, *HELP):
            flags.append(left.pop(0))
            count -= 1

    # The first bare word is the file or the environment; others are left for the parser to refuse.
    named = ["@" if word.endswith((".toml", ".json")) else "--env-id" for word in bare[:1]]
    return [*named, *bare[:1], *flags, *bare[1:]]


def _num_values(name: str, left: list[str]) -> int:
    """Return how many of the words that are left a flag takes at most."""
    if name.startswith("@"):
        return int(name == "@")
    path = tuple(name.removeprefix("--").replace("-", "_").split("."))
    field = find(GepaConfig, path) or find(Invocation, path)
    if field is None or field.kind == "list":
        return len(left)
    return int(field.kind != "bool" or left[:1] in (["true"], ["false"]))
