"""`trireme eval run ENV -m MODEL`: evaluate one model on one environment, wherever the model is.

`-m` is an entry of `configs/endpoints.py`, a model at `-b URL`, or a folder, for which an engine is started.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.log import start_logging
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.arguments import json_table, positive_int
from trireme.config.files import to_table, to_toml
from trireme.config.load import read_as
from trireme.config.orchestrator import MeasuredEnvironment
from trireme.config.resolve import updated
from trireme.config.sampling import Sampling
from trireme.launch.folder import hold_folder
from trireme.orchestrator.environments.pool import Environment
from trireme.tools import progress
from trireme.tools.evaluate.config import EvalConfig, EvaluatedModel
from trireme.tools.evaluate.report import conversation_of, text_of
from trireme.tools.evaluate.session import EvalSession, prepare, rollout_config, run_sessions
from trireme.tools.policies.environments import install_missing, open_environments
from trireme.tools.policies.prompts import PromptedEnvironment, read_prompt
from trireme.tools.policies.selection import PolicyWanted, RolloutPolicy, build_opener, find_policy

OUTPUT = Path("outputs/evals")
RESULTS, METADATA = "results.jsonl", "metadata.json"
NUM_EXAMPLES, ROLLOUTS = 5, 3


def eval_run(argv: list[str]) -> int:
    """Return 0 if every rollout has a reward.

    Raises: ConfigError for what was typed; TriremeError if the model went away.
    """
    arguments = _parser().parse_args(argv)
    config = EvalConfig(
        env=(MeasuredEnvironment(id=arguments.env, args=arguments.env_args or {}),),
        num_examples=arguments.num_examples if arguments.num_examples > 0 else None,
        rollouts_per_example=arguments.rollouts_per_example,
        max_concurrent=arguments.max_concurrent,
        sampling=_read_sampling(arguments),
        output_dir=arguments.output_dir,
        model=EvaluatedModel(name=arguments.model),
    )

    wanted = find_policy(arguments.model, arguments.base_url, arguments.api_key_var, endpoints=arguments.endpoints_path)

    # the line end that closes the file is no part of the prompt
    file = arguments.system_prompt_file
    prompt = None if file is None else read_prompt(file, flag="--system-prompt-file").removesuffix("\n")
    return evaluate_model(
        config, wanted, saves=arguments.save_results, shows_rollouts=arguments.verbose, system_prompt=prompt
    )


def eval_served(config: EvalConfig, *, dry_run: bool) -> int:
    """`uv run eval` without `--weights-dir`: evaluate the model that the server has, as it is."""
    if not config.env:
        raise ConfigError(
            "no environment is named - expected one. Add `--env.id my-env`, and `--weights-dir` for a run."
        )
    wanted = PolicyWanted(config.model.name, config.client.base_url, config.key, trained=False)
    return evaluate_model(config, wanted, saves=True, dry_run=dry_run)


def evaluate_model(
    config: EvalConfig,
    wanted: PolicyWanted,
    *,
    saves: bool,
    shows_rollouts: bool = False,
    dry_run: bool = False,
    system_prompt: str | None = None,
) -> int:
    """Evaluate one model, wherever it is, on all environments of `config`. Returns 0 if every rollout has a reward.

    Args:
        saves: write results, and complete unfinished ones.
        system_prompt: replaces the environments' own, as in a search for prompts; theirs if None.

    Raises: ConfigError, TriremeError as `eval_run`.
    """
    start_logging("eval", "warning")
    config = prepare(config)
    output = config.output_dir or OUTPUT
    model = config.model.name or (wanted.base_url or "").partition("//")[2]  # its name as typed, or its server's
    # results of the same model and environment lie together, under names that can be folders
    folder_name = model.strip("/").replace("/", "--").replace(":", "-")
    homes = {str(each.name): output / f"{each.name}--{folder_name}" for each in config.env}
    home = next(iter(homes.values()))
    waits = Waits("the evaluation", home / "logs")
    run = rollout_config(config, output_dir=home, seed=config.seed)
    wanted = replace(wanted, pictures=output / "pictures" if saves else None)
    open_policy = build_opener(wanted, run, waits)
    if dry_run:
        print(to_toml(to_table(config)), end="")
        return 0

    def open_session(environment: Environment, policy: RolloutPolicy) -> EvalSession:
        settings: dict[str, Any] = {"model": model, "base_url": wanted.base_url}
        # the prompt decides what is answered, so it is part of the settings that results are compared by
        if system_prompt is not None:
            settings["system_prompt"] = system_prompt
            environment = cast(Environment, PromptedEnvironment(environment, system_prompt))
        session = EvalSession(environment, policy, config, settings=settings)
        # the newest unfinished evaluation with the same settings is completed
        if saves:
            home = homes[environment.name]
            now = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
            folder = _find_unfinished(home, session) or home / now
            session.resume(folder / RESULTS, folder / METADATA)
        return session

    async def evaluate() -> list[EvalSession]:
        opening = open_environments(config.env, home / "logs", waits, seed=config.seed)
        async with opening as environments, open_policy() as policy:
            sessions = [open_session(environment, policy) for environment in environments]
            await run_sessions(sessions)
        return sessions

    # two evaluations must not write the same results
    with ExitStack() as locks:
        for folder in homes.values() if saves else ():
            locks.enter_context(hold_folder(RunPaths(folder)))
        install_missing(config.env)
        try:
            sessions = asyncio.run(evaluate())
        except (TriremeError, KeyboardInterrupt) as error:
            if saves and not isinstance(error, ConfigError):
                progress.show("What was answered so far is kept: type the same command again for the rest.")
            raise

    for session in sessions:
        for result in session.results.values() if shows_rollouts else ():
            print(conversation_of(result), end="\n\n")
        print(text_of(session))
        if session.file is not None:
            progress.show(f"every rollout: {session.file.path} (`trireme eval tui` shows them)")
    if not saves:
        progress.show("nothing was saved; `-s` does that.")
    return 1 if any(session.num_failed for session in sessions) else 0


def _read_sampling(arguments: Namespace) -> Sampling:
    """Return the sampling that was typed; what we have no key for is `extra_body`, from which clients of OpenAI merge.

    Raises: ConfigError.
    """
    # flags are shortcuts for keys, and a key in `--sampling-args` wins over its flag
    typed = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    given = dict(arguments.sampling_args or {})
    if isinstance(body := given.get("extra_body"), dict):
        del given["extra_body"]
        if twice := sorted(body.keys() & given.keys()):
            raise ConfigError(
                f"--sampling-args: `{twice[0]}` is in `extra_body` and beside it - expected it once. Remove one."
            )
        given |= body

    given = {"temperature": 1.0} | {name: value for name, value in typed.items() if value is not None} | given
    known = {name: value for name, value in given.items() if name in Sampling.model_fields}
    more = {name: value for name, value in given.items() if name not in known}
    return updated(read_as(Sampling, known, where="--sampling-args"), {"extra_body": more})


def _find_unfinished(home: Path, session: EvalSession) -> Path | None:
    """Return the newest results with the same settings that miss rollouts, or have some that failed."""
    for file in sorted(home.glob(f"*/{METADATA}"), key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            before = {"system_prompt": None} | json.loads(file.read_text())
            settings = {"system_prompt": None} | session.settings
            if before["finished"] is False and all(before[key] == value for key, value in settings.items()):
                return file.parent
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="trireme eval run",
        usage="trireme eval run ENV -m MODEL [-b URL] [-n 5] [-r 3] [-s] [-v] [-a JSON] [-S JSON] ...",
        description="Asks a model on the evaluation examples of an environment (the training ones where it has no "
        "others), and says how well it does.",
        epilog="Ends with 0 where every rollout has a reward, 1 where some failed or the model went away, 2 where what "
        "was typed cannot be evaluated.",
        allow_abbrev=False,
    )
    # what is asked, and where
    add = parser.add_argument
    add("env", metavar="ENV", help="an environment: its name, a folder, or a .py file")
    model = "an entry of configs/endpoints.py, a model at the URL, or a folder: an engine is started with it"
    add("-m", "--model", metavar="MODEL", help=model)
    add("-b", "--base-url", metavar="URL", help="the server: an engine of ours, or OpenAI's chat completions")
    key = "variable that holds the server's key; OPENAI_API_KEY with -b https://…"
    add("-k", "--api-key-var", metavar="NAME", help=key)
    # on which examples, and with what
    add("-n", "--num-examples", metavar="N", type=_count, default=NUM_EXAMPLES, help="examples; 5, -1 for all")
    rollouts = "rollouts of each; 3"
    add("-r", "--rollouts-per-example", metavar="R", type=positive_int, default=ROLLOUTS, help=rollouts)
    table = json_table('{"key": 1}')
    add("-a", "--env-args", metavar="JSON", type=table, help="arguments of the environment's load_environment")
    prompt = "the system prompt, in place of the environment's, as `trireme gepa` tries prompts"
    add("--system-prompt-file", metavar="FILE", type=Path, help=prompt)
    # how it is sampled
    add("-S", "--sampling-args", metavar="JSON", type=table, help='such as \'{"temperature": 0.7, "top_p": 0.9}\'')
    add("-t", "--max-tokens", metavar="N", type=positive_int, help="most tokens per model turn")
    add("-T", "--temperature", metavar="T", type=float, help="1 where not given; -S takes precedence")
    add("-c", "--max-concurrent", metavar="N", type=positive_int, default=32, help="rollouts at once; 32")
    # what becomes of the results
    add("-s", "--save-results", action="store_true", help=f"into {OUTPUT}/ENV--MODEL/RUN_ID/{RESULTS}")
    add("-v", "--verbose", action="store_true", help="show every conversation")
    add("-e", "--endpoints-path", metavar="FILE", type=Path, help="configs/endpoints.toml or .py where not given")
    add("-o", "--output-dir", metavar="DIR", type=Path, help=f"instead of {OUTPUT}")

    return parser


def _count(text: str) -> int:
    return -1 if text == "-1" else positive_int(text)
