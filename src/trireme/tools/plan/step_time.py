"""Seconds of a step: sampling by the engines, training, and sending the weights.

Hardware is modelled as simply as can be: products at a share of the peak, decoding as fast as memory can be read. It
orders choices rightly more often than it gives the right second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trireme.algo.model.chips import Chip
from trireme.algo.model.flops import model_flops, model_forward_flops
from trireme.config.run import RunConfig
from trireme.tools.plan.engine_memory import Serving
from trireme.tools.plan.trainer_memory import Training

READ_SHARE = 0.6  # share of a memory's bandwidth that decoding reaches
PREFILL_SHARE = 0.4  # share of a chip's peak that reading a prompt reaches
TOKEN_OVERHEAD_S = 0.004  # an engine's overhead per step, which adds a token to each of its requests
UPDATE_BYTES_PER_S = 10e9  # rate at which weights reach the engines
UPDATE_OVERHEAD_S = 0.3
SMALLEST_MFU, LARGEST_MFU = 0.03, 0.45


@dataclass(frozen=True)
class Lengths:
    """Tokens of a rollout, on average."""

    prompt: float
    sampled: float
    longest: float  # sampled
    source: str  # in words

    @property
    def total(self) -> float:
        return self.prompt + self.sampled


def lengths_of(config: RunConfig, *, prompt: float | None = None, sampled: float | None = None) -> Lengths:
    """Return the lengths that are given, or else the longest that are allowed. What is not sampled is prompt."""
    # Without a limit on sampled tokens, a quarter of the context is left for the prompt.
    context = min(config.seq_len, config.inference.model.max_model_len or config.seq_len)
    views = [*config.orchestrator.sources.values()] or [config.orchestrator]
    turns = [view.sampling.max_tokens for view in views]
    given = max(turn or context * 3 // 4 for turn in turns)
    most = min(given, context)
    if prompt is None and sampled is None:
        return Lengths(context - most, most, most, "the longest that the configuration allows")
    prompt = context - most if prompt is None else prompt
    sampled = most if sampled is None else sampled
    return Lengths(prompt, sampled, max(sampled, given if any(turns) else sampled), "as given")


@dataclass(frozen=True)
class Batch:
    """The rollouts that a step samples and trains on."""

    rollouts: int
    groups: int | None
    lengths: Lengths
    row_tokens: int
    rows: int  # rows that a rank trains on per update
    teams: int  # groups with rows of their own: single ranks, or ranks that share a row (`cp`)
    iterations: int
    oversampling: float

    @property
    def tokens(self) -> float:
        return self.rollouts * self.lengths.total


@dataclass(frozen=True)
class Split:
    """GPUs of the engines and of the trainer, and what a step takes with them."""

    engine_gpus: int
    trainer_gpus: int
    sampling_s: float
    training_s: float
    update_s: float
    step_s: float


def assumed_mfu(training: Training, batch: Batch) -> float:
    """Return the share of a GPU's peak that a trainer reaches, by how much work a row is.

    Through three published points, on H100 and H200 (prime-rl's trainer): Qwen3-0.6B at 16k tokens 11.1 %, at 65k
    26.8 %; 4B on 8 GPUs at 65k 36.1 %. Against the logarithm of a row's work they lie on one line.
    """
    trained = training.trained if training.frozen else None
    row_flops = model_flops(training.model, batch.lengths.total, trained=trained) * batch.row_tokens
    return min(LARGEST_MFU, max(SMALLEST_MFU, 0.111 + 0.072 * math.log(row_flops / 1.05e14)))


def training_rate(training: Training, chip: Chip, batch: Batch, mfu: float) -> float:
    """Return tokens of the batch per second and GPU. What is recomputed counts as work."""
    model = training.model
    forward = model_forward_flops(model, batch.lengths.total)
    flops = model_flops(model, batch.lengths.total, trained=training.trained if training.frozen else None)

    # A layer that is recomputed has its forward pass twice.
    if (ac := training.settings.ac) and ac.mode == "full":
        flops += forward * math.ceil(len(model.layers) / ac.freq) / len(model.layers)

    # The reference model has one forward pass, however often the batch is trained on.
    flops = flops * batch.iterations + (forward if training.has_reference else 0.0)
    return chip.peak(training.row.value_bytes) * mfu / flops


def sampling_seconds(serving: Serving, chip: Chip, batch: Batch, *, engines: int) -> float:
    """Return the seconds to sample a batch: no shorter than the longest rollout takes."""
    rollouts, lengths = batch.rollouts / engines, batch.lengths
    model, peak = serving.model, chip.peak(serving.value_bytes)
    requests = serving.concurrency(lengths.total, rollouts * batch.oversampling)

    # For one token of each request the engine reads all weights that the tokens use, and all keys and values.
    met = min(model.num_parameters, model.active_parameters * requests) / serving.tp
    read = met * serving.value_bytes + requests * serving.kv_bytes(lengths.prompt + lengths.sampled / 2)
    computed = 2 * model.active_parameters * requests / serving.tp
    token_s = max(read / (chip.bandwidth * READ_SHARE), computed / peak) + TOKEN_OVERHEAD_S

    # A prompt's tokens are computed together, so its limit is compute and not bandwidth.
    prompt_token_s = 2 * model.active_parameters / (peak * PREFILL_SHARE * serving.tp)

    # No batch is done before its longest rollout, however many engines share it.
    decoded = max(rollouts * lengths.sampled / requests, lengths.longest)
    return decoded * token_s + rollouts * lengths.prompt * prompt_token_s


def update_seconds(serving: Serving) -> float:
    return UPDATE_OVERHEAD_S + serving.model.num_parameters * serving.value_bytes / UPDATE_BYTES_PER_S
