"""Derive every value that follows from another one, so that `run.json` is explicit down to the last port.

Each step returns the values of one group of keys. Values that users gave are never changed, except that GPU ids and
parallelism mean nothing on CPU.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.network import EVERYWHERE, listening_address
from trireme.base.paths import RunPaths, step_folder, step_of
from trireme.base.processes import free_port
from trireme.config.files import ProcessName
from trireme.config.inference import low_bit_error
from trireme.config.losses import resolve_loss
from trireme.config.model.folder import needs_eager, read_config
from trireme.config.model.state_layers import dtype_on_cpu
from trireme.config.orchestrator import EVALUATION_KEYS, SOURCE_TABLES, EvaluatedEnvironment, Evaluation, Source
from trireme.config.run import Model, RunConfig, place_of
from trireme.config.sampling import template_fallback
from trireme.config.section import AnySection
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel

Values = dict[str, Any]  # dotted key -> value

# Ports of processes that are started separately. `rl` takes free ports instead.
KNOWN_PORTS = {
    "inference.server.port": 8000,
    "orchestrator.server.port": 8001,
    "ports.batches": 5555,
    "ports.weights": 5556,
    "ports.ranks": 5557,
}

# The engine's share of a GPU that it shares with the trainer, unless the user sets one. The trainer has the rest.
_SHARED_GPU_UTILIZATION = 0.4


def resolve(config: RunConfig, devices: Devices, *, section: ProcessName | None = None, node: int = 0) -> RunConfig:
    """Return the same run with nothing left open.

    Args:
        section: for a process started by its own command: its ports are then the documented ones, not free ones.
        node: the number of this machine among those of its table in `[hosts]`.
    """
    # The order matters, as each step reads what those before it have filled in: addresses, the device, its GPUs, then
    # all that depends on them.
    config = updated(config, _origin(config.resume_from, config.trainer.ckpt.resume_step, "trainer."))
    config = updated(config, _hosts(config))
    config = updated(config, _listening(config, section, node))
    config = updated(config, {"device": _device(config, devices)})
    splits_gpus = section is None or _splits_gpus(config, devices, section)
    config = updated(config, _gpu_ids(config, devices, None if splits_gpus else section))
    config = updated(config, _models(config))
    config = updated(config, _precision_and_lengths(config, devices if splits_gpus else None))
    config = updated(config, _environments(config))
    config = updated(config, _broadcast(config, knows_all=splits_gpus))
    config = updated(config, _processes(config, devices))
    return updated(config, _ports(config, section))


def resolve_sft(config: SftConfig, devices: Devices) -> SftConfig:
    device = config.device if config.device != "auto" else "cuda" if devices.gpus else "cpu"
    # With an evaluation, one of several GPUs is the engine's.
    free = devices.num_gpus - (1 if config.eval and devices.num_gpus > 1 else 0)
    ranks = config.num_ranks or (max(1, free) if device == "cuda" else 1)
    name = config.model.name or Model().name
    config = updated(config, _origin(config.resume_from, config.ckpt.resume_step, ""))
    values: Values = {
        "device": device,
        "num_ranks": ranks,
        "model.name": name,
        "model.attn": _attention(config.model, name),
        "model.optimization_dtype": _dtype_of_passes(
            config.model, device, has_bfloat16=devices.have_bfloat16(range(ranks))
        ),
        "tokenizer.name": config.tokenizer.name or name,
        "micro_batch_tokens": config.micro_batch_tokens or config.seq_len,
        "threads": config.threads or max(1, devices.cores // ranks),
    }
    if config.eval:
        evaluated = _environments(updated(RunConfig(), {"orchestrator.eval": config.eval}))
        above = "orchestrator."
        values |= {key.removeprefix(above): evaluated[key] for key in evaluated if key.startswith(f"{above}eval.")}
    return updated(config, values)


def resolve_evaluating_run(config: SftConfig, devices: Devices) -> RunConfig:
    """Return the resolved run whose engine answers the evaluations of a resolved `sft`. Its folder is `evals`.

    On GPUs its engine takes the one after those of the ranks; if there is none, it shares the last one.
    """
    given, ranks = config.inference, config.num_ranks or 1
    values: Values = {
        "output_dir": config.paths.evals,
        "seed": config.seed,
        "seq_len": config.seq_len,
        "device": config.device,
        "log_level": config.log_level,
        "disk_timeout_s": config.disk_timeout_s,
        "env_vars": config.env_vars,
        "model.name": config.model.name,
        "model.vlm": config.model.vlm,
        "trainer.tokenizer.name": config.tokenizer.name,
        "trainer.num_ranks": ranks,
        "inference": given,
        "orchestrator.eval": config.eval,
    }

    # An engine that shares a GPU with a rank must leave it most of the memory.
    if config.device == "cuda":
        is_shared = ranks >= devices.num_gpus
        values |= {"trainer_gpu_ids": tuple(range(ranks)), "inference_gpu_ids": (ranks - 1 if is_shared else ranks,)}
        if is_shared and "gpu_memory_utilization" not in given.model_fields_set:
            values["inference"] = updated(given, {"gpu_memory_utilization": _SHARED_GPU_UTILIZATION})
    return resolve(updated(RunConfig(), values), devices)


def updated(section: AnySection, values: Values) -> AnySection:
    """Return a copy with other values at dotted keys."""
    own = {key: value for key, value in values.items() if "." not in key}
    for name in {key.partition(".")[0] for key in values if "." in key}:
        below = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = updated(getattr(section, name), below)
    return section.model_copy(update=own)


def resuming(config: RunConfig) -> RunConfig:
    """Return the run as its processes see it once its folder is prepared: they resume from whatever is in it, on their
    first start and on restarts."""
    return updated(config, {"resume": True, "trainer.ckpt.resume_step": None})


def _origin(other: Path | None, step: int | None, prefix: str) -> Values:
    """Put the step that another run is taken up at into the path of its checkpoint: a step by itself is of this run."""
    if other is None or step is None:
        return {}
    named = step_of(other)
    if step == 0 or (named is not None and step not in (-1, named)):
        found = f"the checkpoint of step {named}" if named else "another run"
        raise ConfigError(
            f"resume_from = {other}, {found}, with {prefix}ckpt.resume_step = {step} - expected a step that has a "
            "checkpoint there, named once. Leave `resume_step` out for the newest; the base model needs no other run."
        )
    found_at = other if step == -1 or named else step_folder(RunPaths(other).checkpoints, step)
    return {"resume_from": found_at, f"{prefix}ckpt.resume_step": None}


def _hosts(config: RunConfig) -> Values:
    """Take an address to bind as the address to be reached at too, if `[hosts]` does not give one."""
    bound = config.inference.server
    is_bound = "host" in bound.model_fields_set and bound.host not in (EVERYWHERE, "::", "")
    return {"hosts.inference": (bound.host,)} if is_bound and "inference" not in config.hosts.model_fields_set else {}


def _listening(config: RunConfig, section: ProcessName | None, node: int) -> Values:
    """Let the servers that start here listen at the addresses of `[hosts]`, unless the user binds them elsewhere."""
    values: Values = {}
    if section in (None, "inference"):
        with suppress(ValueError, IndexError):  # the rules refuse an address that cannot be read
            host, port = place_of(config.hosts.inference[node])
            if "host" not in config.inference.server.model_fields_set:
                values["inference.server.host"] = listening_address(host)
            if port is not None:
                values["inference.server.port"] = port
    if section in (None, "orchestrator") and "host" not in config.orchestrator.server.model_fields_set:
        values["orchestrator.server.host"] = listening_address(config.hosts.orchestrator)
    return values


def _device(config: RunConfig, devices: Devices) -> str:
    if config.device != "auto":
        return config.device
    if len(config.hosts.all) > 1:
        raise ConfigError(
            f"`[hosts]` names {', '.join(config.hosts.all)}, and `device` is not set - expected one, as each machine "
            'would otherwise decide for itself. Write `device = "cuda"` or `device = "cpu"`.'
        )
    # GPUs that were asked for by number are meant, even without any here: the rules refuse that.
    asked = (config.inference_gpu_ids, config.trainer_gpu_ids, config.inference_gpus, config.trainer_gpus)
    return "cuda" if devices.gpus or any(value is not None for value in asked) else "cpu"


def _splits_gpus(config: RunConfig, devices: Devices, section: ProcessName) -> bool:
    """Return whether a process that is started alone can tell the GPUs of both sides, and splits them as `rl` does.

    On one machine it can, unless CUDA_VISIBLE_DEVICES hides some: then the user splits them, by one value for each
    command.

    Raises: ConfigError if several of its kind are on this machine, and nothing says which GPUs are whose.
    """
    if config.device == "cpu" or not config.hosts.are_one_machine:
        return False
    sides = {"inference": config.inference_gpu_ids, "trainer": config.trainer_gpu_ids}
    are_given, addresses = None not in sides.values(), config.hosts.by_process[section]

    if devices.hides_some and not are_given:
        return False
    if len(addresses) > 1 and sides.get(section) is None:
        raise ConfigError(
            f"`hosts.{section}` names {', '.join(addresses)}, all on this machine, and `{section}_gpu_ids` is not set "
            f"- expected GPUs of its own for each. Add `--{section}-gpu-ids 0` to the first command, and so on."
        )
    return True


def _gpu_ids(config: RunConfig, devices: Devices, section: ProcessName | None) -> Values:
    """Split the GPUs: contiguous, engines first; a side without a setting takes what the other leaves.

    A single GPU is shared. With a section, that process has all GPUs here, and knows nothing of the others'.
    """
    if config.device == "cpu":
        return {"inference_gpu_ids": (), "trainer_gpu_ids": (), "inference_gpus": None, "trainer_gpus": None}
    engines, trainer, visible = config.inference_gpu_ids, config.trainer_gpu_ids, devices.num_gpus
    if not config.hosts.inference:  # engines join on GPUs of their own
        engines = engines or ()

    # A process that knows itself alone takes all GPUs that it sees, or as many as it was given.
    if section is not None:
        if section == "inference":
            engines = engines or _take(config.inference_gpus or visible, devices)
        if section == "trainer":
            trainer = trainer or _take(config.trainer_gpus or visible, devices)
        return {"inference_gpu_ids": engines or (), "trainer_gpu_ids": trainer or ()}

    # A side without a number takes what the other leaves; if neither has one, half each, the odd one for engines.
    if engines is None:
        asked = len(trainer) if trainer is not None else config.trainer_gpus
        share = max(1, (visible + 1) // 2 if asked is None else visible - asked)
        engines = _take(config.inference_gpus or share, devices, taken=trainer or ())

    if trainer is None:
        left = max(0, visible - len(engines)) if visible > 1 else 1
        trainer = _take(config.trainer_gpus or left, devices, taken=engines)
    return {"inference_gpu_ids": engines, "trainer_gpu_ids": trainer}


def _take(count: int, devices: Devices, *, taken: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the first `count` ids that are not taken, beyond the machine's own if it has too few: the rules refuse
    those."""
    if devices.num_gpus == 1 and count == 1:
        return (0,)
    free = (number for number in range(count + len(taken) + max(taken, default=0)) if number not in taken)
    return tuple(islice(free, count))


