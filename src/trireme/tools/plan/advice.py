"""Advise what to change if a run will not fit: each change is worked out by itself, none is a rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trireme.algo.model.chips import GIB
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import toml_value
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.trainer import ActivationCheckpointing, Lora
from trireme.tools.plan.engine_memory import CONTEXT_BYTES
from trireme.tools.plan.estimate import Estimate, estimate_here, machines_of, plan_here

WORTH = 0.005  # smallest saving that is listed, as a share of what is needed

Values = dict[str, Any]  # dotted keys of the configuration
Change = tuple[str, Values]
"""A change as the user writes it, and the values that it sets."""


@dataclass(frozen=True)
class Saving:
    words: str  # "trainer.model.ac.freq = 1"
    saved: float  # bytes on each of the trainer's devices
    fits: bool  # with this change alone


def savings_of(estimate: Estimate) -> list[Saving]:
    """Return what each change would save the trainer by itself, largest first."""
    savings = []
    for words, values in trainer_changes(estimate):
        other = estimate.with_values(values)
        saved = estimate.trainer.total - other.trainer.total
        if saved > WORTH * estimate.trainer.total:
            savings.append(Saving(words, saved, other.trainer.fits))
    return sorted(savings, key=lambda saving: -saving.saved)


def first_that_fits(estimate: Estimate) -> tuple[list[str], Estimate] | None:
    """Add changes until the trainer fits, cheap ones first, then leave out those that it fits without.

    Returns: the changes, and the plan with them; None if not even all of them are enough.
    """

    def changed(changes: list[Change]) -> Estimate:
        return estimate.with_values({key: value for _, values in changes for key, value in values.items()})

    chosen: list[Change] = []
    for change in trainer_changes(estimate):
        # Two changes of one key exclude each other: the later one replaces the earlier one.
        chosen = [*(each for each in chosen if each[1].keys().isdisjoint(change[1])), change]
        if changed(chosen).trainer.fits:
            break
    else:
        return None

    # A change that came late may have made earlier ones needless.
    for change in list(chosen):
        fewer = [each for each in chosen if each is not change]
        if changed(fewer).trainer.fits:
            chosen = fewer
    return [words for words, _ in chosen], changed(chosen)


def trainer_changes(estimate: Estimate) -> list[Change]:
    """Return the changes that the configuration allows: first those that cost nothing, then those that cost speed, then
    precision, then more machines, then another task."""
    training, ranks = estimate.training, estimate.ranks
    row, settings = training.row, training.settings
    prefix, on_gpu = "trainer." if estimate.serving else "", not estimate.machine.is_on_cpu
    model, longest, cut = f"{prefix}model.", estimate.config.seq_len, estimate.config.seq_len // 2

    # Eager attention keeps scores, sdpa a mask: both grow with the square of the row. Flash and flex keep neither.
    keeps_scores = on_gpu and row.attention in ("sdpa", "eager")
    has_states = any(layer.conv_state or layer.recurrent_state for layer in training.model.layers)
    may_share = on_gpu and not (row.attention == "eager" or has_states or training.model.tower)  # a row among ranks
    # `cp` ranks share a row and the heads, so `cp` divides both numbers.
    shared = math.gcd(ranks, training.model.heads)

    is_eager = row.attention == "eager"  # flash attention cannot compute these models' scores
    attention = {f"{model}attn": "flex_attention" if is_eager else "flash_attention_2"}
    precision = {f"{model}optimization_dtype": "bfloat16"}

    ac, everything = settings.ac, ActivationCheckpointing(freq=1, mode="full")
    selective = (f'{model}ac = {{ mode = "selective" }}', {f"{model}ac": ActivationCheckpointing(mode="selective")})
    mode = f', {model}ac.mode = "full"' if ac and ac.mode == "selective" else ""
    whole = (f"{model}ac.freq = 1{mode}", {f"{model}ac": everything})

    # This offloads the optimizer's state too, and a run refuses both.
    offload = {f"{model}fsdp_cpu_offload": True}
    offload_alone = offload | {f"{prefix}optim.cpu_offload": False}
    everything_offloaded = (_change(offload_alone if training.offloads_state else offload)[0], offload_alone)

    # Each line: whether the change is possible here, and the change.
    changes: list[tuple[bool, Change]] = [
        (keeps_scores and (is_eager or row.value_bytes == 2), _change(attention)),
        (settings.head_chunk > 256, _change({f"{model}head_chunk": 256})),
        (not settings.reshard_after_forward, _change({f"{model}reshard_after_forward": True})),
        (longest < row.tokens, _change({f"{prefix}micro_batch_tokens": longest})),
        (on_gpu and training.shards < ranks, _change({f"{model}dp_replicate": 1})),
        (on_gpu and row.value_bytes == 4, _change(precision)),
        # The kernels of flash attention know bfloat16 only.
        (keeps_scores and not is_eager and row.value_bytes == 4, _change(attention | precision)),
        (ac is None and not settings.compile, selective),
        (ac != everything, whole),
        (on_gpu and settings.reduce_dtype == "float32", _change({f"{model}reduce_dtype": "bfloat16"})),
        (training.optimizer == "adamw", _change({f"{prefix}optim.type": "adamw_8bit"})),
        *((may_share and cp > row.cp, _change({f"{model}cp": cp})) for cp in (2, 4, 8) if shared % cp == 0),
        (on_gpu and not settings.fsdp_cpu_offload, _change({f"{prefix}optim.cpu_offload": True})),
        (on_gpu, _change({f"{model}activation_offload": True})),
        *((on_gpu, _more_ranks(estimate, ranks * times)) for times in (2, 4, 8)),
        (on_gpu, everything_offloaded),
        (training.has_reference, _change({f"{prefix}loss.beta": 0})),
        (row.targets is None, (f"{model}lora.rank = 16", {f"{model}lora": Lora(rank=16)})),
        (True, _change({"seq_len": cut, f"{prefix}micro_batch_tokens": cut})),
    ]
    return [change for is_possible, change in changes if is_possible]


def _change(values: Values) -> Change:
    return ", ".join(f"{key} = {toml_value(value)}" for key, value in values.items()), values


def _more_ranks(estimate: Estimate, ranks: int) -> Change:
    """Return the change to so many ranks, which have GPUs of their own and share none with engines."""
    if not isinstance(estimate.config, RunConfig):
        return f"num_ranks = {ranks} (has {estimate.ranks})", {"num_ranks": ranks}
    first, machines = 1 + max(estimate.config.inference_gpu_ids or (0,)), machines_of(estimate.config, "trainer")
    values = {"trainer.num_ranks": ranks, "trainer_gpu_ids": tuple(range(first, first + ranks // machines))}
    return f"trainer_gpus = {ranks // machines} (has {estimate.ranks // machines})", values


def engine_advice(estimate: Estimate) -> Iterator[str]:
    """Yield settings that make an engine fit, with room for a request of `max_model_len`; none if it fits."""
    serving = estimate.serving
    if serving is None or estimate.engine_fits:
        return

    settings: list[tuple[str, Any]] = []
    if serving.is_on_cpu:
        settings += [("inference.cpu.kv_cache_gib", gib) for gib in (2, 4, 8, 16, 32)]
    else:
        # A cache that is too small needs a larger share; an engine that exceeds its GPU needs a smaller one.
        shares = (0.5, 0.6, 0.7) if serving.is_shared else (0.8,) if serving.fits else (0.95,)
        settings += [("inference.gpu_memory_utilization", share) for share in shares]
        tps = [tp for tp in (2, 4, 8) if tp > serving.tp and serving.model.heads % tp == 0]
        settings += [("inference.parallel.tp", tp) for tp in tps]
        settings.append(("inference.model.dtype", "bfloat16"))
        settings += [("inference.model.max_model_len", serving.max_model_len // part) for part in (2, 4)]

    # Each setting is tried by itself, as a user would change one.
    for key, value in settings:
        other = estimate.with_values({key: value})
        if other.serving and other.engine_fits:
            requests = f"{other.serving.num_requests:,.1f} requests of {other.serving.max_model_len:,} tokens at once"
            yield f"{key} = {toml_value(value)}: {requests}"


def fit_warnings(config: RunConfig, devices: Devices) -> list[str]:
    """Return a warning for a resolved run on a machine that is too small. It never stops a run: the plan may be wrong.

    There is none if the model's sizes, or the GPU's memory, are not known on this machine.
    """
    estimate = estimate_here(config, devices)
    if estimate is None or not (problems := list(estimate.problems())):
        return []
    found = None if estimate.trainer.fits else first_that_fits(estimate)
    ways = f" First that fits: {', '.join(found[0])}." if found else ""
    return [f"this may not fit: {'; '.join(problems)}.{ways} `trireme plan` with the same arguments shows all of it."]


def size_kv_cache(config: RunConfig, devices: Devices) -> RunConfig:
    """Give the engine of a resolved run the size of its KV cache, on a GPU that the trainer uses too.

    vLLM would compare the GPU's free memory before and after a forward pass: the trainer's share counts as the engine's
    own if it grows meanwhile, and the engine dies if it shrinks. With a size (`--kv-cache-memory-bytes`) vLLM
    measures nothing. It only requires that `--gpu-memory-utilization` is free once it has its CUDA context, which the
    share includes.

    Raises: ConfigError if the share has no room for one request, or the size cannot be worked out.
    """
    inference = config.inference
    if inference.arg("kv-cache-memory-bytes") is not None:
        return config

    # The engine needs the model in any case, so its config.json may be fetched.
    try:
        serving = plan_here(config, devices, fetch=True).serving
    except ConfigError as error:
        raise ConfigError(
            f"Trainer and engine share a GPU, and the engine's KV cache cannot be planned: {error} Or set its bytes: "
            "`kv-cache-memory-bytes` under `[inference.args]`."
        ) from error

    assert serving is not None, "a run without an engine"
    if not serving.fits:
        raise ConfigError(
            f"inference.gpu_memory_utilization = {inference.gpu_share:g} of {serving.memory / GIB:.1f} GiB leaves "
            f"{max(0.0, serving.room) / GIB:.2f} GiB for the engine's KV cache - expected at least "
            f"{serving.kv_bytes(serving.max_model_len) / GIB:.2f} GiB, for one request of {serving.max_model_len:,} "
            "tokens. Raise it (the trainer has the rest), or lower `inference.model.max_model_len` or "
            "`inference.max_num_seqs`. `trireme plan` with the same arguments shows what both need."
        )

    # vLLM checks for free memory once its CUDA context is there, so the share that it is given excludes that.
    free = inference.gpu_share - CONTEXT_BYTES / serving.memory
    # The user may have written either spelling of a flag, and ours must replace it.
    args = {name.replace("_", "-"): value for name, value in inference.args.items()}
    args |= {"gpu-memory-utilization": round(free, 4), "kv-cache-memory-bytes": int(serving.room)}
    return updated(config, {"inference.args": args})
