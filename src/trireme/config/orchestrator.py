"""`[orchestrator]`: what is rolled out, how it is scored, and how rollouts become batches."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from trireme.config.losses import Loss
from trireme.config.sampling import Sampling
from trireme.config.section import NONE, EnvVars, Section, merged


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
    advantage_range: tuple[float, float] | None = None
    """Drop groups whose tokens all have advantages within this range, as `[-0.05, 0.05]`, and refill the batch."""
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
    """`[orchestrator.teacher]`: distillation. The teacher judges the policy's tokens, see
    `algo.advantage.distillation_term`, or samples what the policy is trained on."""

    base_url: str | None = None
    """Address of the vLLM server of the teacher, which must have the same tokenizer; needed without
    `demonstration`."""
    model: str | None = None
    """Its name there; the first that the server lists if not set."""
    samples: bool = False
    """The teacher samples the rollouts, and cross-entropy trains the policy on its tokens (prime-rl's `sft`)."""
    demonstration: str | None = None
    """The policy judges itself, after it was shown this field of the example: `answer`, or another one
    (prime-rl's `opsd`)."""
    template: str = "An expert has answered this:\n{demonstration}"
    """Content of the system message that shows it."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Each token's advantage grows by weight * (log teacher - log policy); with `samples`, weight of its tokens in the
    loss. With 0 there is no teacher."""
    reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the advantage that comes from rewards; 0 learns from the teacher alone."""
    timeout_s: PositiveFloat = 120.0
    """Longest time of one answer; a request is retried twice."""
    max_concurrent: PositiveInt = 32
    """Requests to the teacher at once."""


class Echo(Section):
    """`[orchestrator.echo]`: weights, in a cross-entropy loss, of what others said after the policy's first turn.

    Only the contents of messages have one: prime-rl's `echo`, whose weight of `tool` is 0.1.
    """

    tool: Annotated[float, Field(ge=0)] = 0.0
    """Answers of tools."""
    user: Annotated[float, Field(ge=0)] = 0.0
    """Later messages of the user."""
    system: Annotated[float, Field(ge=0)] = 0.0
    """Later messages of the system."""
    assistant: Annotated[float, Field(ge=0)] = 0.0
    """Turns of the assistant that the environment wrote."""

    @property
    def roles(self) -> dict[str, float]:
        """The roles with a weight."""
        return {role: weight for role, weight in self.model_dump().items() if weight > 0}


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
    echo: Echo | None = None
    loss: Loss | None = None


SOURCE_TABLES = ("sampling", "buffer", "filters", "length_penalty", "advantage", "teacher", "echo")
"""Tables of `[orchestrator]` that a source may have too. Its `loss` goes over `[trainer.loss]`."""


class MeasuredEnvironment(Environment):
    """An environment of any evaluation. Its keys go over those of the table around it."""

    rollouts_per_example: PositiveInt = 1
    """Completions of each of its examples; as that of all its environments if not set."""
    num_examples: PositiveInt | None = None
    """Its first examples, all with `none`; as that of all its environments if not set."""
    sampling: Sampling | None = None


class EvaluatedEnvironment(MeasuredEnvironment):
    """`[[orchestrator.eval.env]]`: an environment to evaluate. Its keys go over those of `[orchestrator.eval]`."""

    interval: PositiveInt | None = None
    """Evaluate it every this many versions, with `none` only first and last; as `orchestrator.eval.interval` if not
    set."""
    eval_base: bool = True
    """Evaluate version 0 too; as `orchestrator.eval.eval_base` if not set."""


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

    batch_size: PositiveInt | None = 128
    """Rollouts per training step. Sources with groups of different sizes fill it with whole groups until there are at
    least as many."""
    token_batch_size: PositiveInt | None = None
    """Tokens per training step, prompts included, instead of `batch_size`: whole groups fill it until there are at
    least as many."""
    rollouts_per_example: PositiveInt = 16
    """Rollouts per example (the group); must divide `batch_size` if all sources have groups of one size."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.5
    """Rollouts kept under way until a batch is full, as a multiple of it, once the trainer has had to wait. Later
    batches take what is over; if `max_off_policy_steps` is at most `max_async_level` + 1, none are kept."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """A rollout with a token sampled longer ago than this many versions is dropped, and replaced."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """Turns of a rollout as one sample, or one sample each. With the first, chat templates that always rewrite earlier
    turns are refused."""
    max_concurrent: PositiveInt = 1024
    """Most requests under way at once in all engines. Fewer are if their KV caches do not hold as many rollouts."""
    max_rollout_attempts: PositiveInt = 3
    """A rollout that fails is tried this often; then its group is dropped, with the reason."""
    sampling: Sampling = Sampling()
    buffer: Buffer = Buffer()
    curriculum: tuple[Stage, ...] = ()
    filters: Filters = Filters()
    length_penalty: LengthPenalty | None = None
    advantage: Advantage = Advantage()
    teacher: Teacher | None = None
    echo: Echo | None = None
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
        if tables["echo"] is not None and not tables["echo"].roles:
            tables["echo"] = None
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

    @model_validator(mode="before")
    @classmethod
    def _has_one_size(cls, values: Any) -> Any:
        is_in_tokens = isinstance(values, dict) and values.get("token_batch_size", NONE) not in (None, NONE)
        return {"batch_size": None, **values} if is_in_tokens else values

    @property
    def batch_in_words(self) -> str:
        """
        Example:
            "128 rollouts", "65,536 tokens"
        """
        return f"{self.token_batch_size:,} tokens" if self.token_batch_size else f"{self.batch_size:,} rollouts"

    def num_rollouts(self, length: float) -> int:
        """Return the rollouts of a batch, if each has `length` tokens."""
        assert self.batch_size or self.token_batch_size, "rules ask for one of the two"
        return self.batch_size or math.ceil((self.token_batch_size or 0) / length)

    @property
    def request_timeout_s(self) -> float:
        """The longest time that a request to an engine may take."""
        return max([self.engine_timeout_s, *(env.rollout_timeout_s for env in self.all_environments)])
