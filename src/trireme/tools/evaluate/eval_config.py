"""`eval`: a model, or the checkpoints of a run one after the other, on environments."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from trireme.base.errors import ConfigError
from trireme.config.arguments import HELP, TypedFile, TypedFlag, parse_arguments
from trireme.config.orchestrator import Environment, Evaluation, Sampling
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.section import Section, as_flag


class Client(Section):
    """`[client]`: the server that is asked."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Its address: an engine of ours (`inference`), or anything with OpenAI's chat completions."""
    api_key_var: str | None = None
    """Variable of the environment that holds its key; TRIREME_TOKEN, or for https OPENAI_API_KEY, where not given."""
    timeout_s: PositiveFloat = 600.0
    """How long one answer, or one transfer of weights, may take."""


class EvaluatedModel(Section):
    """`[model]`: what is asked there."""

    name: str | None = None
    """Its name at the server; the only one that it serves where not given."""
    base: str | None = None
    """Folder or hub name of the engine's base model, where the one that the server names is not here."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus completion in tokens; what the server says where not given."""
    tool_call_parser: str | None = None
    """How the engine reads tool calls; as the run of the checkpoints had it where not given, else the hermes form."""
    reasoning_parser: str | None = None
    """How the engine tells thinking from content; as the run had it where not given."""


class EvalConfig(Section):
    """Everything about an evaluation outside a run."""

    weights_dir: Path | None = None
    """Folder with `step_N` folders, as a run has in `weights/`: each is loaded into the engine and evaluated."""
    steps: tuple[int, ...] = ()
    """Which of them; all where not given."""
    eval_base: bool = True
    """Evaluate the engine's base model first, as step 0."""
    env: tuple[Environment, ...] = ()
    """Environments; those that the run of the checkpoints is evaluated on where not given."""
    num_examples: PositiveInt | None = None
    """Examples per environment, the first of its evaluation set (else of its training set); all where not given."""
    rollouts_per_example: PositiveInt = 1
    """Completions per example: k of avg@k."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for pass@k; powers of two up to `rollouts_per_example` where not given."""
    pass_threshold: float = 1.0
    """A rollout with at least this reward has passed."""
    max_concurrent: PositiveInt = 128
    """Rollouts under way at once, in all environments together."""
    max_attempts: PositiveInt = 3
    """A rollout that fails is tried this often."""
    sampling: Sampling | None = None
    """How answers are sampled; as the run of the checkpoints is evaluated where not given, else greedy, or at
    temperature 1 where there are several rollouts per example."""
    transfer: Literal["auto", "filesystem", "gloo"] = "auto"
    """How weights reach the engine: it reads them from the folder itself, or they are sent; `auto` sends them to
    engines on other machines."""
    bucket_mib: PositiveInt = 64
    """Size of the pieces that are sent, in MiB."""
    take_over: bool = False
    """Load weights also into an engine that serves a version of a training run; for engines whose run is over."""
    restore_base: bool = True
    """Give the engine its base model back when all is done."""
    output_dir: Path | None = None
    """Where results go, as `step_N/ENV.jsonl`; `evals` beside the weights folder where not given, else
    `outputs/evals/MODEL`."""
    seed: int = 0
    """Seed of the environments' data."""
    client: Client = Client()
    model: EvaluatedModel = EvaluatedModel()

    @property
    def evaluation(self) -> Evaluation:
        """In the words of evaluations during a run."""
        return Evaluation(
            rollouts_per_example=self.rollouts_per_example,
            num_examples=self.num_examples,
            pass_at=self.pass_at,
            pass_threshold=self.pass_threshold,
            sampling=_as_said(self.sampling, otherwise=first_sampling(self.rollouts_per_example)),
            env=self.env,
        )


