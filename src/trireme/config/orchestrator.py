"""`[orchestrator]`: what is rolled out, how it is scored, and how rollouts become batches."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from trireme.config.inference import sampling_names
from trireme.config.losses import Loss
from trireme.config.section import EnvVars, Section, merged


class Sampling(Section):
    """`[orchestrator.sampling]`: one request to the engine."""

    max_tokens: PositiveInt | None = None
    """Most tokens per model turn (not per rollout); up to the context if not set."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; the trainer's logprobs are taken at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the behaviour logprobs are those of the cut distribution."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this many most likely tokens only; all if not set."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out tokens less likely than this times the most likely one."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 makes tokens that occurred less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occurred."""
    frequency_penalty: float = 0.0
    """Subtracted from logits for each occurrence."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """No end of sequence before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    seed: int | None = None
    """Decides the engine's seed of a turn, together with the group, the place in it and the turn."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, as `{ enable_thinking = false }`; those of an environment's table, and then of a
    turn's own request, take precedence."""
    extra_body: dict[str, Any] = {}
    """More sampling parameters of vLLM, by its own names, and `chat_template_kwargs`. `reasoning_effort` goes to the
    chat template, as in vLLM."""

    @property
    def template_request(self) -> dict[str, Any]:
        """The part of a request that the chat template is given (`template_kwargs_of`); empty without any."""
        given = {"chat_template_kwargs": self.chat_template_kwargs} | self.extra_body
        return {name: given[name] for name in OF_TEMPLATE if given.get(name)}

    @property
    def cuts(self) -> bool:
        """Return whether the sampler chooses among a part of the vocabulary only."""
        return self.top_p < 1 or self.min_p > 0 or (self.top_k or 0) > 0

    @property
    def most_kept(self) -> int:
        """The number of tokens that a cut sampler may choose from."""
        return max(MOST_KEPT, self.top_k or 0)


OF_TEMPLATE = ("chat_template_kwargs", "reasoning_effort")
"""Keys of a request that are for the chat template."""


def template_kwargs_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a request gives the chat template, as vLLM reads it.

    `reasoning_effort` is one of them, and decides `enable_thinking` if the request does not.

    Raises: ValueError if they are no table, or name what is rendered.
    """
    given, effort = request.get("chat_template_kwargs") or {}, request.get("reasoning_effort")
    if not given and effort is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs is {given!r:.80}, expected an object, as {{'enable_thinking': false}}")
    if reserved := sorted(NOT_TEMPLATE_KWARGS & given.keys()):
        raise ValueError(f"chat_template_kwargs holds {reserved[0]!r}, expected variables besides what is rendered")
    return dict(given) if effort is None else {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


def template_fallback(own: Sampling, trained: Sampling) -> dict[str, Any]:
    """Return the keys of a sampling table by which evaluation renders as training, unless the table says how."""
    # A table that says anything about rendering decides all of it.
    if {*own.extra_body, *own.model_fields_set} & {*OF_TEMPLATE}:
        return {}
    more = {name: trained.extra_body[name] for name in OF_TEMPLATE if name in trained.extra_body}
    return {"chat_template_kwargs": trained.chat_template_kwargs, "extra_body": own.extra_body | more}


NOT_TEMPLATE_KWARGS = {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"} | {
    *("chat_template", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
}
"""Arguments of transformers' `apply_chat_template` that decide what is rendered, and in which form."""


MOST_KEPT = 64
"""The `top_k` of requests whose `top_p` or `min_p` cut while no `top_k` is given.

A token's logprob under a cut sampler is its logprob among the tokens that were kept, so the trainer must know which
those were. Engines say so through the logprobs of the likeliest tokens: those that were left out have none. That needs
a limit on how many are kept.
"""


def is_cut(arguments: Mapping[str, Any]) -> bool:
    """Return whether a request's sampler chooses among a part of the vocabulary. At temperature 0, it never chooses."""
    cuts = arguments.get("top_p", 1.0) < 1 or arguments.get("min_p", 0.0) > 0 or arguments.get("top_k", 0) > 0
    return cuts and arguments.get("temperature", 1.0) > 0


def slots_for(top_k: int) -> int:
    """Return how many of the likeliest tokens to ask for: more than `top_k`, as tokens that tie for its last place are
    all kept."""
    return top_k + top_k // 4 + 8


