"""Advise what to change where a run will not fit: each change is worked out by itself, none is a rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trireme.algo.model.chips import GIB
from trireme.base.devices import Devices
from trireme.config.run import RunConfig
from trireme.tools.plan.estimate import Estimate, estimate_here
from trireme.tools.plan.memory import changed

WORTH = 0.005  # of what is needed: smaller savings are left out

Change = tuple[str, dict[str, Any]]
"""A change as it stands in a configuration, and the fields of `Training` that it sets; `ranks` multiplies them."""


@dataclass(frozen=True)
class Saving:
    words: str  # "trainer.model.ac.freq = 1"
    saved: float  # bytes on each of the trainer's devices
    fits: bool  # with this change alone


def savings_of(estimate: Estimate) -> list[Saving]:
    """Return what each change would save the trainer by itself, largest first."""
    savings = []
    for words, fields in trainer_changes(estimate):
        other = _apply(estimate, fields)
        saved = estimate.trainer.total - other.trainer.total
        if saved > WORTH * estimate.trainer.total:
            savings.append(Saving(words, saved, other.trainer.fits))
    return sorted(savings, key=lambda saving: -saving.saved)


def first_that_fits(estimate: Estimate) -> tuple[list[str], Estimate] | None:
    """Add changes until the trainer fits, cheap ones first, then leave out those that it fits without.

    Returns: the changes, and the plan with them; None where not even all of them are enough.
    """
    chosen: list[Change] = []
    for change in trainer_changes(estimate):
        chosen = [*(each for each in chosen if each[1].keys().isdisjoint(change[1])), change]
        if _apply(estimate, *(fields for _, fields in chosen)).trainer.fits:
            break
    else:
        return None
    for change in list(chosen):
        fewer = [each for each in chosen if each is not change]
        if _apply(estimate, *(fields for _, fields in fewer)).trainer.fits:
            chosen = fewer
    return [words for words, _ in chosen], _apply(estimate, *(fields for _, fields in chosen))


def _apply(estimate: Estimate, *changes: dict[str, Any]) -> Estimate:
    fields = {name: value for each in changes for name, value in each.items()}
    times = fields.pop("ranks", 1)
    assert isinstance(times, int)
    training = changed(estimate.training, **fields)
    training = changed(training, shards=training.shards * times)
    if times == 1:
        return replace(estimate, training=training)
    ranks = estimate.ranks * times
    return replace(estimate, training=training, ranks=ranks, trainer_gpus=ranks, is_shared=False)


def trainer_changes(estimate: Estimate) -> list[Change]:
    """Return the changes that the configuration allows: first those that cost nothing, then those that cost speed, then
    precision, then more machines, then another task."""
    training, row, ranks = estimate.training, estimate.training.row, estimate.ranks
    prefix, on_gpu = "trainer." if estimate.serving else "", not estimate.machine.is_on_cpu
    model, longest, cut = f"{prefix}model.", estimate.longest_sample, estimate.longest_sample // 2
    keeps_scores = on_gpu and row.attention in ("sdpa", "eager")
    has_states = any(layer.conv_state or layer.recurrent_state for layer in training.model.layers)
    may_share = on_gpu and not (row.attention == "eager" or has_states or training.model.tower)  # a row among ranks
    shared = math.gcd(ranks, training.model.heads)
    linear = {matrix.name for layer in training.model.layers for matrix in layer.matrices} - {"router"}
    gpus = "trainer_gpus" if estimate.serving else "num_ranks"
    is_eager = row.attention == "eager"  # models whose scores flash attention cannot compute are
    fused, bfloat16 = {"attention": "flex_attention" if is_eager else "flash_attention_2"}, {"value_bytes": 2}
    attention, precision = f'{model}attn = "{fused["attention"]}"', f'{model}optimization_dtype = "bfloat16"'
    selective, whole = {"ac_freq": 1, "ac_mode": "selective"}, {"ac_freq": 1, "ac_mode": "full"}
    recomputes_none, recomputes_all = training.ac_freq is None, (training.ac_freq, training.ac_mode) == (1, "full")
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (keeps_scores and (is_eager or row.value_bytes == 2), attention, fused),
        (training.head_chunk > 256, f"{model}head_chunk = 256", {"head_chunk": 256}),
        (not training.reshard, f"{model}reshard_after_forward = true", {"reshard": True}),
        (longest < row.tokens, f"{prefix}micro_batch_tokens = {longest}", {"tokens": longest}),
        (on_gpu and training.shards < ranks, f"{model}dp_replicate = 1", {"shards": ranks}),
        (on_gpu and row.value_bytes == 4, precision, bfloat16),
        # the kernel of flash attention knows bfloat16 only
        (keeps_scores and not is_eager and row.value_bytes == 4, f"{attention}, {precision}", fused | bfloat16),
        (recomputes_none and not training.compiled, f'{model}ac = {{ mode = "selective" }}', selective),
        (not recomputes_all, f"{model}ac.freq = 1", whole),
        (on_gpu and training.reduce_bytes == 4, f'{model}reduce_dtype = "bfloat16"', {"reduce_bytes": 2}),
        (training.optimizer == "adamw", f'{prefix}optim.type = "adamw_8bit"', {"optimizer": "adamw_8bit"}),
        *((may_share and cp > row.cp, f"{model}cp = {cp}", {"cp": cp}) for cp in (2, 4, 8) if shared % cp == 0),
        (on_gpu, f"{model}activation_offload = true", {"offload_activations": True}),
        *((on_gpu, f"{gpus} = {ranks * times} (has {ranks})", {"ranks": times}) for times in (2, 4, 8)),
        (on_gpu, f"{model}fsdp_cpu_offload = true", {"offload_parameters": True}),
        (training.has_reference, f"{prefix}loss.beta = 0", {"has_reference": False}),
        (row.targets is None, f"{model}lora.rank = 16", {"targets": tuple(linear), "rank": 16}),
        (True, f"seq_len = {cut}, {prefix}micro_batch_tokens = {cut}", {"tokens": cut}),
    ]
    return [(words, fields) for is_possible, words, fields in changes if is_possible]


def engine_advice(estimate: Estimate) -> Iterator[str]:
    """Yield settings that leave room for a request of `max_model_len`, where there is none."""
    serving = estimate.serving
    if serving is None or serving.fits:
        return
    changes: list[tuple[str, dict[str, Any]]] = []
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
        other = replace(serving, **fields)
        if other.fits:
            yield f"{words}: {other.num_requests:,.1f} requests of {other.max_model_len:,} tokens at once"


def fit_warnings(config: RunConfig, devices: Devices) -> list[str]:
    """Return a warning for a resolved run on a machine that is too small. It never stops a run: the plan may be wrong.

    There is none where the model's sizes, or the GPU's memory, are not known on this machine.
    """
    estimate = estimate_here(config, devices)
    if estimate is None or not (problems := list(estimate.problems())):
        return []
    found = None if estimate.trainer.fits else first_that_fits(estimate)
    ways = f" First that fits: {', '.join(found[0])}." if found else ""
    return [f"this may not fit: {'; '.join(problems)}.{ways} `trireme plan` with the same arguments shows all of it."]