def as_the_run(config: EvalConfig, run: RunConfig) -> EvalConfig:
    """What was not said, as the run of the checkpoints has it."""
    during, model = run.orchestrator.eval, run.inference.model
    values: dict[str, Any] = {"env": config.env or (during.env if during else ()) or run.orchestrator.env}
    if during is not None:
        own = ("num_examples", "rollouts_per_example", "pass_at", "pass_threshold")
        said = config.model_fields_set
        counts = said & {"num_examples", "rollouts_per_example", "pass_at"}
        values |= {name: getattr(during, name) for name in own if name not in said and not counts}
    rollouts = values.get("rollouts_per_example", config.rollouts_per_example)
    values["sampling"] = _sampling(config, run, rollouts)
    values["model.tool_call_parser"] = config.model.tool_call_parser or model.tool_call_parser
    values["model.reasoning_parser"] = config.model.reasoning_parser or model.reasoning_parser
    values["model.max_model_len"] = config.model.max_model_len or model.max_model_len
    return updated(config, values)


def _sampling(config: EvalConfig, run: RunConfig, rollouts_per_example: int) -> Sampling:
    """Turns are as long as in training where nobody says otherwise."""
    during = run.orchestrator.eval
    otherwise = during.sampling if during else first_sampling(rollouts_per_example)
    sampling = _as_said(config.sampling, otherwise=otherwise)
    return updated(sampling, {"max_tokens": sampling.max_tokens or run.orchestrator.sampling.max_tokens})


def _as_said(sampling: Sampling | None, *, otherwise: Sampling) -> Sampling:
    """Who names the length of turns alone has said nothing of the temperature."""
    said = sampling.model_fields_set if sampling is not None else ()
    return updated(otherwise, {name: getattr(sampling, name) for name in said})


def first_sampling(rollouts_per_example: int) -> Sampling:
    """Greedy; but several answers to a question must be able to differ."""
    return Sampling(temperature=0.0 if rollouts_per_example == 1 else 1.0)


def named(environments: tuple[Environment, ...]) -> tuple[Environment, ...]:
    """Each with a name that can be a file's.

    Raises: ConfigError where two have the same.
    """
    found = tuple(updated(each, {"name": _name(each)}) for each in environments)
    names = [str(each.name) for each in found]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"{len(names)} environments, and {names.count(twice[0])} of them are called {twice[0]!r} - expected names "
            'that differ: results go by them. Give each table a `name = "…"`.'
        )
    return found


def _name(environment: Environment) -> str:
    name = environment.name or environment.id.rstrip("/").removesuffix(".py")
    return re.sub(r"[^\w.-]+", "_", name if environment.name else name.rpartition("/")[2])


def with_environments(argv: list[str]) -> list[str]:
    """`--env.id my-env` without a number names an environment; several of them, or several words, name several.

    Example:
        with_environments(["--env.id", "a", "--env.args.split", "test"])
        # ["--env", '[{"id": "a"}]', "--env.0.args.split", "test"]
    """
    if any(word in HELP for word in argv):
        return argv
    arguments = parse_arguments(argv)
    flags = [argument for argument in arguments if isinstance(argument, TypedFlag)]
    ids = [id for flag in flags if _is_id(flag) for words in flag.values for id in words.split(",") if id]
    others = [flag for flag in flags if _is_unnumbered(flag) and not _is_id(flag)]
    if len(ids) > 1 and others:
        raise ConfigError(
            f"`{others[0].name}` came with {len(ids)} environments ({', '.join(ids)}) - expected the number of the one "
            f"that is meant, counted from 0. Write `{as_flag(_numbered(others[0].path))}`."
        )
    first = ["--env", json.dumps([{"id": id} for id in ids])] if ids else []
    rest = [argument for argument in arguments if not (isinstance(argument, TypedFlag) and _is_id(argument))]
    files = [word for each in rest if isinstance(each, TypedFile) for word in _typed_file(each)]
    return files + first + [word for each in rest if isinstance(each, TypedFlag) for word in _typed_flag(each)]


def _is_unnumbered(flag: TypedFlag) -> bool:
    return flag.path[0] == "env" and len(flag.path) > 1 and not flag.path[1].isdigit()


def _is_id(flag: TypedFlag) -> bool:
    return flag.path == ("env", "id") and bool(flag.values)


def _numbered(path: tuple[str, ...]) -> tuple[str, ...]:
    return (path[0], "0", *path[1:])


def _typed_file(file: TypedFile) -> list[str]:
    return [*([as_flag(file.scope)] if file.scope else []), "@", file.name]


def _typed_flag(flag: TypedFlag) -> list[str]:
    return [as_flag(_numbered(flag.path)) if _is_unnumbered(flag) else flag.name, *flag.values]