def _models(config: RunConfig) -> Values:
    """Use one name for all that do not have their own. The run's own name follows if only a process's is given."""
    shared = config.model.name
    if "name" not in config.model.model_fields_set:
        shared = config.trainer.model.name or config.inference.model.name or shared
    trained = config.trainer.model.name or shared
    return {
        "model.name": shared,
        "trainer.model.name": trained,
        "trainer.model.attn": _attention(config.trainer.model, trained),
        "trainer.model.vlm": config.trainer.model.vlm or config.model.vlm,
        "trainer.tokenizer.name": config.trainer.tokenizer.name or trained,
        "inference.model.name": config.inference.model.name or shared,
    }


def _attention(model: TrainerModel, name: str | None) -> str:
    """Return the attention that was asked for, or `eager` if none was and the model has no `sdpa` or a wrong one.

    The rules refuse such a model with ranks that share a row, which `eager` cannot do. A model that is still to be
    downloaded is left to the trainer.
    """
    if "attn" in model.model_fields_set or model.cp > 1:
        return model.attn
    return "eager" if needs_eager(read_config(name)) else model.attn


def _precision_and_lengths(config: RunConfig, devices: Devices | None) -> Values:
    """Choose precisions, which all processes must choose alike.

    Args:
        devices: None if a process knows its own GPUs alone. They are taken to have bfloat16, and the rules refuse
            those that have none.
    """
    rounds = bool(low_bit_error(config.inference))
    ids = {*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ())}
    has_bfloat16 = devices is None or devices.have_bfloat16(ids)

    dtype: str = config.inference.model.dtype
    if dtype == "auto" and config.device == "cpu":
        # vLLM rounds weights to 8 bits only in half precision.
        dtype = "bfloat16" if rounds else dtype_on_cpu(read_config(config.inference.model.name))
    elif dtype == "auto":
        # vLLM's own choice would follow the model's config.json, and differ from what the trainer sends.
        dtype = "bfloat16" if has_bfloat16 else "float16"

    # The probe can demand nearly equal logprobs only if nothing is rounded; otherwise it measures the rounding.
    passes = _dtype_of_passes(config.trainer.model, config.device, has_bfloat16=has_bfloat16)
    exact = dtype == passes == "float32" and not rounds

    return {
        "inference.model.dtype": dtype,
        "trainer.model.optimization_dtype": passes,
        "weight_broadcast.probe_tolerance": config.weight_broadcast.probe_tolerance or (1e-3 if exact else None),
        "inference.model.max_model_len": config.inference.model.max_model_len or config.seq_len,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens or config.seq_len,
        "trainer.loss": resolve_loss(config.trainer.loss, length=config.loss_length),
        "orchestrator.env": tuple(map(partial(_with_loss, config), config.orchestrator.env)),
    }


