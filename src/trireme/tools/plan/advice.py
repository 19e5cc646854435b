"""Advise what to change where a run will not fit: each change is worked out by itself, none is a rule of thumb."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trireme.algo.model.chips import GIB
from trireme.base.devices import Devices
from trireme.config.run import RunConfig
from trireme.tools.plan.estimate import Estimate, estimate_here
from trireme.tools.plan.memory import changed

WORTH = 0.005  # of what is needed: smaller savings are left out

Change = tuple[str, dict[str, object]]
"""A change as it stands in a configuration, and the fields of `Training` that it sets; `ranks` multiplies them."""


@dataclass(frozen=True)
class Saving:
    words: str  # "trainer.model.ac.freq = 1"
    saved: float  # bytes on each of the trainer's devices
    fits: bool  # with this change alone


@dataclass(frozen=True)
class Advice:
    savings: tuple[Saving, ...]  # largest first
    together: tuple[str, ...]  # changes that make the trainer fit, cheap ones preferred; empty where none do
    then: Estimate | None  # with all of `together`
    engine: tuple[str, ...]  # changes that make the engine fit, each alone


def advise(estimate: Estimate) -> Advice:
    changes = list(trainer_changes(estimate))
    savings = []
    for words, fields in changes:
        other = _apply(estimate, fields)
        saved = estimate.trainer.total - other.trainer.total
        if saved > WORTH * estimate.trainer.total:
            savings.append(Saving(words, saved, other.trainer.fits))
    savings.sort(key=lambda saving: -saving.saved)
    together, then = ((), None) if estimate.trainer.fits else _first_that_fits(estimate, changes)
    return Advice(tuple(savings), together, then, tuple(engine_advice(estimate)))


def _first_that_fits(estimate: Estimate, changes: list[Change]) -> tuple[tuple[str, ...], Estimate | None]:
    """Add changes until it fits, cheap ones first, then leave out those that it fits without."""
    chosen: list[Change] = []
    for change in changes:
        chosen = [*(each for each in chosen if each[1].keys().isdisjoint(change[1])), change]
        if _apply(estimate, *(fields for _, fields in chosen)).trainer.fits:
            break
    else:
        return (), None
    for change in list(chosen):
        fewer = [each for each in chosen if each is not change]
        if _apply(estimate, *(fields for _, fields in fewer)).trainer.fits:
            chosen = fewer
    return tuple(words for words, _ in chosen), _apply(estimate, *(fields for _, fields in chosen))


def _apply(estimate: Estimate, *changes: dict[str, object]) -> Estimate:
    fields = {name: value for each in changes for name, value in each.items()}
    times = fields.pop("ranks", 1)
    assert isinstance(times, int)
    training = changed(estimate.training, **fields)
    training = changed(training, shards=training.shards * times)
    if times == 1:
        return replace(estimate, training=training)
    ranks = estimate.ranks * times
    return replace(estimate, training=training, ranks=ranks, trainer_gpus=ranks, is_shared=False)


def trainer_changes(estimate: Estimate) -> Iterator[Change]:
    """Yield the changes that the configuration allows: first those that cost nothing, then those that cost speed, then
    precision, then more machines, then another task."""
    training, row, ranks = estimate.training, estimate.training.row, estimate.ranks
    prefix, on_cpu = "trainer." if estimate.serving else "", estimate.machine.is_on_cpu
    model, longest = f"{prefix}model.", estimate.longest_sample
    refuses_sdpa = training.model.family.sinks or training.model.capped

    if row.attention in ("sdpa", "eager") and not on_cpu and row.value_bytes == 2:
        yield f'{model}attn = "flash_attention_2"', {"attention": "flash_attention_2"}
    if row.attention == "eager" and on_cpu and not refuses_sdpa:
        yield f'{model}attn = "sdpa"', {"attention": "sdpa"}
    for chunk in (1024, 256):
        if training.head_chunk > chunk:
            yield f"{model}head_chunk = {chunk}", {"head_chunk": chunk}
    if not training.reshard:
        yield f"{model}reshard_after_forward = true", {"reshard": True}
    for tokens in (max(longest, row.tokens // 2), longest):
        if tokens < row.tokens:
            yield f"{prefix}micro_batch_tokens = {tokens}", {"tokens": tokens}
    if training.shards < ranks and not on_cpu:
        yield f"{model}dp_replicate = 1", {"shards": ranks}
    if row.value_bytes == 4 and not on_cpu:
        yield f'{model}optimization_dtype = "bfloat16"', {"value_bytes": 2}
        if row.attention in ("sdpa", "eager"):  # kernels of flash attention know bfloat16 only
            words = f'{model}attn = "flash_attention_2", {model}optimization_dtype = "bfloat16"'
            yield words, {"attention": "flash_attention_2", "value_bytes": 2}
    if training.ac_freq is None:
        yield f'{model}ac = {{ mode = "selective" }}', {"ac_freq": 1, "ac_mode": "selective"}
        yield f"{model}ac.freq = 2", {"ac_freq": 2, "ac_mode": "full"}
    if training.ac_freq != 1 or training.ac_mode != "full":
        yield f"{model}ac.freq = 1", {"ac_freq": 1, "ac_mode": "full"}
    if training.reduce_bytes == 4 and not on_cpu:
        yield f'{model}reduce_dtype = "bfloat16"', {"reduce_bytes": 2}
    if training.optimizer == "adamw":
        yield f'{prefix}optim.type = "adamw_8bit"', {"optimizer": "adamw_8bit"}
    if not on_cpu:
        for cp in (2, 4, 8):
            if cp > row.cp and ranks % cp == 0:
                yield f"{model}cp = {cp}", {"cp": cp}
        if not training.offload_activations:
            yield f"{model}activation_offload = true", {"offload_activations": True}
        for times in (2, 4, 8):
            name = "trainer_gpus" if estimate.serving else "num_ranks"
            yield f"{name} = {ranks * times} (has {ranks})", {"ranks": times}
        if not training.offload_parameters:
            yield f"{model}fsdp_cpu_offload = true", {"offload_parameters": True}
    if training.has_reference:
        yield f"{prefix}loss.beta = 0", {"has_reference": False}
    if row.targets is None:
        targets = tuple({matrix.name for layer in training.model.layers for matrix in layer.matrices} - {"router"})
        yield f"{model}lora.rank = 16", {"targets": targets, "rank": 16}
    cut = longest // 2
    yield f"seq_len = {cut}, {prefix}micro_batch_tokens = {cut}", {"tokens": cut}


def engine_advice(estimate: Estimate) -> Iterator[str]:
    """Yield settings that leave room for a request of `max_model_len`, where there is none."""
    serving = estimate.serving
    if serving is None or serving.fits:
        return
    changes: list[tuple[str, dict[str, object]]] = []
    if serving.is_on_cpu:
        changes += [(f"inference.cpu.kv_cache_gib = {gib}", {"kv_cache_bytes": gib * GIB}) for gib in (2, 4, 8, 16, 32)]
    else:
        changes.append(("inference.gpu_memory_utilization = 0.95", {"utilization": 0.95}))
        tps = [tp for tp in (2, 4, 8) if tp > serving.tp and serving.model.heads % tp == 0]
        changes += [(f"inference.parallel.tp = {tp}", {"tp": tp}) for tp in tps]
        changes.append(('inference.model.dtype = "bfloat16"', {"value_bytes": 2}))
        shorter = [serving.max_model_len // part for part in (2, 4)]
        changes += [(f"inference.model.max_model_len = {length}", {"max_model_len": length}) for length in shorter]
    for words, fields in changes:
        other = replace(serving, **fields)  # type: ignore[arg-type]
        if other.fits:
            yield f"{words}: {other.num_requests:,.1f} requests of {other.max_model_len:,} tokens at once"


def fit_warnings(config: RunConfig, devices: Devices) -> list[str]:
    """Return a warning for a resolved run on a machine that is too small. It never stops a run: the plan may be wrong.

    There is none where the model's sizes, or the GPU's memory, are not known on this machine.
    """
    estimate = estimate_here(config, devices)
    if estimate is None or not (problems := list(estimate.problems())):
        return []
    together = advise(estimate).together
    ways = f" First that fits: {', '.join(together)}." if together else ""
    return [f"this may not fit: {'; '.join(problems)}.{ways} `trireme plan` with the same arguments shows all of it."]