class Agent(Section):
    """`[orchestrator.env.agent]`: a program that solves the tasks by calling the policy through an API.

    The environment gives the examples and the reward. The program runs once for each rollout, in a folder of its own,
    and finds the policy where its SDK looks for it: `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
    `ANTHROPIC_API_KEY`. In `command`, `env`, `stdin` and `workdir`, these are filled in: `{prompt}`, `{base_url}` (with
    `/v1`), `{gateway}` (without), `{api_key}`, `{folder}`, `{here}` (the folder in which the run was started), and the
    example's own fields.
    """

    command: tuple[str, ...] = ()
    """The program and its arguments."""
    external: bool = False
    """Run no program: clients of your own harness open sessions at `port`, and post rewards. No `command` then."""
    env: dict[str, str] = {}
    """More environment variables of the program."""
    inherit: tuple[str, ...] = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
    """Variables of the orchestrator that the program gets; no others."""
    workdir: str | None = None
    """Folder that is copied for each rollout; an empty folder if not set."""
    stdin: str | None = None
    """Text on the program's standard input; none if not set."""
    runtime: Literal["subprocess", "sandbox", "docker", "podman"] = "subprocess"
    """How the program runs: as a process of this user, in a sandbox of namespaces, or in a container."""
    image: str | None = None
    """Image of the containers, with the program in it. Harbor tasks bring their own."""
    container_args: tuple[str, ...] = ()
    """More arguments of `docker run` or `podman run`."""
    readable: tuple[str, ...] = ()
    """Paths that the program can read in a sandbox, beside the system's and Python's; they may begin with `{here}`."""
    network: bool = False
    """The program can use the machine's network. Containers need it to reach the policy."""
    memory_gib: PositiveFloat = 4.0
    """A program in a sandbox or container whose processes hold more memory is ended."""
    num_processes: PositiveInt = 256
    """Processes at once of a program in a sandbox, which is ended if it has more, or in a container."""
    timeout_s: PositiveFloat = 540.0
    """The program is ended after this long, and what it has done is scored; less than `rollout_timeout_s`."""
    train: Literal["all", "main", "last"] = "all"
    """Conversations of a rollout that train: all, the one with the most turns, or the one of the newest turn."""
    only_with_tools: bool = False
    """Leave out conversations without tools, such as requests for a title."""
    host: str = "127.0.0.1"
    """Address at which the policy is served to the program; each rollout has a key of its own."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of that address; a free one if 0, which `external` does not allow."""


class Environment(Section):
    """An environment, as it is opened; `Source` and `EvaluatedEnvironment` add the keys of their arrays."""

    id: str
    """A package (in `environments/` or installed), or the path of a .py file or of a folder of Harbor tasks."""
    name: str | None = None
    """Name in metrics and logs; the last part of `id` if not set."""
    args: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template in its rollouts: they replace those of `sampling`, key by key."""
    weight: PositiveFloat = 1.0
    """Share of the examples of a batch, relative to the other environments'."""
    num_workers: PositiveInt = 1
    """Worker processes that run it."""
    max_concurrent: PositiveInt = 512
    """Rollouts under way at once in all its workers."""
    rollout_timeout_s: PositiveFloat = 600.0
    """A rollout that takes longer is dropped, with its reason."""
    max_turns: PositiveInt | None = None
    """Model turns per rollout; the environment's own limit if not set."""
    max_memory_gib: PositiveFloat | None = None
    """A worker whose processes hold more than this is restarted; no limit if not set. Agent programs do not count."""
    inherit: tuple[str, ...] | None = None
    """Variables of the orchestrator that its workers get, beside the system's and Python's; all if not set."""
    agent: Agent | None = None
    """A program that plays the rollouts; the environment itself does if not set."""

    @property
    def resolved_name(self) -> str:
        name = Path(self.id.rstrip("/").removesuffix(".py")).name
        return self.name or (Path(self.id).resolve().name if name in ("", "..") else name)

    @property
    def file_name(self) -> str:
        """Return its name as it appears in names of files: a `_` for each blank and sign but `.` and `-`."""
        return re.sub(r"[^\w.-]", "_", self.resolved_name)


class DifficultyPools(Section):
    """`[orchestrator.buffer.pools]`: how often an example comes, by how well its last groups did."""

    easy_threshold: Annotated[float, Field(gt=-math.inf, allow_inf_nan=True)] = 0.9
    """Examples whose recent mean reward is at least this are easy; with `inf`, none."""
    hard_threshold: Annotated[float, Field(lt=math.inf, allow_inf_nan=True)] = 0.1
    """Examples whose recent mean reward is at most this are hard; with `-inf`, none."""
    easy_weight: Annotated[float, Field(ge=0)] = 0.2
    """Weight of easy examples in the draw, relative to the other pools; 0 leaves it out."""
    normal_weight: PositiveFloat = 1.0
    """Weight of examples that are neither easy nor hard, or were never seen: at 0, none would ever come."""
    hard_weight: Annotated[float, Field(ge=0)] = 0.5
    """Weight of hard examples; 0 leaves them out."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of what was known of an example; 0 looks at the newest group only."""


class Buffer(Section):
    """`[orchestrator.buffer]`: which examples come next, and which groups are worth a place in a batch."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all the same (no signal) and refill the batch."""
    use_difficulty_filtering: bool = False
    """Drop groups whose rewards vary less than `difficulty_threshold` and refill the batch."""
    difficulty_threshold: Annotated[float, Field(ge=0)] = 0.0
    """Least variance of the rewards within a group, with `use_difficulty_filtering`."""
    pools: DifficultyPools | None = None
    """Difficulty pools; every example comes equally often if not set."""
    shuffle: bool = True
    """A new seeded order of the examples each epoch; dataset order otherwise."""


