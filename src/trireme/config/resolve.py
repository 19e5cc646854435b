"""Fills in everything that follows from something else, so that `run.json` is explicit down to the last port.

Each function answers for one group of keys and returns what to set; what users gave is never changed, except that GPU
ids and parallelism mean nothing on CPU.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any, TypeVar

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.network import EVERYWHERE, listening_address
from trireme.base.processes import free_port
from trireme.config.files import ProcessName
from trireme.config.losses import resolve_loss, used_keys
from trireme.config.model_folder import caps_scores, config_file
from trireme.config.orchestrator import Environment, Evaluation
from trireme.config.run import Model, RunConfig, places_of
from trireme.config.section import Section
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel

AnySection = TypeVar("AnySection", bound=Section)
Values = dict[str, Any]  # dotted key -> value

# Where separately started processes meet, when nobody says otherwise. `rl` takes free ports instead.
KNOWN_PORTS = {
    "inference.server.port": 8000,
    "orchestrator.server.port": 8001,
    "ports.batches": 5555,
    "ports.weights": 5556,
    "ports.ranks": 5557,
}

# One GPU holds both the engine and the trainer: the engine's share, unless users say otherwise.
_SHARED_GPU_UTILIZATION = 0.4


def resolve(config: RunConfig, devices: Devices, *, section: ProcessName | None = None, node: int = 0) -> RunConfig:
    """The same run with nothing left open.

    Args:
        section: for a process started by its own command: its ports are then the documented ones, not free ones.
        node: which of the machines of its table in `[hosts]` this one is.
    """
    config = updated(config, _hosts(config))
    config = updated(config, _listening(config, section, node))
    config = updated(config, _device(config, devices))
    config = updated(config, _gpu_ids(config, devices, section))
    for derived in (_models, _attention, _precision, _lengths, _loss, _environments):
        config = updated(config, derived(config))
    config = updated(config, _broadcast(config, alone=section is not None))
    config = updated(config, _processes(config, devices))
    return updated(config, _ports(config, section))


def resolve_sft(config: SftConfig, devices: Devices) -> SftConfig:
    device = config.device if config.device != "auto" else "cuda" if devices.gpus else "cpu"
    ranks = config.num_ranks or (max(1, devices.num_gpus) if device == "cuda" else 1)
    values: Values = {"device": device, "num_ranks": ranks}
    values["model.name"] = config.model.name or Model().name
    values["model.attn"] = _attention_of(config.model, values["model.name"])
    values["tokenizer.name"] = config.tokenizer.name or values["model.name"]
    values["micro_batch_tokens"] = config.micro_batch_tokens or config.seq_len
    values["threads"] = config.threads or max(1, devices.cores // ranks)
    return updated(config, values)


def updated(section: AnySection, values: Values) -> AnySection:
    """A copy with other values at dotted keys."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name in {key.partition(".")[0] for key in values if "." in key}:
        below = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = updated(getattr(section, name), below)
    return section.model_copy(update=own)


WILDCARDS = (EVERYWHERE, "::", "")


def _hosts(config: RunConfig) -> Values:
    """An address to bind was also the one to be reached at before there was `[hosts]`, and still is."""
    hosts, bound = config.hosts, config.inference.server
    values: Values = {}
    if config.ports.host is not None and "orchestrator" not in hosts.model_fields_set:
        values |= {"hosts.orchestrator": config.ports.host, "ports.host": None}
    if "host" in bound.model_fields_set and bound.host not in WILDCARDS and "inference" not in hosts.model_fields_set:
        values["hosts.inference"] = (bound.host,)
    return values


def _listening(config: RunConfig, section: ProcessName | None, node: int) -> Values:
    """The servers that start here listen at the address at which the others look for them, or where they were told."""
    values: Values = {}
    if section in (None, "inference"):
        for place in places_of(config.hosts.inference)[node : node + 1]:
            if "host" not in config.inference.server.model_fields_set:
                values["inference.server.host"] = listening_address(place.host)
            if place.port is not None:
                values["inference.server.port"] = place.port
    if section in (None, "orchestrator") and "host" not in config.orchestrator.server.model_fields_set:
        values["orchestrator.server.host"] = listening_address(config.hosts.orchestrator)
    return values


