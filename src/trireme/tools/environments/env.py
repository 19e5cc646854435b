"""`trireme env init|install|list|check`: write, install, list and try environments."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from trireme.base.safe_text import one_line
from trireme.config.arguments import choose_verb, json_table, positive_int
from trireme.orchestrator.environments.venv import find_environment, installed_venv
from trireme.tools.environments.catalog import KINDS, ROOT, list_environments, write_environment
from trireme.tools.policies.environments import install as install_environment

LONGEST = 1000  # characters of a description


def command(argv: list[str]) -> int:
    """Call a verb, and return its exit code.

    Raises: ConfigError for an unknown verb, and for what the verb refuses.
    """
    name = choose_verb("trireme env", {name: line for name, (line, _) in VERBS.items()}, argv)
    return VERBS[name][1](argv[1:])


def init(argv: list[str]) -> int:
    parser = _parser("init", "Writes a new environment package that works at once; nothing is overwritten.")
    parser.add_argument("name", metavar="NAME", help="its name, such as my-env")
    kinds = "plain: a data set and a function, no framework; else an environment of verifiers"
    parser.add_argument("--kind", choices=KINDS, default="verifiers", help=kinds)
    options = parser.parse_args(argv)
    folder = write_environment(options.name, kind=options.kind, root=options.path)
    print(f"{folder} is written: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    name = folder.name.replace("_", "-") if options.path == ROOT else folder  # the name in a run's configuration
    print(f"Next: trireme env check {name}")
    return 0


def install(argv: list[str]) -> int:
    description = "Builds an environment's own virtual environment now; it is then used without a network."
    parser = _parser("install", description)
    parser.add_argument("name", metavar="NAME", help="an environment, `owner/name`, or the folder of a package")
    again = "build it again, also where it is installed; not while a run uses it"
    parser.add_argument("--again", action="store_true", help=again)
    options = parser.parse_args(argv)

    source = find_environment(options.name, root=options.path)
    installed = installed_venv(source) if source.folder is not None else None
    if source.folder is None:
        print(f"{source.id} needs no virtual environment of its own: it runs with this interpreter ({source.kind}).")
    elif installed and not options.again:
        print(f"{source.id} is installed already, in {installed} (--again to build it again)")
    else:
        took_s = install_environment(source, again=options.again)
        print(f"{source.id} installed in {took_s:.1f} s, in {installed_venv(source)}")
    return 0


def list_all(argv: list[str]) -> int:
    options = _parser("list", "Lists the environments that are here. Imports none of them.").parse_args(argv)
    entries = list_environments(options.path)
    if not entries:
        print(f"There are no environments in {options.path}. `trireme env init my-env` writes one.")
        return 0

    rows = [("id", "installed", "where", "description")]
    for entry in entries:
        rows.append((entry.id, entry.state, entry.where, one_line(entry.description, LONGEST)))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def check(argv: list[str]) -> int:
    """Return 0 if every rollout was scored, 1 if the environment could not be loaded or some of them failed.

    Raises: ConfigError for what was typed; TriremeError if the policy is gone.
    """
    from trireme.config.load import load_run_config
    from trireme.config.resolve import updated
    from trireme.tools.environments.check import CheckOptions, LoadFailed, run_check
    from trireme.tools.environments.check_report import text_of

    parser = _parser(
        "check",
        "Loads an environment in its workers and runs rollouts on the way that training takes. Without a model, a "
        "script answers with nothing sensible: errors show, the difficulty does not.",
    )
    parser.usage = "trireme env check NAME [-n 20] [-r 8] [--model FOLDER | --base-url URL] [@ config.toml] ..."
    parser.epilog = (
        "`@ config.toml`, and any key of it as a flag, is a run's configuration: the environment's `args`, sampling, "
        "lengths and the model are taken from it. Ends with 0 where every rollout was scored, 1 where the environment "
        "could not be loaded or rollouts failed, 2 where the check could not be made."
    )

    add = parser.add_argument
    add("name", metavar="NAME", help="an environment: its name, a folder, a .py file, or its name in config.toml")
    table = json_table('{"max_length": 8}')
    add("-a", "--args", metavar="JSON", type=table, help="arguments of its load_environment; they win")
    add("-n", "--num-examples", metavar="N", type=positive_int, default=20, help="examples, from all over the set; 20")
    add("-r", "--rollouts-per-example", metavar="R", type=positive_int, default=8, help="rollouts of each; 8")
    add("--split", choices=("train", "eval"), default="train", help="examples to train on (default), or held out")
    add("--model", metavar="FOLDER", help="start an engine with it; with --base-url: the model's name there")
    add("--base-url", metavar="URL", help="ask this server: an engine of ours, or OpenAI's chat completions")
    add("--api-key-var", metavar="NAME", help="variable that holds the server's key; OPENAI_API_KEY for https")
    add("--scripted", action="store_true", help="no model, whatever config.toml says")
    add("--temperature", metavar="T", help="1, or as in config.toml")
    add("--max-tokens", metavar="N", help="most tokens per model turn")
    add("--output", metavar="DIR", type=Path, help="for rollouts and logs; outputs/env-check/NAME")
    add("--json", action="store_true", help="for machines")

    options, words = parser.parse_known_args(argv)

    # These two are flags for convenience, and keys of the configuration: pass them on as such.
    typed = {name: value for name in ("temperature", "max_tokens") if (value := options.__dict__.pop(name))}
    for name, value in typed.items():
        words += [f"--orchestrator.sampling.{name}", value]
    config, _ = load_run_config(words, program="trireme env check")

    # A source of a run's file is sampled as it is there; what was typed goes over that too.
    whole, own = config.orchestrator.sampling, config.of(options.name).orchestrator.sampling
    config = updated(config, {"orchestrator.sampling": updated(own, {name: getattr(whole, name) for name in typed})})
    as_json = options.__dict__.pop("json")

    try:
        report = run_check(CheckOptions(**vars(options)), config)
    except LoadFailed as error:
        print(json.dumps({"holds": False, "error": str(error)}, indent=1) if as_json else error)
        return 1
    print(json.dumps(report.as_json(), indent=1) if as_json else text_of(report))
    return 0 if report.holds else 1


VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "init": ("writes a new environment that works at once", init),
    "install": ("builds an environment's virtual environment now, for use without a network", install),
    "list": ("shows what is here, and what is installed", list_all),
    "check": ("runs a few rollouts: does it work, and how hard is it for a model?", check),
}


def _parser(verb: str, description: str) -> ArgumentParser:
    parser = ArgumentParser(prog=f"trireme env {verb}", description=description, allow_abbrev=False)
    where = "where environments are; ./environments"
    parser.add_argument("-p", "--path", metavar="DIR", type=Path, default=ROOT, help=where)
    return parser