class Stage(Section):
    """`[[orchestrator.curriculum]]`: from when on which environments are drawn from. Stages follow one another."""

    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight by environment name; environments that are not named get none."""
    from_step: PositiveInt | None = None
    """Begins with the batch of this step."""
    from_reward: float | None = None
    """Begins once the stage before has reached this mean reward (over `smoothing` batches, roughly)."""
    smoothing: PositiveInt = 10
    """Batches that the mean reward of a stage is taken over: an exponential mean with weight 1/smoothing."""


class Filters(Section):
    """`[orchestrator.filters]`: what happens to a rollout that is flawed.

    `count` only counts it; `mask` keeps its reward in the group and trains on none of its tokens; `drop` drops its
    whole group and refills the batch.
    """

    truncated: Literal["count", "mask", "drop"] = "count"
    """Rollouts that ran out of tokens or context; `mask` is the overlong filtering of DAPO."""
    repetition: Literal["count", "mask", "drop"] = "count"
    """Rollouts that repeat themselves without end."""
    repetition_window: PositiveInt = 128
    """This many tokens in a row, each equal to the one a unit before, are a repetition."""
    repetition_period: PositiveInt = 32
    """Longest unit of a repetition, in tokens."""
    gibberish: Literal["count", "mask", "drop"] = "count"
    """Rollouts whose tokens are so unlikely under the policy itself that sampling must have derailed."""
    gibberish_logprob: Annotated[float, Field(lt=0, allow_inf_nan=True)] = -8.0
    """Mean logprob over `gibberish_window` tokens below which they count as gibberish."""
    gibberish_window: PositiveInt = 32
    """Tokens that the mean is taken over."""
    zero_advantage: Literal["count", "mask"] = "count"
    """Rollouts whose advantage is exactly 0; masked, they no longer count in the loss's average."""


class LengthPenalty(Section):
    """`[orchestrator.length_penalty]`: taken off the reward before the advantage; see `trireme.algo.length_penalty`."""

    type: Literal["soft_overlong", "relative", "linear", "group_linear"] = "soft_overlong"
    """`soft_overlong`: from 0 to -1 over the last `buffer` tokens before `max_length` (DAPO); `relative`: within the
    group, short right answers above long ones (Kimi k1.5); `linear`: length / max_length; `group_linear`: shares of the
    group's longest, times its mean reward (prime-rl's `linear`)."""
    max_length: PositiveInt | None = None
    """Sampled tokens of a rollout at which the penalty is whole; `sampling.max_tokens` or `seq_len` if not set."""
    buffer: PositiveInt | None = None
    """Tokens over which `soft_overlong` grows; a fifth of `max_length` if not set."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """The penalty is multiplied by this; 0 takes nothing off."""
    num_output_tokens_weight: Annotated[float, Field(ge=0)] = 0.25
    """`group_linear`: weight of the sampled tokens."""
    num_input_tokens_weight: Annotated[float, Field(ge=0)] = 0.1
    """`group_linear`: weight of the other tokens, such as prompts and answers of tools."""
    num_turns_weight: Annotated[float, Field(ge=0)] = 0.1
    """`group_linear`: weight of the model's turns."""