def _with_loss(config: RunConfig, source: Source) -> Source:
    """Fill in a source's own loss, which goes over the run's as the user wrote that."""
    if source.loss is None:
        return source
    own = config.of(source.resolved_name)
    loss = resolve_loss(own.trainer.loss, length=own.loss_length)
    # Every key counts as given: one that this loss does not read must not be taken from the run's.
    return updated(source, {"loss": updated(loss, dict(loss))})


def _dtype_of_passes(model: TrainerModel, device: str, *, has_bfloat16: bool) -> str:
    """Return the precision of the trainer's passes: bfloat16 on GPUs that have it, unless the user sets one."""
    is_half = device == "cuda" and has_bfloat16 and "optimization_dtype" not in model.model_fields_set
    return "bfloat16" if is_half else model.optimization_dtype


def _environments(config: RunConfig) -> Values:
    """Name environments, and fill in each table of a source from the run's."""

    def filled(source: Source) -> Source:
        own = config.orchestrator.of(source.resolved_name)
        tables = [
            name for name in SOURCE_TABLES if getattr(source, name) is not None and getattr(own, name) is not None
        ]
        return updated(source, {"name": source.resolved_name, **{name: getattr(own, name) for name in tables}})

    values: Values = {"orchestrator.env": tuple(map(filled, config.orchestrator.env))}
    if evaluation := config.orchestrator.eval:
        longest = evaluation.sampling.max_tokens or config.orchestrator.sampling.max_tokens
        values["orchestrator.eval.sampling.max_tokens"] = longest
        for name, value in template_fallback(evaluation.sampling, config.orchestrator.sampling).items():
            values[f"orchestrator.eval.sampling.{name}"] = value
        # A table that sets other keys would have the default of `Sampling`, 1.0; evaluations are greedy by default.
        if "temperature" not in evaluation.sampling.model_fields_set:
            values["orchestrator.eval.sampling.temperature"] = Evaluation().sampling.temperature

        # Each environment's own keys over those of all, so that the file says what holds for it.
        above = "orchestrator.eval."
        whole = updated(evaluation, {key.removeprefix(above): values[key] for key in values if key.startswith(above)})

        def evaluated(each: EvaluatedEnvironment) -> EvaluatedEnvironment:
            own = whole.of(each.resolved_name)
            keys = (*EVALUATION_KEYS, *(["sampling"] if each.sampling is not None else []))
            return updated(each, {"name": each.resolved_name, **{key: getattr(own, key) for key in keys}})

        values["orchestrator.eval.env"] = tuple(map(evaluated, evaluation.env))
    return values


