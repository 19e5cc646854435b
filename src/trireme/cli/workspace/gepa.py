"""`trireme gepa [run] ENV --model M`: improve a system prompt by reflection, without training.

A reflection model reads what went wrong in a few rollouts and rewrites the prompt. What is better there is scored on
validation examples, and the best on any of these are improved further (a Pareto frontier), until the budget is spent.
"""

from __future__ import annotations

import textwrap

from trireme.config.arguments import HELP
from trireme.config.files import to_table, to_toml
from trireme.config.load import load_config
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


def gepa(argv: list[str]) -> int:
    """Return 0 where the search came to its end, whether or not it found a better prompt.

    Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone. What was found until
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
    """Translate the words of this command to flags. The environment or the file comes first.

    Example:
        to_flags(["run", "wordle", "-m", "my-model"])  # ["--env-id", "wordle", "--model", "my-model"]
        to_flags(["run", "gepa.toml"])  # ["@", "gepa.toml"]
    """
    words = argv[1:] if argv[:1] == ["run"] else argv
    flags = []
    if words and not words[0].startswith(("-", "@")):
        flags = ["@" if words[0].endswith((".toml", ".json")) else "--env-id", words[0]]
    for word in words[len(flags) // 2 :]:
        name, equals, value = word.partition("=")
        flags.append(f"{SHORT.get(name, name)}{equals}{value}")
    return flags
