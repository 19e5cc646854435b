"""How long a step takes, and which split of the GPUs between engines and trainer makes it shortest.

Of a model of hardware as simple as can be: products at a share of the peak, decoding as fast as memory can be read. It
orders choices rightly more often than it gives the right second; measured rates (`--trainer-tokens-per-s`,
`--engine-tokens-per-s`, `--from RUN`) take its place where there are some.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trireme.algo.architecture import Architecture
from trireme.algo.chips import Chip
from trireme.algo.flops import model_flops, model_forward_flops
from trireme.tools.plan.serving import Serving

READ_SHARE = 0.6  # of a memory's bandwidth that decoding reaches
PREFILL_SHARE = 0.4  # of a chip's peak that reading a prompt reaches
STEP_OVERHEAD_S = 0.004  # of an engine, per token that it adds to all its requests
UPDATE_BYTES_PER_S = 10e9  # of weights on their way to engines
UPDATE_OVERHEAD_S = 0.3

_SMALLEST, _LARGEST = 0.03, 0.45


def assumed_mfu(flops_of_row: float) -> float:
    """Share of a GPU's peak that a trainer reaches, by how much work a row is.

    Through three published points, on H100 and H200 (prime-rl's trainer): Qwen3-0.6B at 16k tokens 11.1 %, at 65k
    26.8 %; 4B on 8 GPUs at 65k 36.1 %. Against the logarithm of a row's work they lie on one line.
    """
    return min(_LARGEST, max(_SMALLEST, 0.111 + 0.072 * math.log(flops_of_row / 1.05e14)))


@dataclass(frozen=True)
class Work:
    """What a step has to do."""

    rollouts: int
    prompt_tokens: float  # of a rollout
    sampled_tokens: float
    longest: float  # sampled tokens of the longest rollout
    row_tokens: int
    iterations: int = 1
    oversampling: float = 1.0

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.sampled_tokens

    @property
    def tokens(self) -> float:
        return self.rollouts * self.length


@dataclass(frozen=True)
class TrainerPace:
    """Of a GPU, in tokens of the batch per second."""

    model: Architecture
    chip: Chip
    value_bytes: int = 2
    trained: float | None = None  # parameters, where not all are
    recomputed: float = 0.0  # share of the layers
    has_reference: bool = False
    mfu: float | None = None
    tokens_per_s: float | None = None  # measured

    def rate(self, work: Work) -> float:
        if self.tokens_per_s:
            return self.tokens_per_s
        return self.chip.peak(self.value_bytes) * self.share(work) / self._flops(work)

    def share(self, work: Work) -> float:
        """Of the peak, what is recomputed counted in."""
        return self.mfu or assumed_mfu(model_flops(self.model, work.length, trained=self.trained) * work.row_tokens)

    def _flops(self, work: Work) -> float:
        forward = model_forward_flops(self.model, work.length)
        both = model_flops(self.model, work.length, trained=self.trained) + self.recomputed * forward
        return both * work.iterations + (forward if self.has_reference else 0.0)


@dataclass(frozen=True)
class EnginePace:
    """Of one engine, which may have several GPUs."""

    serving: Serving
    chip: Chip
    tokens_per_s: float | None = None  # measured, per GPU

    def seconds(self, work: Work, engines: int) -> float:
        """To sample a batch: no shorter than the longest rollout takes."""
        share = work.rollouts / engines
        at_once = self.serving.concurrency(work.length, share * work.oversampling)
        if self.tokens_per_s:
            return share * work.sampled_tokens / (self.tokens_per_s * self.serving.tp)
        every = self._step_s(at_once, work.prompt_tokens + work.sampled_tokens / 2)
        decoding = max(share * work.sampled_tokens / at_once, work.longest) * every
        return decoding + share * work.prompt_tokens * self._prefill_s

    @property
    def _peak(self) -> float:
        return self.chip.peak(self.serving.value_bytes)

    def _step_s(self, requests: float, context: float) -> float:
        """One token for each request: all weights that are met are read, and all keys and values."""
        serving, model = self.serving, self.serving.model
        met = min(model.num_parameters, model.active_parameters * requests) / serving.tp
        read = met * serving.value_bytes + requests * serving.kv_bytes(context)
        computed = 2 * model.active_parameters * requests / serving.tp
        return max(read / (self.chip.bandwidth * READ_SHARE), computed / self._peak) + STEP_OVERHEAD_S

    @property
    def _prefill_s(self) -> float:
        """Of a token of a prompt."""
        return 2 * self.serving.model.active_parameters / (self._peak * PREFILL_SHARE * self.serving.tp)


@dataclass(frozen=True)
class Split:
    """GPUs of the engines and of the trainer, and what a step takes with them."""

    engine_gpus: int
    trainer_gpus: int
    sampling_s: float
    training_s: float
    update_s: float
    step_s: float
    fits: bool = True

    @property
    def bottleneck(self) -> str:
        return "engines" if self.sampling_s > self.training_s else "trainer"

    @property
    def engines_idle(self) -> float:
        """Share of a step."""
        return 1 - self.sampling_s / self.step_s

    @property
    def trainer_idle(self) -> float:
        return 1 - self.training_s / self.step_s


def split_of(
    engine_gpus: int,
    trainer_gpus: int,
    work: Work,
    trainer: TrainerPace,
    engine: EnginePace,
    *,
    synchronous: bool,
    is_shared: bool = False,
    fits: bool = True,
) -> Split:
    """One after the other where the run is synchronous; else at the same time, and the slower one decides. On GPUs (or
    cores) that both share, each takes what the other leaves."""
    training = work.tokens / (trainer.rate(work) * trainer_gpus)
    sampling = engine.seconds(work, max(1, engine_gpus // engine.serving.tp))
    update = update_seconds(engine.serving)
    step = (training + sampling if synchronous or is_shared else max(training, sampling)) + update
    return Split(engine_gpus, trainer_gpus, sampling, training, update, step, fits)


def update_seconds(serving: Serving) -> float:
    return UPDATE_OVERHEAD_S + serving.model.num_parameters * serving.value_bytes / UPDATE_BYTES_PER_S


def possible_splits(gpus: int, *, tp: int, trainer_multiple: int) -> Iterator[tuple[int, int]]:
    """Of engines and trainer: whole engines, and whole teams of ranks."""
    for trainer_gpus in range(trainer_multiple, gpus, trainer_multiple):
        if (gpus - trainer_gpus) % tp == 0:
            yield gpus - trainer_gpus, trainer_gpus


def better_split(splits: list[Split]) -> Split | None:
    """The shortest step of those that fit."""
    return min((split for split in splits if split.fits), key=lambda split: split.step_s, default=None)
