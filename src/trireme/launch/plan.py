"""Process specs of a run, computed from its resolved configuration, so that `--dry-run` shows exactly what starts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from trireme.base.devices import Devices
from trireme.base.network import url_of
from trireme.config.files import ProcessName, without_secrets
from trireme.config.inference import InferenceServer
from trireme.config.orchestrator import SOURCE_TABLES, StatusServer
from trireme.config.run import RunConfig


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a run.

    Example:
        ProcessSpec(name="inference", argv=("python", "-m", "trireme.cli.inference", "--run", "…/run.json"),
                    env={"CUDA_VISIBLE_DEVICES": "0,1"}, log=Path("…/logs/inference.stdout"), gpus=(0, 1),
                    ports={"http": 8000})
    """

    name: ProcessName | Literal["eval"]  # the last one evaluates the weights of `sft`
    argv: tuple[str, ...]
    env: Mapping[str, str]  # added to the launcher's own
    log: Path
    gpus: tuple[int, ...]  # numbers in the configuration; CUDA_VISIBLE_DEVICES has the machine's names
    ports: Mapping[str, int]  # purpose -> port that it binds
    num_ranks: int = 1
    health: str | None = None  # URL that answers with 200 while the server is healthy


Plan = dict[ProcessName, ProcessSpec]
"""The processes of a run, in the order in which they are started. They wait for each other, so any order works."""


