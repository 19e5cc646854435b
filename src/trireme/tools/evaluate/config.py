"""Settings of `eval`: a model, or the checkpoints of a run one after the other, on environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from trireme.base.token import token
from trireme.config.orchestrator import Environment, EvaluatedEnvironment, Evaluation, MeasuredEnvironment
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling, template_fallback
from trireme.config.section import Section, Seed, merged
from trireme.tools.policies.endpoint_file import find_key


class Client(Section):
    """`[client]`: the server that answers."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Its address: an engine of ours (`inference`), or anything with OpenAI's chat completions."""
    api_key_var: str | None = None
    """Variable of the environment that holds its key; TRIREME_TOKEN, or for https OPENAI_API_KEY, where not given."""
    timeout_s: PositiveFloat = 600.0
    """How long one answer, or one transfer of weights, may take."""


class EvaluatedModel(Section):
    """`[model]`: the model at that server."""

    name: str | None = None
    """Its name at the server; the only one that it serves where not given."""
    base: str | None = None
    """Folder or hub name of the engine's base model, where the one that the server names is not here."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus completion in tokens; what the server reports where not given."""
    tool_call_parser: str | None = None
    """The engine's parser of tool calls; that of the checkpoints' run if not set, else the hermes form."""
    reasoning_parser: str | None = None
    """The parser that separates thinking from content; the run's if not set."""


class EvalConfig(Section):
    """Everything about an evaluation outside a run."""

    weights_dir: Path | None = None
    """Folder with `step_N` folders, as a run's `weights/`: each is evaluated."""
    steps: tuple[int, ...] = ()
    """Steps to evaluate; all where not given."""
    eval_base: bool = True
    """Evaluate the engine's base model first, as step 0."""
    env: tuple[MeasuredEnvironment, ...] = ()
    """Environments; those that the run of the checkpoints is evaluated on where not given."""
    num_examples: PositiveInt | None = None
    """Examples per environment, the first of its evaluation set (else its training set); all if not set."""
    rollouts_per_example: PositiveInt = 1
    """Completions per example: k of avg@k."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for pass@k; powers of two up to `rollouts_per_example` where not given."""
    pass_threshold: float = 1.0
    """A rollout with at least this reward has passed."""
    max_concurrent: PositiveInt = 128
    """Concurrent rollouts, in all environments together."""
    max_attempts: PositiveInt = 3
    """A rollout that fails is tried this often."""
    sampling: Sampling | None = None
    """How the model is sampled; as in the run's own evaluations where not given, else greedy, or at temperature 1 where
    there are several rollouts per example."""
    take_over: bool = False
    """Load weights also into an engine of a training run, which must be over."""
    output_dir: Path | None = None
    """Folder of the results; `evals` next to the weights folder if not set, else `outputs/evals/MODEL`."""
    seed: Seed = 0
    """Seed of the environments' data."""
    client: Client = Client()
    model: EvaluatedModel = EvaluatedModel()

    def of(self, environment: str) -> Evaluation:
        """Return the evaluation of one environment: with the keys of its own table, if it has one, over these."""
        own = next((each for each in self.env if each.resolved_name == environment), None)
        has_rollouts = own is not None and "rollouts_per_example" in own.model_fields_set
        rollouts = own.rollouts_per_example if own and has_rollouts else self.rollouts_per_example
        # The temperature that is not given depends on the rollouts.
        return updated(self, {"rollouts_per_example": rollouts}).evaluation.of(environment)

    @property
    def evaluation(self) -> Evaluation:
        """The same settings as those of evaluations during a run."""
        of_all = Evaluation(
            rollouts_per_example=self.rollouts_per_example,
            num_examples=self.num_examples,
            pass_at=self.pass_at,
            pass_threshold=self.pass_threshold,
            sampling=_sampling(self.sampling, default=_default_sampling(self.rollouts_per_example)),
        )
        return of_all.model_copy(update={"env": self.env})

    @property
    def key(self) -> str | None:
        """The server's key. Engines that get checkpoints are sent TRIREME_TOKEN, as is any server on this machine.

        Raises: ConfigError if a variable is named for it, and is not set.
        """
        ours = token() if self.weights_dir is not None else None
        return find_key("--client.api-key-var", self.client.api_key_var, url=self.client.base_url, otherwise=ours)


