"""What to change where a run will not fit: every alternative is worked out, none is a rule of thumb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from trireme.algo.activations import Pass
from trireme.tools.plan.estimate import Estimate
from trireme.tools.plan.memory import GIB, Training, changed
from trireme.tools.plan.serving import Serving

MOST_CHANGES = 4  # at once
WORTH = 0.005  # of what is needed: less is not told of
SMALL_CHUNK = 256


@dataclass(frozen=True)
class Alternative:
    """One change of the configuration.

    Example:
        Alternative("trainer.model.ac.freq = 1", "ac", price=3, change=lambda estimate: …)
    """

    words: str  # as it stands in a configuration
    key: str  # of alternatives that exclude each other
    price: int  # 0 costs nothing; then speed, then precision, then more machines or another task
    change: Callable[[Estimate], Estimate]


@dataclass(frozen=True)
class Saving:
    alternative: Alternative
    saved: float  # bytes on each of the trainer's devices
    fits: bool


@dataclass(frozen=True)
class Advice:
    """Largest saving first; and the cheapest changes that make it fit, empty where none do."""

    savings: tuple[Saving, ...]
    together: tuple[Alternative, ...]
    then: Estimate | None  # with all of `together`
    engine: tuple[str, ...] = ()  # that make the engine fit, each alone


def advise(estimate: Estimate) -> Advice:
    savings = _savings(estimate)
    together = () if estimate.trainer_fits else _first_that_fits(estimate, savings)
    then = _with(estimate, together) if together else None
    return Advice(savings, together, then, tuple(_engine_advice(estimate)))


def _savings(estimate: Estimate) -> tuple[Saving, ...]:
    found = [_saving(estimate, alternative) for alternative in alternatives(estimate)]
    worth = [saving for saving in found if saving.saved > WORTH * estimate.trainer_bytes]
    return tuple(sorted(worth, key=lambda saving: (-saving.saved, saving.alternative.price)))


def _saving(estimate: Estimate, alternative: Alternative) -> Saving:
    other = alternative.change(estimate)
    return Saving(alternative, estimate.trainer_bytes - other.trainer_bytes, other.trainer_fits)


def _first_that_fits(estimate: Estimate, savings: tuple[Saving, ...]) -> tuple[Alternative, ...]:
    """The cheapest; of those that cost the same, the one with the fewest changes.

    Changes that save nothing alone may do so together, so none is left out.
    """
    all_of_them = list(alternatives(estimate))
    choices = [chosen for count in range(1, MOST_CHANGES + 1) for chosen in combinations(all_of_them, count)]
    for chosen in sorted(choices, key=lambda chosen: (sum(each.price for each in chosen), len(chosen))):
        apart = len({each.key for each in chosen}) == len(chosen)
        if apart and _with(estimate, chosen).trainer_fits:
            return _needed(estimate, chosen)
    return ()


def _needed(estimate: Estimate, chosen: tuple[Alternative, ...]) -> tuple[Alternative, ...]:
    """Without those that it fits without."""
    for each in chosen:
        others = tuple(other for other in chosen if other is not each)
        if _with(estimate, others).trainer_fits:
            return _needed(estimate, others)
    return chosen


def _with(estimate: Estimate, chosen: tuple[Alternative, ...]) -> Estimate:
    for alternative in chosen:
        estimate = alternative.change(estimate)
    return estimate


def alternatives(estimate: Estimate) -> Iterator[Alternative]:
    """Those that change something."""
    prefix = "trainer." if estimate.serving else ""
    yield from _of_the_forward_pass(estimate.training, f"{prefix}model.", on_cpu=estimate.machine.is_on_cpu)
    yield from _of_the_state(estimate.training, prefix, on_cpu=estimate.machine.is_on_cpu)
    yield from _of_the_rows(estimate, prefix)
    if not estimate.machine.is_on_cpu:
        yield from _of_the_ranks(estimate, prefix)


def _of_the_forward_pass(training: Training, model: str, *, on_cpu: bool) -> Iterator[Alternative]:
    row = training.row
    if row.attention in ("sdpa", "eager") and not on_cpu:
        yield from _flash(row, model)
    if row.attention == "eager" and on_cpu and not training.model.family.sinks and not training.model.capped:
        yield _setting(f'{model}attn = "sdpa"', "attn", 0, attention="sdpa")
    if training.head_chunk > 1024:
        yield _setting(f"{model}head_chunk = 1024", "head_chunk", 0, head_chunk=1024)
    if training.head_chunk > SMALL_CHUNK:
        yield _setting(f"{model}head_chunk = {SMALL_CHUNK}", "head_chunk", 1, head_chunk=SMALL_CHUNK)
    if row.value_bytes == 4 and not on_cpu:
        yield _setting(f'{model}optimization_dtype = "bfloat16"', "dtype", 2, value_bytes=2)
    if training.reduce_bytes == 4 and not on_cpu:
        yield _setting(f'{model}reduce_dtype = "bfloat16"', "reduce_dtype", 3, reduce_bytes=2)
    if training.ac_freq is None:
        yield _setting(f'{model}ac = {{ mode = "selective" }}', "ac", 2, ac_freq=1, ac_mode="selective")
        yield _setting(f"{model}ac.freq = 2", "ac", 2, ac_freq=2)
    if training.ac_freq != 1 or training.ac_mode != "full":
        yield _setting(f"{model}ac.freq = 1", "ac", 3, ac_freq=1, ac_mode="full")
    if not training.offload_activations and not on_cpu:
        yield _setting(f"{model}activation_offload = true", "activation_offload", 5, offload_activations=True)


def _flash(row: Pass, model: str) -> Iterator[Alternative]:
    """Its kernels know bfloat16 only."""
    words, flash = f'{model}attn = "flash_attention_2"', "flash_attention_2"
    if row.value_bytes == 2:
        yield _setting(words, "attn", 0, attention=flash)
    else:
        words = f'{words}, {model}optimization_dtype = "bfloat16"'
        yield _setting(words, "attn", 2, attention=flash, value_bytes=2)


def _of_the_state(training: Training, prefix: str, *, on_cpu: bool) -> Iterator[Alternative]:
    if training.optimizer == "adamw":
        yield _setting(f'{prefix}optim.type = "adamw_8bit"', "optim", 3, optimizer="adamw_8bit")
    if not training.reshard:
        yield _setting(f"{prefix}model.reshard_after_forward = true", "reshard", 1, reshard=True)
    if not training.offload_parameters and not on_cpu:
        yield _setting(f"{prefix}model.fsdp_cpu_offload = true", "offload", 7, offload_parameters=True)
    if training.has_reference:
        yield _setting(f"{prefix}loss.beta = 0", "reference", 8, has_reference=False)
    if training.row.targets is None:
        targets = tuple({matrix.name for layer in training.model.layers for matrix in layer.matrices} - {"router"})
        yield _setting(f"{prefix}model.lora.rank = 16", "lora", 9, targets=targets, rank=16)


def _of_the_rows(estimate: Estimate, prefix: str) -> Iterator[Alternative]:
    """Down to the longest sample; then by cutting that, which makes it another task."""
    tokens, longest = estimate.training.row.tokens, estimate.longest_sample
    half = max(longest, tokens // 2)
    if half < tokens:
        yield _setting(f"{prefix}micro_batch_tokens = {half}", "tokens", 1, tokens=half)
    if longest < tokens:
        yield _setting(f"{prefix}micro_batch_tokens = {longest}", "tokens", 2, tokens=longest)
    cut = longest // 2
    yield _setting(f"seq_len = {cut}, {prefix}micro_batch_tokens = {cut}", "tokens", 12, tokens=cut)


def _of_the_ranks(estimate: Estimate, prefix: str) -> Iterator[Alternative]:
    training, ranks = estimate.training, estimate.ranks
    if training.shards < ranks:
        yield _setting(f"{prefix}model.dp_replicate = 1", "replicate", 2, shards=ranks)
    for cp in (2, 4, 8):
        if cp > training.row.cp and ranks % cp == 0:
            yield _setting(f"{prefix}model.cp = {cp}", "cp", 3 + cp // 2, cp=cp)
    for times in (2, 4, 8):
        more = ranks * times
        words = f"trainer_gpus = {more}" if estimate.serving else f"num_ranks = {more}"
        yield Alternative(f"{words} (has {ranks})", "ranks", 5 + times // 2, _more_ranks(times))


def _more_ranks(times: int) -> Callable[[Estimate], Estimate]:
    def change(estimate: Estimate) -> Estimate:
        training = changed(estimate.training, shards=estimate.training.shards * times)
        ranks = estimate.ranks * times
        return replace(estimate, training=training, ranks=ranks, trainer_gpus=ranks, is_shared=False)

    return change


def _setting(words: str, key: str, price: int, **changes: object) -> Alternative:
    def change(estimate: Estimate) -> Estimate:
        return replace(estimate, training=changed(estimate.training, **changes))

    return Alternative(words, key, price, change)


# the engine


def _engine_advice(estimate: Estimate) -> Iterator[str]:
    """Settings that leave room for a request of the longest kind, where there is none."""
    serving = estimate.serving
    if serving is None or serving.fits:
        return
    for words, other in _engine_alternatives(serving):
        if other.fits:
            yield f"{words}: {other.num_requests:,.1f} requests of {other.max_model_len:,} tokens at once"


def _engine_alternatives(serving: Serving) -> Iterator[tuple[str, Serving]]:
    if serving.is_on_cpu:
        for gib in (2, 4, 8, 16, 32):
            yield f"inference.cpu.kv_cache_gib = {gib}", replace(serving, kv_cache_bytes=gib * float(GIB))
        return
    if serving.utilization < 0.95:
        yield "inference.gpu_memory_utilization = 0.95", replace(serving, utilization=0.95)
    for tp in (2, 4, 8):
        if tp > serving.tp and serving.model.heads % tp == 0:
            yield f"inference.parallel.tp = {tp}", replace(serving, tp=tp)
    if serving.value_bytes == 4:
        yield 'inference.model.dtype = "bfloat16"', replace(serving, value_bytes=2)
    for part in (2, 4):
        shorter = serving.max_model_len // part
        yield f"inference.model.max_model_len = {shorter}", replace(serving, max_model_len=shorter)