class Advantage(Section):
    """`[orchestrator.advantage]`: see `trireme.algo.advantage` for formulas and sources."""

    model_config = ConfigDict(allow_inf_nan=True)  # `reward_clip` may be open to one side

    type: Literal[
        "group_mean",
        "group_mean_std",
        "leave_one_out",
        "max_rl",
        "hierarchical_grpo",
        "ema",
        "rae",
        "batch",
        "group_batch",
        "none",
        "custom",
    ] = "group_mean"
    """Baseline of a reward; `docs/algorithms.md` has the formula of each."""
    decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of a running mean that remains: of `ema` after a batch (0.9 if not set), of `rae` after a run of its agent
    (0.95)."""
    episode_agents: tuple[str, ...] = ()
    """Agents that `hierarchical_grpo` compares within one rollout, as `["solver"]`; the others within the group."""
    path: str | None = None
    """`module:function` or `file.py:function` of `custom`."""
    args: dict[str, Any] = {}
    """Keyword arguments of that function."""
    clip: PositiveFloat | None = None
    """Advantages are cut to plus or minus this; not at all if not set."""
    reward_clip: tuple[float, float] | None = None
    """Rewards are cut to this range before anything is computed from them; not at all if not set."""


class Teacher(Section):
    """`[orchestrator.teacher]`: on-policy distillation; see `trireme.algo.advantage.distillation_term`."""

    base_url: str | None = None
    """Address of the vLLM server of the teacher, which must have the same tokenizer; needed."""
    model: str | None = None
    """Its name there; the first that the server lists if not set."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Each token's advantage grows by weight * (log teacher - log policy); with 0 there is no teacher."""
    reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the advantage that comes from rewards; 0 learns from the teacher alone."""
    timeout_s: PositiveFloat = 120.0
    """Longest time of one answer; a request is retried twice."""
    max_concurrent: PositiveInt = 32
    """Requests to the teacher at once."""


class Source(Environment):
    """`[[orchestrator.env]]`: one source of tasks. A table of its own goes over the run's, key by key.

    If it has another `type` than the run's, it replaces the whole table: the keys of one kind mean nothing to another.
    """

    rollouts_per_example: PositiveInt | None = None
    """Rollouts of each of its examples; `orchestrator.rollouts_per_example` if not set."""
    sampling: Sampling | None = None
    buffer: Buffer | None = None
    filters: Filters | None = None
    length_penalty: LengthPenalty | None = None
    advantage: Advantage | None = None
    teacher: Teacher | None = None
    loss: Loss | None = None


SOURCE_TABLES = ("sampling", "buffer", "filters", "length_penalty", "advantage", "teacher")
"""Tables of `[orchestrator]` that a source may have too. Its `loss` goes over `[trainer.loss]`."""


class EvaluatedEnvironment(Environment):
    """`[[orchestrator.eval.env]]`: an environment to evaluate. Its keys go over those of `[orchestrator.eval]`."""

    interval: PositiveInt | None = None
    """Evaluate it every this many versions, with `none` only first and last; as `orchestrator.eval.interval` if not
    set."""
    rollouts_per_example: PositiveInt = 1
    """Completions of each of its examples; as `orchestrator.eval.rollouts_per_example` if not set."""
    num_examples: PositiveInt | None = None
    """Its first examples, all with `none`; as `orchestrator.eval.num_examples` if not set."""
    eval_base: bool = True
    """Evaluate version 0 too; as `orchestrator.eval.eval_base` if not set."""
    sampling: Sampling | None = None


EVALUATION_KEYS = ("interval", "rollouts_per_example", "num_examples", "eval_base")
"""Keys of `[orchestrator.eval]` that its environments may have too, besides `sampling`."""


class Evaluation(Section):
    """`[orchestrator.eval]`: the policy on examples that it is not trained on."""

    interval: PositiveInt | None = None
    """Evaluate every this many versions; only before the first and after the last step if not set."""
    rollouts_per_example: PositiveInt = 1
    """Completions per example; the mean over all is reported."""
    num_examples: PositiveInt | None = 100
    """Examples per environment; all if not set."""
    eval_base: bool = True
    """Evaluate version 0 too, before the first step."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for pass@k; powers of two up to `rollouts_per_example` if not set."""
    pass_threshold: float = 1.0
    """A rollout with at least this reward has passed."""
    max_concurrent: PositiveInt | None = None
    """Evaluation rollouts under way at once; a quarter of `orchestrator.max_concurrent` if not set."""
    sampling: Sampling = Sampling(temperature=0.0)
    """Sampling for evaluation; greedy if not set. `max_tokens` and `chat_template_kwargs` fall back to the training
    values."""
    env: tuple[EvaluatedEnvironment, ...] = ()
    """Environments to evaluate; the training ones (their evaluation split) if not set."""

    def of(self, environment: str) -> Evaluation:
        """Return the evaluation of one environment: with the keys of its own table, if it has one, over these."""
        own = next((each for each in self.env if each.resolved_name == environment), None)
        if own is None:
            return self
        given = {key: getattr(own, key) for key in EVALUATION_KEYS if key in own.model_fields_set}
        return self.model_copy(update=given | {"sampling": merged(self.sampling, own.sampling)})


class StatusServer(Section):
    """`[orchestrator.server]`: HTTP with `/health`, `/status`, `/metrics` (Prometheus)."""

    host: str = "127.0.0.1"
    """Address to bind; loopback if not set."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port; `rl` finds a free one if not set, `orchestrator` alone takes 8001."""


