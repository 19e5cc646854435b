"""`[orchestrator]`: what is rolled out, how it is scored, and how rollouts become batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.section import Section


class Sampling(Section):
    """`[orchestrator.sampling]`: one request to the engine."""

    max_tokens: PositiveInt | None = None
    """Most tokens per model turn (not per rollout); up to the context where not given."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; the trainer's logprobs are taken at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the behaviour logprobs are those of the cut distribution."""
    top_k: int | None = None
    """Sample from this many most likely tokens only; all where not given."""
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
    """Makes a turn repeatable: with the group, the place in it and the turn it decides the engine's seed."""
    extra_body: dict[str, Any] = {}
    """More sampling parameters of vLLM, by its own names; none that is named above."""

    @property
    def cuts(self) -> bool:
        """Whether the sampler chooses among a part of the vocabulary only."""
        return self.top_p < 1 or self.min_p > 0 or (self.top_k or 0) > 0

    @property
    def most_kept(self) -> int:
        """The number of tokens that a cut sampler may choose from."""
        return max(MOST_KEPT, self.top_k or 0)


MOST_KEPT = 64
"""The `top_k` of requests whose `top_p` or `min_p` cut while no `top_k` is given.

A token's logprob under a cut sampler is its logprob among the tokens that were kept, so the trainer must know which
those were. Engines say so through the logprobs of the likeliest tokens: those that were left out have none. That needs
a limit on how many are kept.
"""


def slots_for(top_k: int) -> int:
    """Return how many of the likeliest tokens to ask for: more than `top_k`, as tokens that tie for its last place are
    all kept."""
    return top_k + top_k // 4 + 8


class Environment(Section):
    """`[[orchestrator.env]]`: one source of tasks."""

    id: str
    """Name of the environment's package (in `environments/` or installed), or path of a .py file."""
    name: str | None = None
    """Name in metrics; the id where not given."""
    args: dict[str, Any] = {}
    """Keyword arguments of its `load_environment`."""
    weight: PositiveFloat = 1.0
    """Share of the examples of a batch, relative to the other environments'."""
    num_workers: PositiveInt = 1
    """Worker processes that run it."""
    max_concurrent: PositiveInt = 512
    """Rollouts under way at once in all its workers."""
    rollout_timeout_s: PositiveFloat = 600.0
    """A rollout that takes longer is dropped, with its reason."""
    max_turns: PositiveInt | None = None
    """Model turns per rollout; the environment's own limit where not given."""
    max_memory_gib: PositiveFloat | None = None
    """A worker whose processes hold more than this is restarted; no limit where not given."""


class DifficultyPools(Section):
    """`[orchestrator.buffer.pools]`: how often an example comes, by how well its last groups did."""

    easy_threshold: float = 0.9
    """Examples whose recent mean reward is at least this are easy."""
    hard_threshold: float = 0.1
    """Examples whose recent mean reward is at most this are hard."""
    easy_weight: Annotated[float, Field(ge=0)] = 0.2
    """How often an easy example comes, relative to the other pools; 0 leaves it out."""
    normal_weight: Annotated[float, Field(ge=0)] = 1.0
    """How often an example comes that is neither, or was never seen."""
    hard_weight: Annotated[float, Field(ge=0)] = 0.5
    """How often a hard example comes; 0 leaves it out."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of what was known of an example when a new group of it is in; 0 looks at the newest group only."""


class Buffer(Section):
    """`[orchestrator.buffer]`: which examples come next, and which groups are worth a place in a batch."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all the same (no signal) and refill the batch."""
    use_difficulty_filtering: bool = False
    """Drop groups whose rewards vary less than `difficulty_threshold` and refill the batch."""
    difficulty_threshold: Annotated[float, Field(ge=0)] = 0.0
    """Least variance of the rewards within a group, with `use_difficulty_filtering`."""
    pools: DifficultyPools | None = None
    """Difficulty pools; every example comes equally often where not given."""
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
    """So many tokens in a row that each are what stood one unit before them are a repetition."""
    repetition_period: PositiveInt = 32
    """Longest unit of a repetition, in tokens."""
    gibberish: Literal["count", "mask", "drop"] = "count"
    """Rollouts whose tokens are so unlikely under the policy itself that sampling must have derailed."""
    gibberish_logprob: Annotated[float, Field(lt=0)] = -8.0
    """Mean logprob over `gibberish_window` tokens below which they count as gibberish."""
    gibberish_window: PositiveInt = 32
    """Tokens that the mean is taken over."""
    zero_advantage: Literal["count", "mask"] = "count"
    """Rollouts whose advantage is exactly 0; masked, they no longer count in the loss's average."""


class LengthPenalty(Section):
    """`[orchestrator.length_penalty]`: taken off the reward before the advantage; see `trireme.algo.length_penalty`."""

    type: Literal["soft_overlong", "relative", "linear"] = "soft_overlong"
    """`soft_overlong`: from 0 to -1 over the last `buffer` tokens before `max_length` (DAPO); `relative`: within the
    group, short right answers above long ones (Kimi k1.5); `linear`: length / max_length."""
    max_length: PositiveInt | None = None
    """Sampled tokens of a rollout at which the penalty is whole; `sampling.max_tokens` or `seq_len` where not given."""
    buffer: PositiveInt | None = None
    """Tokens over which `soft_overlong` grows; a fifth of `max_length` where not given."""
    weight: PositiveFloat = 1.0
    """The penalty is multiplied by this."""


