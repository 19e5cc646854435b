"""`trireme eval run ENV -m MODEL`: one model on one environment, wherever the model is.

`-m` is an entry of `configs/endpoints.py`, a model at `-b URL`, or a folder, for which an engine is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError, TriremeError
from trireme.base.log import start_logging
from trireme.base.waiting import Waits
from trireme.config.arguments import json_table, positive_int
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.orchestrator import Sampling, evaluation_problems
from trireme.config.problems import raise_together
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.orchestrator.environments.pool import Environment
from trireme.tools.environments.policy import OpenPolicy, PolicyWanted, RolloutPolicy, build_opener
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.endpoints import Endpoint, find_endpoint, key_for_address
from trireme.tools.evaluate.environments import Loading, alone_in, found, install, key_of
from trireme.tools.evaluate.eval_config import EvalConfig, named
from trireme.tools.evaluate.report import conversation_of, text_of
from trireme.tools.evaluate.session import Session, run_sessions

OUTPUT = Path("outputs/evals")
RESULTS, METADATA = "results.jsonl", "metadata.json"
NUM_EXAMPLES, ROLLOUTS = 5, 3


@dataclass(frozen=True)
class Asked:
    """What is to be evaluated, and where answers come from."""

    config: EvalConfig
    wanted: PolicyWanted
    model: str  # for people, and in the folder's name
    root: Path  # of all results
    saves: bool
    anew: bool = False
    run_id: str | None = None  # folder of its results; one of its own where not given
    shows: bool = False  # every rollout


def eval_run(argv: list[str]) -> int:
    """Returns 0 where every rollout has a reward.

    Raises:
        ConfigError: for what was typed.
        TriremeError: the model went away.
    """
    return evaluate(read_asked(_parser().parse_args(argv)))


def eval_served(config: EvalConfig, *, dry_run: bool) -> int:
    """`uv run eval` without `--weights-dir`: the model that the server has, as it is."""
    if not config.env:
        raise ConfigError(
            "no environment is named - expected one. Add `--env.id my-env`, and `--weights-dir` for a run."
        )
    config = config.model_copy(update={"env": named(config.env)})
    wanted = PolicyWanted(config.model.name, config.client.base_url, key_of(config), trained=False)
    model = config.model.name or config.client.base_url.partition("//")[2]
    asked = Asked(config, wanted, model, config.output_dir or OUTPUT, saves=True)
    return evaluate(asked, dry_run=dry_run)


def read_asked(arguments: Namespace) -> Asked:
    """Raises: ConfigError."""
    config = EvalConfig(
        env=named((EnvironmentConfig(id=arguments.env, args=arguments.env_args or {}),)),
        num_examples=arguments.num_examples if arguments.num_examples > 0 else None,
        rollouts_per_example=arguments.rollouts_per_example,
        max_concurrent=arguments.max_concurrent,
        sampling=_sampling(arguments),
    )
    wanted = _wanted(arguments)
    model = arguments.model or (wanted.base_url or "").partition("//")[2]
    return Asked(
        config,
        wanted,
        model,
        arguments.output_dir or OUTPUT,
        saves=arguments.save_results,
        anew=arguments.anew,
        run_id=arguments.into,
        shows=arguments.verbose,
    )


def _sampling(arguments: Namespace) -> Sampling:
    """Raises: ConfigError."""
    given = dict(arguments.sampling_args or {})
    for name in ("temperature", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and given.get(name, value) != value:
            raise ConfigError(
                f"--sampling-args has {name} = {given[name]!r}, --{name.replace('_', '-')} is {value!r} - expected one "
                "of the two. Leave one out."
            )
        given |= {name: value} if value is not None else {}
    fields = {name: value for name, value in given.items() if name in Sampling.model_fields}
    more = {name: value for name, value in given.items() if name not in fields}
    fields["extra_body"] = {**fields.get("extra_body", {}), **more}
    try:
        return Sampling.model_validate(fields)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"--sampling-args: {where} = {given.get(where)!r}: {error.errors()[0]['msg']} - expected what "
            "`[orchestrator.sampling]` takes. Correct it."
        ) from None


def _wanted(arguments: Namespace) -> PolicyWanted:
    """Raises: ConfigError where it is not clear where the model is."""
    if arguments.base_url is None and arguments.model and Path(arguments.model).is_dir():
        return PolicyWanted(arguments.model, trained=False)
    if arguments.model is None:
        if arguments.base_url is None:
            raise ConfigError(
                "no model is named - expected one. Add `-m MODEL`, or `-b URL` of a server with only one."
            )
        return PolicyWanted(None, arguments.base_url, _key(arguments, None), trained=False)
    endpoint = find_endpoint(arguments.model, base_url=arguments.base_url, path=arguments.endpoints_path)
    return PolicyWanted(endpoint.model, endpoint.url, _key(arguments, endpoint), trained=False)


def _key(arguments: Namespace, endpoint: Endpoint | None) -> str | None:
    """Raises: ConfigError where a variable is named, and is not set."""
    if name := arguments.api_key_var:
        if not os.environ.get(name):
            raise ConfigError(
                f"--api-key-var {name}: this variable is not set - expected the endpoint's key in it. Type `export "
                f"{name}=…`, or leave the flag out."
            )
        return os.environ[name]
    if endpoint is not None and endpoint.key:
        return endpoint.key
    return key_for_address(arguments.base_url)


def evaluate(asked: Asked, *, dry_run: bool = False) -> int:
    config = asked.config
    start_logging("eval", "warning")
    raise_together(list(evaluation_problems(config.evaluation)))
    config = config.model_copy(update={"env": found(config.env, max_concurrent=config.max_concurrent)})
    asked = replace(asked, config=config)
    progress = Progress()
    home = asked.root / f"{config.env[0].name}--{_as_name(asked.model)}"
    waits = Waits("the evaluation", home / "logs")
    opener = build_opener(asked.wanted, _run_config(asked, home), detect_devices(), waits, progress)
    if dry_run:
        print(f"model        {asked.model}\nenvironments {', '.join(str(each.name) for each in config.env)}")
        return 0
    with ExitStack() as held:
        for folder in _homes(asked):
            held.enter_context(alone_in(folder))
        install(config.env, progress)
        loading = Loading(home / "logs", config.seed, waits, progress)
        try:
            sessions = asyncio.run(_run(asked, opener, loading, progress))
        except (TriremeError, KeyboardInterrupt) as error:
            if asked.saves and not isinstance(error, ConfigError):
                progress.say("What was answered so far is kept: type the same command again for the rest.")
            raise
    _tell(asked, sessions, progress)
    return 1 if any(session.num_failed for session in sessions) else 0


def _homes(asked: Asked) -> Iterator[Path]:
    if asked.saves:
        yield from (asked.root / f"{each.name}--{_as_name(asked.model)}" for each in asked.config.env)


async def _run(asked: Asked, opener: OpenPolicy, loading: Loading, progress: Progress) -> list[Session]:
    async with loading.open(asked.config.env) as environments, opener() as policy:
        sessions = [_session(asked, environment, policy) for environment in environments]
        await run_sessions(sessions, progress)
    return sessions


def _session(asked: Asked, environment: Environment, policy: RolloutPolicy) -> Session:
    session = Session(
        environment, policy, asked.config, purpose="eval", model=asked.model, base_url=asked.wanted.base_url
    )
    if asked.saves:
        home = asked.root / f"{environment.name}--{_as_name(asked.model)}"
        folder = home / (asked.run_id or _run_id(asked, home, session.settings | session.size))
        session.resume(folder / RESULTS, folder / METADATA)
    return session


def _run_id(asked: Asked, home: Path, settings: dict[str, Any]) -> str:
    """Of one to go on with, or a new one."""
    unfinished = None if asked.anew else _unfinished(home, settings)
    return unfinished.name if unfinished else f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def _unfinished(home: Path, settings: dict[str, Any]) -> Path | None:
    """The newest that was begun with the same settings and has not come to its end."""
    found = sorted(home.glob(f"*/{METADATA}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return next((file.parent for file in found if _is_to_go_on(file, settings)), None)


def _is_to_go_on(file: Path, settings: dict[str, Any]) -> bool:
    try:
        before = json.loads(file.read_text())
        return before["finished"] is False and all(before[key] == value for key, value in settings.items())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _as_name(model: str) -> str:
    return model.strip("/").replace("/", "--").replace(":", "-")


def _run_config(asked: Asked, home: Path) -> RunConfig:
    config = asked.config
    values: dict[str, Any] = {
        "output_dir": home,
        "seed": config.seed,
        "orchestrator.sampling": config.evaluation.sampling,
        "orchestrator.engine_timeout_s": config.client.timeout_s,
        "orchestrator.max_concurrent": config.max_concurrent,
        "inference.model.max_model_len": config.model.max_model_len,
        "inference.model.tool_call_parser": config.model.tool_call_parser,
        "inference.model.reasoning_parser": config.model.reasoning_parser,
    }
    return updated(RunConfig(), values)


def _tell(asked: Asked, sessions: list[Session], progress: Progress) -> None:
    if asked.shows:
        for session in sessions:
            for result in session.results.values():
                print(conversation_of(result), end="\n\n")
    for session in sessions:
        print(text_of(session))
        if session.file is not None:
            progress.say(f"every rollout: {session.file.path} (`trireme eval tui` shows them)")
    if not asked.saves:
        progress.say("nothing was saved; `-s` does that.")


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
    add = parser.add_argument
    add("env", metavar="ENV", help="an environment: its name, a folder, or a .py file")
    model = "an entry of configs/endpoints.py, a model at the URL, or a folder: an engine is started with it"
    add("-m", "--model", metavar="MODEL", help=model)
    add("-b", "--base-url", metavar="URL", help="the server: an engine of ours, or OpenAI's chat completions")
    add(
        "-k",
        "--api-key-var",
        metavar="NAME",
        help="variable that holds the server's key; OPENAI_API_KEY beside -b https://…",
    )
    add("-n", "--num-examples", metavar="N", type=_count, default=NUM_EXAMPLES, help="examples; 5, -1 for all")
    rollouts = "rollouts of each; 3"
    add("-r", "--rollouts-per-example", metavar="R", type=positive_int, default=ROLLOUTS, help=rollouts)
    table = json_table('{"key": 1}')
    add("-a", "--env-args", metavar="JSON", type=table, help="arguments of the environment's load_environment")
    add("-S", "--sampling-args", metavar="JSON", type=table, help='such as \'{"temperature": 0.7, "top_p": 0.9}\'')
    add("-t", "--max-tokens", metavar="N", type=positive_int, help="most tokens per model turn")
    add("-T", "--temperature", metavar="T", type=float, help="1 where not given")
    add("-c", "--max-concurrent", metavar="N", type=positive_int, default=32, help="rollouts at once; 32")
    add("-s", "--save-results", action="store_true", help=f"into {OUTPUT}/ENV--MODEL/RUN_ID/{RESULTS}")
    add("-v", "--verbose", action="store_true", help="show every conversation")
    add("--anew", action="store_true", help="begin anew, also where an evaluation was left unfinished")
    into = "RUN_ID of the results: where there are some, what is missing or failed is asked again"
    add("--into", metavar="RUN_ID", help=into)
    add("-e", "--endpoints-path", metavar="FILE", type=Path, help="configs/endpoints.toml or .py where not given")
    add("-o", "--output-dir", metavar="DIR", type=Path, help=f"instead of {OUTPUT}")
    return parser


def _count(text: str) -> int:
    return -1 if text == "-1" else positive_int(text)