class OrchestratorConfig(Section):
    """`[orchestrator]`."""

    batch_size: PositiveInt = 128
    """Rollouts per training step. Sources with groups of different sizes fill it with whole groups until there are at
    least as many."""
    rollouts_per_example: PositiveInt = 16
    """Rollouts per example (the group); must divide `batch_size` if all sources have groups of one size."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups under way per batch, as a multiple of the batch; above 1 hides the slowest rollouts."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """A rollout with a token sampled longer ago than this many versions is dropped, and replaced."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """Turns of a rollout as one sample, or one sample each. With the first, chat templates that always rewrite earlier
    turns are refused."""
    max_concurrent: PositiveInt = 1024
    """Requests under way at once in all engines."""
    max_rollout_attempts: PositiveInt = 3
    """A rollout that fails is tried this often; then its group is dropped, with the reason."""
    sampling: Sampling = Sampling()
    buffer: Buffer = Buffer()
    curriculum: tuple[Stage, ...] = ()
    filters: Filters = Filters()
    length_penalty: LengthPenalty | None = None
    advantage: Advantage = Advantage()
    teacher: Teacher | None = None
    env: tuple[Source, ...] = ()
    eval: Evaluation | None = None
    server: StatusServer = StatusServer()
    engine_timeout_s: PositiveFloat = 600.0
    """Longest time that an engine may take to answer one request. A model turn may take as long as any
    `rollout_timeout_s`."""
    trainer_timeout_s: PositiveFloat = 3600.0
    """Longest time that the orchestrator waits for the trainer; evaluations and full disks do not count."""
    env_vars: EnvVars = {}
    """Environment variables of the orchestrator and of the workers of environments, over the run's `env_vars`."""

    def of(self, environment: str) -> OrchestratorConfig:
        """Return these settings as rollouts of one source have them; the run's own for an unknown name."""
        source = next((each for each in self.env if each.resolved_name == environment), None)
        tables = {name: merged(getattr(self, name), getattr(source, name, None)) for name in SOURCE_TABLES}

        # A source without a teacher, in a run that has one, gives it no weight.
        if tables["teacher"] is not None and not tables["teacher"].weight:
            tables["teacher"] = None
        size = getattr(source, "rollouts_per_example", None) or self.rollouts_per_example
        return self.model_copy(update={**tables, "rollouts_per_example": size})

    @property
    def sources(self) -> dict[str, OrchestratorConfig]:
        """The settings of each source, by its name."""
        return {each.resolved_name: self.of(each.resolved_name) for each in self.env}

    @property
    def all_environments(self) -> tuple[Environment, ...]:
        """The environments of training, then those of evaluation."""
        return (*self.env, *(self.eval.env if self.eval else ()))

    @property
    def request_timeout_s(self) -> float:
        """The longest time that a request to an engine may take."""
        return max([self.engine_timeout_s, *(env.rollout_timeout_s for env in self.all_environments)])


# Rules of these tables. Each yields one message per problem.

NEEDS_SIBLINGS = {"group_mean", "group_mean_std", "leave_one_out", "max_rl", "group_batch"}
"""Advantages that compare a rollout with others of its group."""

OTHER_NAMES = {"max_completion_tokens": "max_tokens"}
"""Names of sampling parameters in the APIs of vendors, and ours."""

_ANSWER_FORMAT = {"n", "logprobs", "prompt_logprobs", "detokenize", "output_kind", "flat_logprobs"}
"""Sampling parameters that decide the form of an answer, which the orchestrator must be able to read."""


def orchestrator_problems(config: OrchestratorConfig, *, longest: int) -> Iterator[str]:
    """Yield what is wrong with `[orchestrator]`.

    Args:
        longest: tokens of the longest rollout, for tables that do not give their own.
    """
    if not config.env:
        yield (
            "no environment is configured, so there is nothing to learn - expected at least one. "
            'Add to the file:\n    [[orchestrator.env]]\n    id = "reverse-text"'
        )

    # Each environment writes files under its name, so no two names may give the same file.
    evaluated = config.eval.env if config.eval else ()
    by_file: dict[str, list[str]] = defaultdict(list)
    for table, environments, prefix in (("env", config.env, ""), ("eval.env", evaluated, "eval-")):
        for environment in environments:
            yield from _agent_problems(environment, f"orchestrator.{table}.agent")
            by_file[prefix + environment.file_name].append(f'"{environment.resolved_name}" of `orchestrator.{table}`')
    for file, names in by_file.items():
        if len(names) > 1:
            yield (
                f"the environments {' and '.join(names)} have files of one name, {file} (from `name`, or the last part "
                "of `id`) - expected names that differ, also where blanks and signs become `_` and files of "
                "evaluations begin with `eval-`. Give each table a `name` of its own."
            )

    yield from _group_problems(config)

    # The tables below this one, as each source has them.
    yield from _curriculum_problems(config)
    views = config.sources or {"": config}
    found: dict[str, list[str]] = defaultdict(list)
    for name, view in views.items():
        for problem in _table_problems(view, longest=view.sampling.max_tokens or longest):
            found[problem].append(name)
    for problem, names in found.items():
        of = ", ".join(f'"{name}"' for name in names)
        yield (
            problem
            if len(names) == len(views)
            else f"with the tables of its own, `[[orchestrator.env]]` {of}: {problem}"
        )

    for table, sampling in samplings(config):
        yield from sampling_problems(table, sampling)
    for table, kwargs in environment_template_kwargs(config):
        yield from template_problems(table, {"chat_template_kwargs": kwargs})
    if config.eval:
        views_of_eval = [config.eval.of(each.resolved_name) for each in config.eval.env] or [config.eval]
        yield from dict.fromkeys(
            problem for view in views_of_eval for problem in evaluation_problems(view, "orchestrator.eval.")
        )
        # Evaluation and training share the engines' slots.
        if config.eval.max_concurrent is not None and config.eval.max_concurrent >= config.max_concurrent:
            yield (
                f"orchestrator.eval.max_concurrent = {config.eval.max_concurrent}, orchestrator.max_concurrent = "
                f"{config.max_concurrent} - expected fewer, or training would get no slot while an evaluation runs. "
                f"Set `eval.max_concurrent` below {config.max_concurrent}, or leave it out for a quarter of that."
            )