def inherit_from_run(config: EvalConfig, run: RunConfig) -> EvalConfig:
    """Fill in what the user left out, as the run of the checkpoints has it.

    `num_examples`, `rollouts_per_example` and `pass_at` are taken together or not at all. Turns are as long as in
    training, and the chat template gets the same variables, if neither the user nor the run's evaluations set
    others.
    """
    during, model = run.orchestrator.eval, run.inference.model
    given = config.model_fields_set
    inherited = tuple(_of_run(each, config) for each in (during.env if during else ()) or run.orchestrator.env)
    values: dict[str, Any] = {"env": config.env or inherited}
    # a number of examples or rollouts that was typed must not be mixed with values of pass@k of the run
    if during is not None:
        extent = {"num_examples", "rollouts_per_example", "pass_at"}
        names = ({"pass_threshold"} - given) | (set() if given & extent else extent)
        values |= {name: getattr(during, name) for name in names}
    rollouts = values.get("rollouts_per_example", config.rollouts_per_example)

    sampling = _sampling(config.sampling, default=during.sampling if during else _default_sampling(rollouts))
    max_tokens = sampling.max_tokens or run.orchestrator.sampling.max_tokens
    template = template_fallback(sampling, run.orchestrator.sampling)
    values["sampling"] = updated(sampling, {"max_tokens": max_tokens} | template)

    for name in ("tool_call_parser", "reasoning_parser", "max_model_len"):
        values[f"model.{name}"] = getattr(config.model, name) or getattr(model, name)
    return updated(config, values)


def _of_run(environment: Environment, config: EvalConfig) -> MeasuredEnvironment:
    """Return an environment of a run as it is evaluated: one to evaluate with what the user did not type otherwise."""
    names = set(Environment.model_fields)
    if isinstance(environment, EvaluatedEnvironment):
        extent = {"num_examples", "rollouts_per_example"}
        names |= {"sampling"} | (set() if config.model_fields_set & (extent | {"pass_at"}) else extent)
    kept = MeasuredEnvironment(**{name: getattr(environment, name) for name in environment.model_fields_set & names})
    return updated(kept, {"sampling": merged(kept.sampling, config.sampling)}) if kept.sampling else kept


def _sampling(given: Sampling | None, *, default: Sampling) -> Sampling:
    """Replace only the keys that the user gave: a length of turns does not change the temperature."""
    return updated(default, {name: getattr(given, name) for name in given.model_fields_set} if given else {})


def _default_sampling(rollouts_per_example: int) -> Sampling:
    """Greedy; but several answers to a question must be able to differ."""
    return Sampling(temperature=0.0 if rollouts_per_example == 1 else 1.0)


def with_environments(argv: list[str]) -> list[str]:
    """Number the flags of environments. Each `--env.id` names one more, and takes the flags after it.

    Environments of a file are replaced if one is named.

    Example:
        with_environments(["--env.id", "a", "--env.args.split", "test", "--env.id=b"])
        # ["--env", "[]", "--env.0.id", "a", "--env.0.args.split", "test", "--env.1.id=b"]
    """
    numbered: list[str] = []
    is_named, last = any(word.partition("=")[0] == "--env.id" for word in argv), -1
    for word in argv:
        above, _, key = word.partition(".")
        if above == "--env" and key and not key[0].isdigit():
            # the first named environment removes those of the file
            if is_named and not any(each.startswith("--env.") for each in numbered):
                numbered += ["--env", "[]"]
            last += key.partition("=")[0] == "id"
            word = f"--env.{max(0, last)}.{key}"
        numbered.append(word)
    return numbered