def plan(config: RunConfig, run_file: Path, devices: Devices | None = None) -> Plan:
    """Return the process specs of a resolved run.

    Args:
        run_file: file of the resolved configuration, which each process reads.
        devices: names of the visible GPUs; None to use the ids of the configuration.
    """
    names = devices.gpus if devices else ()

    def spec(
        name: ProcessName,
        gpus: tuple[int, ...],
        threads: int | None,
        ports: Mapping[str, int | None],
        *,
        more: Mapping[str, str] | None = None,
        server: InferenceServer | StatusServer | None = None,
    ) -> ProcessSpec:
        environment = {
            # An empty value hides all.
            "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # byte code halves the start-up time
            "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads sleep: spinning ones take a core from a busy process
        }
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", f"trireme.cli.{name}", "--run", str(run_file)),
            env=environment
            | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
            | dict(more or {})
            | env_vars_of(config, name),
            log=config.paths.log(name),
            gpus=gpus,
            ports={purpose: port for purpose, port in ports.items() if port is not None},
            num_ranks=config.trainer.num_ranks or 1 if name == "trainer" else 1,
            health=f"{url_of(server.host, server.port)}/health" if server and server.port else None,
        )

    vllm = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and for weight updates
        "VLLM_PLUGINS": "trireme",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    cpu, engine, server = config.inference.cpu, config.inference.server, config.orchestrator.server
    if config.device == "cpu":
        vllm |= {"VLLM_CPU_KVCACHE_SPACE": str(cpu.kv_cache_gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    gpus = config.inference_gpu_ids or ()
    inference = spec("inference", gpus, cpu.threads, {"http": engine.port}, more=vllm, server=engine)

    # No GPU and a single OpenMP thread for the orchestrator: the cores belong to training and inference.
    ports = {"status": server.port, "batches": config.ports.batches}
    orchestrator = spec("orchestrator", (), 1, ports, server=server)

    gpus, ports = config.trainer_gpu_ids or (), {"weights": config.ports.weights}
    trainer = spec("trainer", gpus, config.trainer.threads, ports)
    others: Plan = {"orchestrator": orchestrator, "trainer": trainer}
    return {"inference": inference, **others} if config.hosts.inference else others


def env_vars_of(config: RunConfig, name: ProcessName) -> dict[str, str]:
    """Return the variables that the user sets for a process."""
    own = attrgetter(f"{name}.env_vars")(config)
    return {**config.env_vars, **own}


def set_environment(variables: Mapping[str, str]) -> None:
    """Set variables that the user has not set. Only Trireme decides which GPUs are visible."""
    for name, value in variables.items():
        if name == "CUDA_VISIBLE_DEVICES":
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def describe(plan: Plan, config: RunConfig, *, only: ProcessName | None = None) -> str:
    """Return the text of `--dry-run`."""
    blocks = ["\n".join(_facts(config))]
    for process in plan.values():
        if only in (None, process.name):
            gpus = f"GPU {','.join(map(str, process.gpus))}" if process.gpus else "CPU"
            ports = ", ".join(f"{purpose} {port}" for purpose, port in process.ports.items())
            ranks = f" in {process.num_ranks} ranks" if process.num_ranks > 1 else ""
            shown = without_secrets(dict(process.env))
            environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in shown.items())
            blocks.append(
                f"{process.name}  on {gpus}{ranks}; ports: {ports}\n"
                f"  log {process.log}\n"
                f"  env {environment}\n"
                f"  $ {shlex.join(process.argv)}"
            )
    return "\n\n".join(blocks)


def _facts(config: RunConfig) -> Iterator[str]:
    orchestrator = config.orchestrator
    yield f"run      {config.paths.root}   {config.max_steps} steps on {config.device}, seed {config.seed}"
    if config.resume_from and not config.resume:
        without = config.trainer.ckpt.resume_without
        yield f"from     {config.resume_from}{', without its ' + ', '.join(without) if without else ''}"
    if not config.hosts.are_loopback:
        hosts = config.hosts
        yield (
            f"hosts    inference {', '.join(hosts.inference) or 'joins later'}; orchestrator {hosts.orchestrator}; "
            f"trainer {', '.join(hosts.trainer)}"
        )

    # Engines must start from the same weights; another name is legal, as the same model may lie in two places.
    other = config.inference.model.name
    served = "" if other == config.trainer.model.name else f" (trainer), {other} (inference: must be the same weights)"
    yield f"model    {config.trainer.model.name}{served}"
    if orchestrator.env:
        yield f"env      {', '.join(environment.resolved_name for environment in orchestrator.env)}"

    sizes = {name: own.rollouts_per_example for name, own in orchestrator.sources.items()}
    groups = f"{config.num_groups} groups x {next(iter(sizes.values()), orchestrator.rollouts_per_example)}"
    of_each = ", ".join(f"{name} x {size}" for name, size in sizes.items())
    if len(set(sizes.values())) > 1:
        groups = f"about {config.num_groups} groups ({of_each}), the last of which may exceed it"
    if orchestrator.token_batch_size:
        yield f"batch    {orchestrator.batch_in_words} in whole groups ({of_each}), the last of which may exceed them"
    else:
        in_all = config.max_steps * orchestrator.num_rollouts(config.seq_len)
        yield f"batch    {orchestrator.batch_in_words} = {groups}; {in_all:,} rollouts in all"

    # Each source may have tables of its own.
    for each in orchestrator.env:
        keys = [name for name in (*SOURCE_TABLES, "loss") if getattr(each, name) is not None]
        if keys:
            yield f"source   {each.resolved_name}: {', '.join(keys)} of its own"

    turns = [own.sampling.max_tokens for own in orchestrator.sources.values()] or [orchestrator.sampling.max_tokens]
    turn = " or ".join(f"{turn:,} tokens" if turn else "the context" for turn in dict.fromkeys(turns))
    yield (
        f"lengths  samples of up to {config.seq_len:,} tokens, context {config.inference.model.max_model_len:,}, "
        f"turns of up to {turn}"
    )

    # The two limits on stale data: how far generation runs ahead, and the oldest token that is trained on.
    lag = (
        "none: fully synchronous"
        if config.synchronous
        else (
            f"generation runs at most {config.max_async_level} step(s) ahead; "
            f"tokens older than {orchestrator.max_off_policy_steps} versions are never trained on"
        )
    )
    yield f"lag      {lag}"

    # Precisions belong to the tolerance: it bounds the difference that they cause.
    broadcast = config.weight_broadcast
    tolerance = "as by rounding" if broadcast.probe_tolerance is None else f"by {broadcast.probe_tolerance:g}"
    yield (
        f"weights  over {broadcast.type}; logprobs may differ {tolerance} "
        f"(trainer {config.trainer.model.optimization_dtype}, engine {config.inference.model.dtype})"
    )