def _group_problems(config: OrchestratorConfig) -> Iterator[str]:
    """Yield why whole groups cannot fill a batch."""
    batch, sizes = config.batch_size, {name: own.rollouts_per_example for name, own in config.sources.items()}
    group = next(iter(sizes.values()), config.rollouts_per_example)

    # Groups of one size fill a batch to the rollout. Of different sizes, the last one may be more than was missing.
    if len(set(sizes.values())) > 1:
        for name, size in sizes.items():
            if size > batch:
                yield (
                    f"orchestrator.batch_size = {batch} with groups of {size} rollouts of environment {name!r} "
                    f"(`rollouts_per_example`) - expected room for one of its groups. Set `orchestrator.batch_size` to "
                    f"{size} or more, or lower its `rollouts_per_example`."
                )
    elif batch % group:
        below, above = batch // group * group, (batch // group + 1) * group
        choices = f"{below} or {above}" if below else f"{above}"
        yield (
            f"batch_size must be divisible by rollouts_per_example: {batch} % {group} = {batch % group} - expected 0. "
            f"Set `orchestrator.batch_size` to {choices}, or `orchestrator.rollouts_per_example` to one of "
            f"{', '.join(map(str, nearest_divisors(batch, group)))}."
        )


def _table_problems(config: OrchestratorConfig, *, longest: int) -> Iterator[str]:
    """Yield what is wrong with the tables that a source may have too."""
    yield from _buffer_problems(config.buffer)
    yield from _advantage_problems(config)
    if config.teacher is not None and not config.teacher.base_url:
        yield (
            "`[orchestrator.teacher]` without `base_url` - expected the address of its vLLM server. Add "
            '`base_url = "http://127.0.0.1:8100/v1"`, or remove the table (`weight = 0` for one source).'
        )

    # The penalty begins `buffer` tokens before the limit, which must not be below 0.
    penalty = config.length_penalty
    if penalty and penalty.buffer and penalty.buffer > (longest := penalty.max_length or longest):
        yield (
            f"orchestrator.length_penalty.buffer = {penalty.buffer}, max_length = {longest} - expected no more, "
            "or even an empty answer would be punished. Lower `buffer`."
        )


OF_PROGRAMS = ("command", "env", "inherit", "workdir", "stdin", "runtime", "readable", "network", "timeout_s")
"""Keys of `[orchestrator.env.agent]` that say how a program is run."""


def _agent_problems(environment: Environment, table: str) -> Iterator[str]:
    agent, limit_s = environment.agent, environment.rollout_timeout_s
    of = f"of environment {environment.resolved_name!r}"
    if agent is None:
        return

    # A program that the orchestrator starts must be named, and must end before its rollout is dropped.
    if not agent.external and not agent.command:
        yield (
            f"{table} {of} has no `command` - expected a program that plays the rollouts. Add `command`, or "
            "`external = true` and a `port` for clients of your own harness."
        )
    if not agent.external and agent.timeout_s >= limit_s:
        yield (
            f"{table}.timeout_s = {agent.timeout_s:g} with `rollout_timeout_s = {limit_s:g}` {of} - expected less: the "
            "rollout would be dropped before the program is ended and scored. Lower the first, or raise the second."
        )

    # The user's own clients play the rollouts, so no program is started and keys about one have no effect.
    given = [name for name in OF_PROGRAMS if getattr(agent, name) != Agent.model_fields[name].default]
    if agent.external and given:
        yield (
            f"{table} {of} has `external = true` and a `{given[0]}` ({getattr(agent, given[0])!r}) - expected none, as "
            "Trireme starts no program where clients of your own play the rollouts. Remove one."
        )
    if agent.external and not agent.port:
        yield (
            f"{table} {of} has `external = true` and no `port` - expected a fixed one, as your clients must find the "
            "gateway again after a restart. Add `port = 8090`, or another that is free."
        )


def nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - near))[:2])


def samplings(config: OrchestratorConfig) -> Iterator[tuple[str, Sampling]]:
    """Yield each sampling table with its name; those of sources as they are over the run's."""
    yield "orchestrator.sampling", config.sampling
    for each in config.env:
        if each.sampling is not None:
            yield f'orchestrator.env["{each.resolved_name}"].sampling', config.of(each.resolved_name).sampling
    if config.eval:
        yield "orchestrator.eval.sampling", config.eval.sampling
        for one in config.eval.env:
            if one.sampling is not None:
                yield (
                    f'orchestrator.eval.env["{one.resolved_name}"].sampling',
                    config.eval.of(one.resolved_name).sampling,
                )