def _device(config: RunConfig, devices: Devices) -> Values:
    """GPUs that were asked for by number are meant: without any here, that is for `rules` to refuse."""
    if config.device != "auto":
        return {}
    if len(config.hosts.all) > 1:
        raise ConfigError(
            f"`[hosts]` names {', '.join(config.hosts.all)}, and `device` is left open - expected it to be said: each "
            'machine would answer for itself alone. Write `device = "cuda"` or `device = "cpu"`.'
        )
    return {"device": "cuda" if devices.gpus or _asks_for_gpus(config) else "cpu"}


def _asks_for_gpus(config: RunConfig) -> bool:
    asked = (config.inference_gpu_ids, config.trainer_gpu_ids, config.inference_gpus, config.trainer_gpus)
    return any(value is not None for value in asked)


def _gpu_ids(config: RunConfig, devices: Devices, section: ProcessName | None) -> Values:
    if config.device == "cpu":
        return {"inference_gpu_ids": (), "trainer_gpu_ids": (), "inference_gpus": None, "trainer_gpus": None}
    engines, trainer = _split_gpus(config, devices) if section is None else _own_gpus(config, devices, section)
    return {"inference_gpu_ids": engines, "trainer_gpu_ids": trainer}


def _own_gpus(config: RunConfig, devices: Devices, section: ProcessName) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A process started alone takes all it can see, and knows nothing of the others'."""
    engines, trainer = config.inference_gpu_ids or (), config.trainer_gpu_ids or ()
    if section == "inference":
        engines = engines or _take(config.inference_gpus or devices.num_gpus, devices)
    if section == "trainer":
        trainer = trainer or _take(config.trainer_gpus or devices.num_gpus, devices)
    return engines, trainer


def _split_gpus(config: RunConfig, devices: Devices) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contiguous, engines first; a side that says nothing takes what the other leaves. A single GPU is shared."""
    engines, trainer = config.inference_gpu_ids, config.trainer_gpu_ids
    if engines is None:
        engines = _take(config.inference_gpus or _engine_share(config, devices), devices, taken=trainer or ())
    if trainer is None:
        left = max(0, devices.num_gpus - len(engines))
        trainer = _take(config.trainer_gpus or (left if devices.num_gpus > 1 else 1), devices, taken=engines)
    return engines, trainer


def _engine_share(config: RunConfig, devices: Devices) -> int:
    """How many GPUs engines get when they did not say: what the trainer leaves, or half of all, rounded up."""
    asked = len(config.trainer_gpu_ids) if config.trainer_gpu_ids is not None else config.trainer_gpus
    return max(1, (devices.num_gpus + 1) // 2 if asked is None else devices.num_gpus - asked)


def _take(count: int, devices: Devices, *, taken: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The first `count` ids that are not taken; past the machine's own when it has too few, for `rules` to refuse."""
    if devices.num_gpus == 1 and count == 1:
        return (0,)
    free = (number for number in range(count + len(taken) + max(taken, default=0)) if number not in taken)
    return tuple(islice(free, count))


def _models(config: RunConfig) -> Values:
    """One name for all that do not have their own; the run's own name follows when only a process's is given."""
    shared = config.model.name
    if "name" not in config.model.model_fields_set:
        shared = config.trainer.model.name or config.inference.model.name or shared
    trained = config.trainer.model.name or shared
    return {
        "model.name": shared,
        "trainer.model.name": trained,
        "trainer.tokenizer.name": config.trainer.tokenizer.name or trained,
        "inference.model.name": config.inference.model.name or shared,
    }


def _attention(config: RunConfig) -> Values:
    return {"trainer.model.attn": _attention_of(config.trainer.model, config.trainer.model.name)}


def _attention_of(model: TrainerModel, name: str | None) -> str:
    """Return what was asked for, or `eager` where nothing was and the model, if it is here, caps its attention scores.

    With ranks that share a row, which `eager` cannot do, `rules_model` refuses the run. A model that is still to be
    downloaded is left to the trainer.
    """
    file = None if "attn" in model.model_fields_set or model.cp > 1 or not name else config_file(name)
    try:
        return "eager" if file and caps_scores(json.loads(file.read_text())) else model.attn
    except ValueError:  # no JSON, which the rules say
        return model.attn


def _precision(config: RunConfig) -> Values:
    on_cpu = config.device == "cpu" and config.inference.model.dtype == "auto"
    dtype = "float32" if on_cpu else config.inference.model.dtype
    exact = dtype == config.trainer.model.optimization_dtype == "float32"
    tolerance = config.weight_broadcast.probe_tolerance or (1e-3 if exact else 0.5)
    return {"inference.model.dtype": dtype, "weight_broadcast.probe_tolerance": tolerance}