def _broadcast(config: RunConfig, *, knows_all: bool) -> Values:
    """Choose the transport. All processes must choose the same, so one that knows only its own GPUs takes nccl."""
    if config.device == "cpu":
        return {"weight_broadcast.type": "gloo"} if config.weight_broadcast.type == "auto" else {}
    kind, engines, trainer = config.weight_broadcast.type, config.inference_gpu_ids or (), config.trainer_gpu_ids or ()
    # On a GPU that both use, memory handles replace copies, and the engine must leave room for the trainer.
    shared = kind == "ipc" or (knows_all and bool(engines) and set(engines) == set(trainer))
    values: Values = {}
    if kind == "auto":
        values["weight_broadcast.type"] = "ipc" if shared and len(engines) == 1 else "nccl"
    if shared and "gpu_memory_utilization" not in config.inference.model_fields_set:
        values["inference.gpu_memory_utilization"] = _SHARED_GPU_UTILIZATION
    return values


def _processes(config: RunConfig, devices: Devices) -> Values:
    """Choose ranks, threads and parallelism.

    On CPU, trainer and engine work at the same time unless the run is synchronous, so each gets half of the cores. With
    all cores for both, OpenMP's threads wait for one another while they spin: measured at a fifth of the speed.
    """
    nodes, on_cpu = max(1, len(config.hosts.trainer)), config.device == "cpu"
    ranks = config.trainer.num_ranks or nodes * max(1, len(config.trainer_gpu_ids or ()))
    per_side = devices.cores // 2 if on_cpu and not config.synchronous else devices.cores
    cores = max(1, per_side) * nodes  # the machines are assumed to be alike

    # On CPU, a trial step would delay the engine that starts on the same cores.
    tries_step = not on_cpu
    parallel = config.inference.parallel
    engines = max(1, len(config.inference_gpu_ids or ()) // parallel.tp)
    return {
        "trainer.num_ranks": ranks,
        "trainer.threads": config.trainer.threads or max(1, cores // ranks),
        "trainer.try_step": tries_step if config.trainer.try_step is None else config.trainer.try_step,
        "inference.parallel.tp": 1 if on_cpu else parallel.tp,
        "inference.parallel.dp": 1 if on_cpu else parallel.dp or engines,
        "inference.cpu.threads": config.inference.cpu.threads or (cores if on_cpu else None),
    }


def _ports(config: RunConfig, section: ProcessName | None) -> Values:
    """Choose a port for 0 too, which the kernel would replace later: other processes must know it."""
    has_ranks = section is not None and len(config.hosts.trainer) > 1
    given: Values = {key: attrgetter(key)(config) for key in KNOWN_PORTS if has_ranks or key != "ports.ranks"}
    for key, port in given.items():
        if section:
            given[key] = KNOWN_PORTS[key] if port is None else port
        else:
            # A free port may be one that the user gave to another key.
            while not port:
                port = free if (free := free_port(EVERYWHERE)) not in given.values() else None
            given[key] = port
    return given