def _curriculum_problems(config: OrchestratorConfig) -> Iterator[str]:
    table, names = "`[[orchestrator.curriculum]]`", {entry.resolved_name for entry in config.env}
    for number, stage in enumerate(config.curriculum):
        what = f"stage {number} of {table} (counted from 0)"
        conditions = {"from_step": stage.from_step, "from_reward": stage.from_reward}
        given = [f"`{key} = {value}`" for key, value in conditions.items() if value is not None]

        # The first stage begins with the run; each later one has exactly one condition.
        if len(given) != min(number, 1):
            expected = "one of the two" if number else "none of the two, as the first stage begins with the run"
            yield (
                f"{what} has {' and '.join(given) or 'neither `from_step` nor `from_reward`'} - expected {expected}. "
                f"{'Remove' if given else 'Add'} one."
            )

        if unknown := sorted(stage.weights.keys() - names):
            yield (
                f"{what} gives a weight to {', '.join(unknown)} - expected names of `[[orchestrator.env]]`: "
                f"{', '.join(sorted(names)) or 'none is configured'}. Correct the name, or add that environment."
            )
        if not any(weight > 0 for name, weight in stage.weights.items() if name in names):
            yield f"{what} gives no environment any weight ({stage.weights}) - expected one above 0. Give one."

    # Stages follow one another, so a later one with an earlier step would never begin in time.
    steps = [stage.from_step for stage in config.curriculum if stage.from_step is not None]
    for one, other in pairwise(steps):
        if other <= one:
            yield (
                f"{table}: a stage from step {one} is followed by one from step {other} - expected later ones to "
                "begin later. Put them in order."
            )


def _buffer_problems(buffer: Buffer) -> Iterator[str]:
    pools = buffer.pools
    if pools and pools.easy_threshold <= pools.hard_threshold:
        yield (
            f"orchestrator.buffer.pools: easy_threshold = {pools.easy_threshold}, hard_threshold = "
            f"{pools.hard_threshold} - expected the first to be higher, or an example would be both. Exchange them."
        )
    if buffer.use_difficulty_filtering != (buffer.difficulty_threshold > 0):
        has = "with" if buffer.use_difficulty_filtering else "without"
        yield (
            f"orchestrator.buffer.difficulty_threshold = {buffer.difficulty_threshold:g} {has} "
            "`use_difficulty_filtering` - expected both, as either has no effect alone. Set the least variance that a "
            "group's rewards must have (`difficulty_threshold = 0.01`, say) and `use_difficulty_filtering = true`, or "
            "use `online_difficulty_filtering`, which only drops groups whose rewards are all equal."
        )


def _advantage_problems(config: OrchestratorConfig) -> Iterator[str]:
    advantage = config.advantage

    # A group of one has no sibling to be compared with, unless a teacher gives the advantages.
    if config.rollouts_per_example == 1 and advantage.type in NEEDS_SIBLINGS and config.teacher is None:
        yield (
            f'orchestrator.advantage.type = "{advantage.type}" with orchestrator.rollouts_per_example = 1 - expected '
            "at least 2 rollouts to compare with one another. Raise `rollouts_per_example`, or take "
            '`advantage.type = "batch"`, "ema" or "none".'
        )

    # Keys that belong to one type.
    if (advantage.type == "custom") != bool(advantage.path):
        has = f'with `path = "{advantage.path}"`' if advantage.path else "without `path`"
        yield (
            f'orchestrator.advantage.type = "{advantage.type}" {has} - expected `type = "custom"` and the path of its '
            'function, or neither. Add `path = "file.py:function"`, or remove the one that is there.'
        )
    if (advantage.type == "hierarchical_grpo") != bool(advantage.episode_agents):
        yield (
            f'orchestrator.advantage.type = "{advantage.type}" with episode_agents = '
            f'{list(advantage.episode_agents)} - expected `type = "hierarchical_grpo"` and the agents that are '
            'compared within one rollout, or neither. Add `episode_agents = ["solver"]`, or remove the line.'
        )

    clip = advantage.reward_clip
    if clip is not None and not clip[0] < clip[1]:  # NaN too
        yield f"orchestrator.advantage.reward_clip = {list(clip)} - expected the lower end first. Exchange them."


