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
    extra_body: dict[str, Any] = {}
    """More sampling parameters of vLLM, by its own names; none that is named above."""


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


class Buffer(Section):
    """`[orchestrator.buffer]`: which examples come next."""

    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all the same (no signal) and refill the batch."""
    shuffle: bool = True
    """A new seeded order of the examples each epoch; dataset order otherwise."""


class Advantage(Section):
    """`[orchestrator.advantage]`: see `trireme.algo.advantage`."""

    type: Literal["group_mean", "group_mean_std"] = "group_mean"
    """Reward minus the group's mean, or that divided by the group's standard deviation."""


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
    """Turns of a rollout as one sample, or one sample per turn where the chat template rewrites earlier turns."""
    max_concurrent: PositiveInt = 1024
    """Requests under way at once in all engines."""
    max_rollout_attempts: PositiveInt = 3
    """A rollout that fails is tried this often; then its group is dropped, with the reason."""
    sampling: Sampling = Sampling()
    env: tuple[Environment, ...] = ()
    buffer: Buffer = Buffer()
    advantage: Advantage = Advantage()
    eval: Evaluation | None = None
    server: StatusServer = StatusServer()
    engine_timeout_s: PositiveFloat = 600.0
    """How long an engine may take to come up, or to answer one request."""
    trainer_timeout_s: PositiveFloat = 3600.0
    """How long the orchestrator waits for the trainer before it gives up."""
