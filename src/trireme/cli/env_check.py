"""`trireme env check NAME`: loads an environment in real workers, runs rollouts, says if it works and how hard it is.

Who answers is an engine that is started for the check (`--model`), a server that is there (`--base-url`), or a script
that says nothing sensible: enough to see errors, time limits and rewards that are no numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.arguments import json_table, not_negative, positive, positive_int
from trireme.config.load import load_run_config
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.launch.folder import hold_folder, holds_run
from trireme.orchestrator.environments.venv import installed_venv
from trireme.tools.environments.catalog import ROOT, build, find_source
from trireme.tools.environments.check import Check, LoadFailed, check_environment
from trireme.tools.environments.check_report import text_of, write_rollouts
from trireme.tools.environments.policy import PolicyWanted, build_opener
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.endpoints import KEY_VARIABLE, key_for_address

MAX_CONCURRENT = 32


def env_check(argv: list[str]) -> int:
    """Returns 0 where every rollout was scored, 1 where the environment could not be loaded or some of them failed.

    Raises: ConfigError for what was typed; TriremeError where the policy is gone.
    """
    arguments, words = _parser().parse_known_args(argv)
    config, _ = load_run_config(words, program="trireme env check")
    check, config = read_check(arguments, config)
    progress, waits = Progress(), Waits("the check", config.paths.logs)
    open_policy = build_opener(_policy_wanted(arguments), config, detect_devices(), waits, progress)
    with hold_folder(config.paths):
        _clear(config)
        if check.source.folder is not None and installed_venv(check.source) is None:
            check = replace(check, install_s=build(check.source, progress))
        try:
            report, outcomes = asyncio.run(check_environment(check, open_policy, waits=waits, progress=progress))
        except LoadFailed as error:
            print(json.dumps({"holds": False, "error": str(error)}, indent=1) if arguments.json else error)
            return 1
        write_rollouts(outcomes, config.paths.root / "rollouts.jsonl")
    print(json.dumps(report.as_json(), indent=1) if arguments.json else text_of(report))
    progress.say(f"every rollout: {config.paths.root / 'rollouts.jsonl'}; logs: {config.paths.logs}")
    return 0 if report.holds else 1


def read_check(arguments: Namespace, config: RunConfig) -> tuple[Check, RunConfig]:
    """What is to be checked, and the run's configuration with the check's folder and sampling.

    Raises: ConfigError where there is no such environment, or the folder is a run's.
    """
    entry = find_entry(config, arguments.name)
    source = find_source(entry.id, arguments.path)
    name = re.sub(r"[^\w.-]+", "_", entry.name or Path(source.module).stem)
    root = arguments.output or config.output_dir / "env-check" / (config.name or name)
    values: dict[str, Any] = {"output_dir": root, "name": None}
    values |= {f"orchestrator.sampling.{key}": value for key, value in _sampling(arguments).items()}
    config = updated(config, values)
    if holds_run(config.paths):
        raise ConfigError(f"{root} is a run's folder - expected one for the check alone. Give another `--output`.")
    environment = _environment(arguments, entry, name)
    if source.folder is not None:
        environment = updated(environment, {"id": str(source.folder)})
    check = Check(
        source=source,
        environment=environment,
        logs=config.paths.logs,
        split=arguments.split,
        num_examples=arguments.num_examples,
        rollouts_per_example=arguments.rollouts_per_example,
        success_at=arguments.success_at,
        seed=config.seed,
    )
    return check, config


def find_entry(config: RunConfig, name: str) -> EnvironmentConfig:
    """The table of the configuration that is called so, or has it as its id; else one with nothing but this id."""
    evaluation = config.orchestrator.eval
    entries = (*config.orchestrator.env, *(evaluation.env if evaluation else ()))
    called = [entry for entry in entries if name == entry.name] + [entry for entry in entries if name == entry.id]
    return called[0] if called else EnvironmentConfig(id=name)


def _environment(arguments: Namespace, entry: EnvironmentConfig, name: str) -> EnvironmentConfig:
    values: dict[str, Any] = {"name": name, "args": entry.args | (arguments.args or {})}
    most = min(entry.max_concurrent, max(arguments.max_concurrent, arguments.rollouts_per_example))
    values["max_concurrent"] = most
    given = {"num_workers": arguments.workers, "rollout_timeout_s": arguments.timeout}
    return updated(entry, values | {key: value for key, value in given.items() if value is not None})


def _sampling(arguments: Namespace) -> dict[str, Any]:
    given = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    return {key: value for key, value in given.items() if value is not None}


def _policy_wanted(arguments: Namespace) -> PolicyWanted:
    """Raises: ConfigError where a variable is named for the key, and is not set."""
    variable = arguments.api_key_var
    key = os.environ.get(variable) if variable else key_for_address(arguments.base_url)
    if arguments.api_key_var and not key:
        raise ConfigError(
            f"--api-key-var {arguments.api_key_var}: this variable is not set - expected the endpoint's key in it. "
            f"`export {arguments.api_key_var}=…`, or leave the flag out for {KEY_VARIABLE}."
        )
    return PolicyWanted(arguments.model, arguments.base_url, key, arguments.scripted)


def _clear(config: RunConfig) -> None:
    """What an earlier check left here. The folder is not a run's."""
    for file in (config.paths.root / "rollouts.jsonl", *config.paths.logs.glob("*.stdout")):
        file.unlink(missing_ok=True)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="trireme env check",
        usage="trireme env check NAME [-n 20] [-r 8] [--model FOLDER | --base-url URL] [@ config.toml] ...",
        description="Loads an environment in its workers and runs rollouts on the way that training takes. Without a "
        "model a script answers with nothing sensible: errors show, the difficulty does not.",
        epilog="`@ config.toml`, and any key of it as a flag, is a run's configuration: the environment's `args`, "
        "sampling, lengths and the model are taken from it. Ends with 0 where every rollout was scored, 1 where the "
        "environment could not be loaded or rollouts failed, 2 where the check could not be made.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="an environment: its name, a folder, a .py file, or its name in config.toml")
    table = json_table('{"max_length": 8}')
    add("-a", "--args", metavar="JSON", type=table, help="arguments of its load_environment; they win")
    add("-n", "--num-examples", metavar="N", type=positive_int, default=20, help="examples, from all over the set; 20")
    add("-r", "--rollouts-per-example", metavar="R", type=positive_int, default=8, help="rollouts of each; 8")
    add("--split", choices=("train", "eval"), default="train", help="examples to train on (default), or held out")
    add("--model", metavar="FOLDER", help="start an engine with it; beside --base-url: the model's name there")
    add("--base-url", metavar="URL", help="ask this server: an engine of ours, or OpenAI's chat completions")
    add("--api-key-var", metavar="NAME", help=f"variable that holds the server's key; {KEY_VARIABLE} for https")
    add("--scripted", action="store_true", help="no model, whatever config.toml says")
    add("--temperature", metavar="T", type=not_negative, help="1, or as in config.toml")
    add("--max-tokens", metavar="N", type=positive_int, help="most tokens per model turn")
    add("--success-at", metavar="X", type=float, help="a rollout is a success from this reward on")
    add("--timeout", metavar="S", type=positive, help="most seconds per rollout; 600, or as in config.toml")
    add("--workers", metavar="N", type=positive_int, help="worker processes; 1, or as in config.toml")
    most = f"most rollouts at once; {MAX_CONCURRENT}"
    add("--max-concurrent", metavar="N", type=positive_int, default=MAX_CONCURRENT, help=most)
    add("--path", metavar="DIR", type=Path, default=ROOT, help="where environments are; ./environments")
    add("--output", metavar="DIR", type=Path, help="for rollouts and logs; outputs/env-check/NAME")
    add("--json", action="store_true", help="for machines")
    return parser