def _lengths(config: RunConfig) -> Values:
    return {
        "inference.model.max_model_len": config.inference.model.max_model_len or config.seq_len,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens or config.seq_len,
    }


def _loss(config: RunConfig) -> Values:
    """Return what the recipe's name stands for, in each of its keys."""
    loss = resolve_loss(config.trainer.loss, length=config.loss_length)
    return {f"trainer.loss.{key}": getattr(loss, key) for key in sorted(used_keys(loss))}


def _environments(config: RunConfig) -> Values:
    values: Values = {"orchestrator.env": tuple(map(_named, config.orchestrator.env))}
    if evaluation := config.orchestrator.eval:
        longest = evaluation.sampling.max_tokens or config.orchestrator.sampling.max_tokens
        values["orchestrator.eval.env"] = tuple(map(_named, evaluation.env))
        values["orchestrator.eval.sampling.max_tokens"] = longest
        if "temperature" not in evaluation.sampling.model_fields_set:
            values["orchestrator.eval.sampling.temperature"] = Evaluation().sampling.temperature
    return values


def _named(environment: Environment) -> Environment:
    return updated(environment, {"name": environment.name or environment.id})


def _broadcast(config: RunConfig, *, alone: bool) -> Values:
    """Processes that are started alone must come to the same answer, so there GPUs always mean nccl."""
    if config.device == "cpu":
        return {"weight_broadcast.type": "gloo"} if config.weight_broadcast.type == "auto" else {}
    shared = not alone and set(config.trainer_gpu_ids or ()) == set(config.inference_gpu_ids or ())
    values: Values = {}
    if config.weight_broadcast.type == "auto":
        values["weight_broadcast.type"] = "ipc" if shared else "nccl"
    if shared and "gpu_memory_utilization" not in config.inference.model_fields_set:
        values["inference.gpu_memory_utilization"] = _SHARED_GPU_UTILIZATION
    return values


def _processes(config: RunConfig, devices: Devices) -> Values:
    nodes = max(1, len(config.hosts.trainer))
    ranks = config.trainer.num_ranks or nodes * max(1, len(config.trainer_gpu_ids or ()))
    cores = _cores_per_side(config, devices) * nodes  # of machines that are alike
    values: Values = {
        "trainer.num_ranks": ranks,
        "trainer.threads": config.trainer.threads or max(1, cores // ranks),
        "trainer.try_step": _tries_step(config),
    }
    if config.device == "cpu":
        values |= {"inference.parallel.tp": 1, "inference.parallel.dp": 1}
        values |= {"inference.cpu.threads": config.inference.cpu.threads or cores}
    else:
        tp = config.inference.parallel.tp
        engines = max(1, len(config.inference_gpu_ids or ()) // tp)
        values |= {"inference.parallel.dp": config.inference.parallel.dp or engines}
    return values


def _tries_step(config: RunConfig) -> bool:
    """Not beside an engine that starts on the same cores, which it would delay, nor on the same GPU, whose memory the
    engine is measuring then."""
    if config.trainer.try_step is not None:
        return config.trainer.try_step
    return config.device == "cuda" and config.weight_broadcast.type != "ipc"


def _cores_per_side(config: RunConfig, devices: Devices) -> int:
    """On CPU trainer and engine work at the same time, unless the run is synchronous: each gets half of the cores.

    With all cores for both, OpenMP's threads wait for one another while they spin: measured at a fifth of the speed.
    """
    shared = config.device == "cpu" and not config.synchronous
    return max(1, devices.cores // 2) if shared else devices.cores


def _ports(config: RunConfig, section: ProcessName | None) -> Values:
    """A port of 0, which the kernel would choose later, is chosen here: others must know it."""
    given = {
        "inference.server.port": config.inference.server.port,
        "orchestrator.server.port": config.orchestrator.server.port,
        "ports.batches": config.ports.batches,
        "ports.weights": config.ports.weights,
    }
    if section and len(config.hosts.trainer) > 1:
        given["ports.ranks"] = config.ports.ranks
    if section:
        return {key: KNOWN_PORTS[key] if port is None else port for key, port in given.items()}
    chosen: set[int] = {port for port in given.values() if port}
    for key in [key for key, port in given.items() if not port]:
        while (port := free_port(EVERYWHERE)) in chosen:
            pass
        chosen.add(port)
        given[key] = port
    return {key: port for key, port in given.items() if port}
