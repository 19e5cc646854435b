"""`trireme gepa [run] ENV --model M`: a system prompt improved by reflection, without training.

A reflection model reads what went wrong in a few rollouts and rewrites the prompt; what is better there is scored on
validation examples, and the best on any of these are improved further (a Pareto frontier), until the budget is spent.
"""

from __future__ import annotations

import asyncio
import re
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.arguments import HELP
from trireme.config.files import to_table, to_toml
from trireme.config.load import load_config
from trireme.launch.folder import hold_folder, holds_run, move_aside
from trireme.orchestrator.environments.venv import EnvironmentSource, installed_venv
from trireme.tools.environments.catalog import build, find_source
from trireme.tools.environments.progress import Progress
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.models import Start, build_models, places_of

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
WIDTH = 110
LEAVE_S = 5.0  # for what a search that was killed leaves behind


def gepa(argv: list[str]) -> int:
    """Returns 0 where the search came to its end, whether or not a better prompt was found.

    Raises: ConfigError for what was typed; TriremeError where a model or the environment is gone. What was found until
    then lies in the folder, and the same command goes on.
    """
    if not argv or argv == ["run"]:
        print(_usage())
        return 2
    if any(word in HELP for word in argv):
        print(_usage(), end="\n\n")
    config, invocation = load_config(to_flags(argv), GepaConfig, program="trireme gepa")
    source = find_source(config.env_id, config.environments)
    folder = config.output or default_folder(source, config.env_id)
    if invocation.dry_run:
        places_of(config)
        print(to_toml(to_table(config)), end="")
        return 0
    return _in_folder(config, source, folder)


def to_flags(argv: list[str]) -> list[str]:
    """What is typed elsewhere, in the grammar of every command here.

    Example:
        to_flags(["run", "wordle", "-m", "my-model"])  # ["--env-id", "wordle", "--model", "my-model"]
        to_flags(["run", "gepa.toml"])  # ["@", "gepa.toml"]
    """
    words = argv[1:] if argv[:1] == ["run"] else list(argv)
    if words and not words[0].startswith(("-", "@")):
        is_file = words[0].endswith((".toml", ".json"))
        words = ["@" if is_file else "--env-id", *words]
    return [flag for word in words for flag in _long(word)]


def _long(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    return [SHORT[name], *([value] if equals else [])] if name in SHORT else [word]


def default_folder(source: EnvironmentSource, name: str) -> Path:
    if source.folder is not None:
        return _from_here(source.folder) / "outputs" / "gepa"
    return Path("outputs") / "gepa" / re.sub(r"[^\w.-]+", "_", Path(name).stem)


def _from_here(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _in_folder(config: GepaConfig, source: EnvironmentSource, folder: Path) -> int:
    from trireme.tools.gepa.results import Files, check_same, read_metadata

    files, paths = Files(folder), RunPaths(folder)
    if holds_run(paths):
        raise ConfigError(f"{folder} is a run's folder - expected one for prompts alone. Give another `--output`.")
    if not config.fresh:
        check_same(files, config)
    progress, waits = Progress(), Waits("the search", paths.logs)
    open_models = build_models(config, folder, Start(detect_devices(), waits, progress))
    with ExitStack() as stack:
        _hold(stack, paths)
        if config.fresh and files.metadata.exists():
            progress.say(f"an earlier search lay in {folder}: moved to {move_aside(paths, files.names)}")
        said = read_metadata(files)
        if said and said.get("summary", {}).get("state") == "finished" and said["max_calls"] == config.max_calls:
            print(_in_words(said["summary"], folder, config))
            print("it was finished before: a larger `--max-calls` goes on, `--fresh` begins anew")
            return 0
        if source.folder is not None and installed_venv(source) is None:
            build(source, progress)
        summary = _search(config, source, folder, open_models, waits, progress)
    print(_in_words(summary, folder, config))
    return 0


def _hold(stack: ExitStack, paths: RunPaths) -> None:
    try:
        stack.enter_context(hold_folder(paths, leave_s=LEAVE_S))
    except ConfigError as error:
        raise ConfigError(
            f"another search is at work in {paths.root} - expected one at a time. Wait for it, stop it, or give this "
            "one a folder of its own with `--output FOLDER`."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{paths.root} cannot be written ({error}) - expected a folder for the results. Give one with "
            "`--output FOLDER`."
        ) from error


def _search(
    config: GepaConfig,
    source: EnvironmentSource,
    folder: Path,
    open_models: Any,
    waits: Waits,
    progress: Progress,
) -> dict[str, Any]:
    from trireme.tools.gepa.optimize import Optimization
    from trireme.tools.gepa.results import Files

    optimization = Optimization(config, source, Files(folder), open_models, waits, progress)
    try:
        return asyncio.run(optimization.run()).summary
    except KeyboardInterrupt:
        progress.say(f"stopped. What was found lies in {folder}; the same command goes on")
        raise


def _in_words(summary: dict[str, Any], folder: Path, config: GepaConfig) -> str:
    validation, held_out, calls = summary["validation"], summary["held_out"], summary["calls"]
    lines = [
        f"{summary['num_prompts']} prompts in {calls['total']} of {config.max_calls} calls ({summary['why']})",
        f"validation  {validation['before']:.3f} -> {validation['after']:.3f} "
        f"({validation['num_examples']} examples, by which the best prompt was chosen)",
    ]
    if held_out is not None:
        lines.append(
            f"held out    {held_out['before']:.3f} -> {held_out['after']:.3f} "
            f"({held_out['num_examples']} examples that nothing had seen)"
        )
    else:
        lines.append("held out    not measured: `--num-test 50` keeps examples that nothing sees until the end")
    if summary["best"] == 0:
        lines.append("no prompt was better than the one to begin with, which best_prompt.txt holds")
    lines.append(f"best prompt {folder / 'best_prompt.txt'}")
    at = f" -b {config.base_url}" if config.base_url else ""
    arguments = f'-a "$(cat {folder / "best_args.json"})"'
    lines.append(f"verify      trireme eval run {config.env_id} -m {config.model}{at} {arguments}")
    return "\n".join(lines)


def _usage() -> str:
    short = ", ".join(f"{short} {long}" for short, long in SHORT.items() if not short.startswith("--"))
    return "\n".join(
        [
            "usage: trireme gepa [run] ENV --model MODEL [--reflection-model MODEL] [--max-calls 500] ...",
            "       trireme gepa [run] FILE.toml ...",
            "",
            "Improves the system prompt of an environment by reflection; no weights change. Results go to",
            "environments/ENV/outputs/gepa: best_prompt.txt, pareto_frontier.jsonl, metadata.json.",
            "After Ctrl-C the same command goes on.",
            *textwrap.wrap(f"Short: {short}.", WIDTH),
        ]
    )