class Advantage(Section):
    """`[orchestrator.advantage]`: see `trireme.algo.advantage` for formulas and sources."""

    type: Literal[
        "group_mean", "group_mean_std", "leave_one_out", "max_rl", "ema", "batch", "group_batch", "none", "custom"
    ] = "group_mean"
    """What a reward is compared with: its group's mean (also divided by its deviation, or by itself: `max_rl`), the
    other rollouts of the group, a running mean, the whole batch (REINFORCE++), nothing, or a function of yours."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """How much of the running mean of `ema` a batch leaves in place."""
    path: str | None = None
    """`module:function` or `file.py:function` of `custom`."""
    args: dict[str, Any] = {}
    """Keyword arguments of that function."""
    clip: PositiveFloat | None = None
    """Advantages are cut to plus or minus this; not at all where not given."""
    reward_clip: tuple[float, float] | None = None
    """Rewards are cut to this range before anything is computed from them; not at all where not given."""


class Teacher(Section):
    """`[orchestrator.teacher]`: on-policy distillation; see `trireme.algo.advantage.distillation_term`."""

    base_url: str
    """Where the teacher is served (vLLM); it must have the same tokenizer."""
    model: str | None = None
    """Its name there; the first that the server lists where not given."""
    weight: PositiveFloat = 1.0
    """Each token's advantage grows by weight * (log teacher - log policy)."""
    reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """What comes from rewards is multiplied by this before; 0 learns from the teacher alone."""
    timeout_s: PositiveFloat = 120.0
    """How long one answer may take; it is asked again twice."""
    max_concurrent: PositiveInt = 32
    """Requests to the teacher at once."""


class Evaluation(Section):
    """`[orchestrator.eval]`: the policy on examples that it is not trained on."""

    interval: PositiveInt | None = None
    """Evaluate every this many versions; only before the first and after the last step where not given."""
    rollouts_per_example: PositiveInt = 1
    """Completions per example; the mean over all is reported."""
    num_examples: PositiveInt | None = 100
    """Examples per environment; all where not given."""
    eval_base: bool = True
    """Evaluate version 0 too, before the first step."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for pass@k; powers of two up to `rollouts_per_example` where not given."""
    pass_threshold: float = 1.0
    """A rollout with at least this reward has passed."""
    max_concurrent: PositiveInt | None = None
    """Evaluation rollouts under way at once; a quarter of `orchestrator.max_concurrent` where not given, so that
    training goes on meanwhile."""
    sampling: Sampling = Sampling(temperature=0.0)
    """Sampling for evaluation; greedy where not given. `max_tokens` falls back to the training value."""
    env: tuple[Environment, ...] = ()
    """Environments to evaluate; the training ones (their evaluation split) where not given."""


class StatusServer(Section):
    """`[orchestrator.server]`: HTTP with `/health`, `/status`, `/metrics` (Prometheus)."""

    host: str = "127.0.0.1"
    """Address to bind; loopback where not given."""
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port; `rl` finds a free one where not given, `orchestrator` alone takes 8001."""


class OrchestratorConfig(Section):
    """`[orchestrator]`."""

    batch_size: PositiveInt = 128
    """Rollouts per training step."""
    rollouts_per_example: PositiveInt = 16
    """Rollouts per example (the group); must divide `batch_size`."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups under way per batch, as a multiple of the batch; above 1 hides the slowest rollouts."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """A rollout with a token sampled longer ago than this many versions is dropped, and replaced."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """Turns of a rollout as one sample (chat templates that rewrite earlier turns are refused), or one sample each."""
    max_concurrent: PositiveInt = 1024
    """Requests under way at once in all engines."""
    max_rollout_attempts: PositiveInt = 3
    """A rollout that fails is tried this often; then its group is dropped, with the reason."""
    sampling: Sampling = Sampling()
    env: tuple[Environment, ...] = ()
    buffer: Buffer = Buffer()
    curriculum: tuple[Stage, ...] = ()
    filters: Filters = Filters()
    length_penalty: LengthPenalty | None = None
    advantage: Advantage = Advantage()
    teacher: Teacher | None = None
    eval: Evaluation | None = None
    server: StatusServer = StatusServer()
    engine_timeout_s: PositiveFloat = 600.0
    """How long an engine may take to answer one request. A model turn may take as long as any `rollout_timeout_s`: one
    that takes longer ends its rollout, not the run."""
    trainer_timeout_s: PositiveFloat = 3600.0
    """How long the orchestrator waits for the trainer before it gives up, beside evaluations and full disks."""

    @property
    def request_timeout_s(self) -> float:
        environments = (*self.env, *(self.eval.env if self.eval else ()))
        return max([self.engine_timeout_s, *(env.rollout_timeout_s for env in environments)])