def environment_template_kwargs(config: OrchestratorConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variables of the chat template that environments' tables give, with the names of their keys."""
    for table, environments in (("env", config.env), ("eval.env", config.eval.env if config.eval else ())):
        for each in environments:
            key = f"`orchestrator.{table}` {each.resolved_name!r}"
            yield key, each.chat_template_kwargs


def sampling_problems(table: str, sampling: Sampling) -> Iterator[str]:
    """Yield what an engine of ours could not do with a table of sampling parameters."""
    known, own = sampling_names(), set(Sampling.model_fields) - {"extra_body"}
    is_given_once = not (sampling.chat_template_kwargs and "chat_template_kwargs" in sampling.extra_body)
    yield from template_problems(table, sampling.template_request)

    for key in sorted(sampling.extra_body):
        if key in OF_TEMPLATE and is_given_once:
            continue
        if key in own:
            # vLLM would silently take one of the two.
            yield (
                f"Duplicate sampling parameters: `{key}` is a key of `{table}` ({getattr(sampling, key)}) and "
                f"of its `extra_body` too ({sampling.extra_body[key]}) - expected it once. "
                f"Set `{table}.{key}` and remove it from `extra_body`."
            )
        elif key in _ANSWER_FORMAT:
            yield (
                f"{table}.extra_body.{key} - expected parameters that decide what is sampled: this one decides the "
                "form of the engine's answer, in which the orchestrator reads tokens, logprobs and versions. Remove it."
            )
        elif known and key not in known:
            # A key of the answer's form would be refused in turn, so it is never suggested.
            names = {name: name for name in {*known, *own, *OF_TEMPLATE} - _ANSWER_FORMAT} | OTHER_NAMES
            near = get_close_matches(key, names, n=1, cutoff=0.6)
            advice = f"Did you mean `{names[near[0]]}`?" if near else _AS_TEMPLATE.format(key=key)
            yield f"{table}.extra_body.{key} - expected a parameter of vLLM's SamplingParams. {advice}"

    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        least, most = sampling.min_tokens, sampling.max_tokens
        yield f"{table}.min_tokens = {least}, max_tokens = {most} - expected at most as many. Lower `min_tokens`."


_AS_TEMPLATE = "Remove it; a variable of the chat template belongs into `chat_template_kwargs = {{ {key} = … }}`."


def template_problems(table: str, request: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a table gives the chat template what no template could take."""
    try:
        template_kwargs_of(request)
    except ValueError as error:
        yield f"{table}: {error}. Correct it."


def evaluation_problems(evaluation: Evaluation, above: str = "") -> Iterator[str]:
    """Yield what an evaluation, in a run or outside one, would measure wrongly or for nothing.

    Args:
        above: the table that has its keys, with a dot, for messages.
    """
    rollouts, ks = evaluation.rollouts_per_example, evaluation.pass_at
    if too_large := [k for k in ks if k > rollouts]:
        yield (
            f"{above}pass_at = {list(ks)}, {above}rollouts_per_example = {rollouts} - pass@{too_large[0]} takes at "
            f"least {too_large[0]} rollouts of each example, better twice as many. Set `rollouts_per_example` to "
            f"{max(too_large)} or more, or leave {too_large} out of `pass_at`."
        )
    if len(set(ks)) < len(ks):
        yield f"{above}pass_at = {list(ks)} names a k twice - expected each once. Remove the second."

    if rollouts > 1 and evaluation.sampling.temperature == 0:
        yield (
            f"{above}rollouts_per_example = {rollouts} with {above}sampling.temperature = 0 - expected a temperature "
            "above 0: greedy rollouts of an example would all be the same. Set "
            f"`[{above}sampling]` `temperature = 1.0` (the policy as it is trained), or `rollouts_per_example = 1`."
        )


_REWEIGHT = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
_FORBID = ("min_tokens", "bad_words", "allowed_token_ids", "structured_outputs")
_NEUTRAL = {"repetition_penalty": 1.0}  # 0 or empty for the others


def distorting(given: Mapping[str, Any], *, cut: bool) -> list[str]:
    """Return the arguments by which the engine samples from another distribution than the trainer can compute.

    Args:
        cut: whether the sampler chooses among a part of the vocabulary; tokens that are forbidden are then not in it.
    """
    names = _REWEIGHT if cut else _REWEIGHT + _FORBID
    return [name for name in names if given.get(name) and given[name] != _NEUTRAL.get(name)]


def sampling_notes(config: OrchestratorConfig) -> list[str]:
    """Return what is allowed and worth knowing, one sentence each, for a dry run and the start of a run."""
    views = (config.sources or {"": config}).values()
    return list(dict.fromkeys(note for view in views for note in _notes_of(view.sampling)))


def _notes_of(sampling: Sampling) -> list[str]:
    given = sampling.model_dump(exclude={"extra_body"}, exclude_defaults=True) | sampling.extra_body
    notes = []
    if biased := distorting(given, cut=sampling.cuts):
        notes.append(
            f"orchestrator.sampling: {', '.join(biased)} make the engine sample from another distribution than the "
            "trainer can compute, so importance ratios are off by it - leave them out, unless that is meant."
        )
    if sampling.cuts and (sampling.top_k or 0) <= 0:
        notes.append(
            f"orchestrator.sampling: top_p or min_p without top_k - at most the {MOST_KEPT} likeliest tokens are "
            "chosen from, so that the trainer can be told which they were. Set `top_k` for another number."
        )
    return notes
