"""The run as its machines load it: what was typed and no derived value, so that each machine derives the rest itself.
It is checked here as each machine will check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import to_table, to_toml
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, updated
from trireme.config.rules import check, file_problems, problems
from trireme.config.run import RunConfig
from trireme.config.section import NONE, Section
from trireme.tools.cluster.job import SubmitOptions
from trireme.tools.cluster.nodes import ClusterPlan, Wanted

MAX_GPUS_PER_NODE = 8  # of a machine whose number of GPUs the user does not give
_SPLIT = ("inference_gpus", "trainer_gpus", "inference_gpu_ids", "trainer_gpu_ids")


def run_toml(config: RunConfig, plan: ClusterPlan, *, output_dir: Path, origin: str) -> str:
    """Return the run as TOML.

    Args:
        output_dir: as the machines see it.
        origin: the file that the user typed.
    """
    table = _given(config) | {"output_dir": str(output_dir), "device": "cuda" if plan.gpus_per_node else "cpu"}
    if not plan.is_single:
        table = {key: value for key, value in table.items() if key not in (*_SPLIT, "hosts")}
    return f"# {origin}, as it was submitted\n\n{to_toml(table)}"


def _given(value: Any) -> Any:
    """Return the values that the user gave. Defaults are left out, as some are derived where nothing was given."""
    if isinstance(value, Section):
        names = [name for name in type(value).model_fields if name in value.model_fields_set]
        return {name: _given(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_given(item) for item in value]
    return NONE if value is None else to_table(value)


def machines_wanted(config: RunConfig, options: SubmitOptions) -> Wanted:
    """Return how many machines of how many GPUs the run takes.

    Raises: ConfigError where nothing says how many GPUs a machine has, or where the run places itself.
    """
    nodes, gpus_per_node = options.nodes, options.gpus_per_node
    if "hosts" in config.model_fields_set:
        raise ConfigError(
            "the run has a table `[hosts]` - expected none: the cluster chooses the machines, and their "
            "addresses are filled in then. Remove the table, or start the processes yourself."
        )
    if (nodes or 1) > 1 and (config.inference_gpu_ids is not None or config.trainer_gpu_ids is not None):
        raise ConfigError(
            f"inference_gpu_ids or trainer_gpu_ids was given, with `--nodes {nodes}` - GPUs of several machines are "
            "dealt out by number. Write `inference_gpus` and `trainer_gpus`, counted over all machines."
        )
    ids = {*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ())}
    asked = max(len(ids), (config.inference_gpus or 0) + (config.trainer_gpus or 0))  # over all machines
    if gpus_per_node is None and config.device == "cpu":
        gpus_per_node = 0
    elif gpus_per_node is None and asked:
        gpus_per_node = min(MAX_GPUS_PER_NODE, -(-asked // (nodes or 1)))
    elif gpus_per_node is None:
        raise ConfigError(
            "nothing says how many GPUs each machine has - expected `--gpus-per-node`, or GPUs in the run itself. "
            "Write `--gpus-per-node 8`, or 0 to run on CPUs."
        )
    if nodes is None:
        nodes = max(1, -(-asked // gpus_per_node)) if gpus_per_node else 1
    limits = (("--nodes", nodes, 1), ("--gpus-per-node", gpus_per_node, 0))
    raise_together(
        [
            f"`{flag} {number}` - expected {least} or more. Write `{flag} {max(least, 1)}`, or leave it out."
            for flag, number, least in limits
            if number < least
        ]
    )
    if nodes == 1 and asked > gpus_per_node:
        raise ConfigError(
            f"the run asks for {asked} GPUs, and its one machine has {gpus_per_node} - expected that to be enough. "
            f"Write `--nodes {-(-asked // gpus_per_node) if gpus_per_node else 2}`, or raise `--gpus-per-node`."
        )
    return Wanted(
        nodes,
        gpus_per_node,
        inference_gpus=config.inference_gpus,
        trainer_gpus=config.trainer_gpus,
        inference_nodes=options.inference_nodes,
        tp=config.inference.parallel.tp if gpus_per_node else 1,
    )


def check_on_machines(config: RunConfig, plan: ClusterPlan, *, cores: int) -> None:
    """Check the run as each of its machines will.

    Raises: ConfigError with the problems of all machines.
    """
    devices = Devices(gpus=tuple(map(str, range(plan.gpus_per_node))), cores=cores)
    config = updated(config, {"device": "cuda" if plan.gpus_per_node else "cpu"})
    if plan.is_single:
        check(resolve(config, devices), devices)
        return
    addresses = [f"10.99.0.{node.index + 1}" for node in plan.nodes]  # in place of those that the machines will have
    hosts = {
        "hosts.inference": tuple(addresses[index] for index in plan.machines_of("inference")),
        "hosts.orchestrator": addresses[plan.leader],
        "hosts.trainer": tuple(addresses[index] for index in plan.machines_of("trainer")),
    }
    config = updated(config, dict.fromkeys(_SPLIT) | hosts)
    found: list[str] = []
    for process in (process for node in plan.nodes for process in node.processes):
        own = updated(config, {f"{process.kind}_gpu_ids": process.gpus}) if process.gpus else config
        resolved = resolve(own, devices, section=process.kind, node=process.place)
        found += problems(resolved, devices, section=process.kind)
    raise_together(found)


def check_folder(config: RunConfig, plan: ClusterPlan) -> None:
    """Check the model, the environments' files and the run's folder, which the machines share with this one.

    Raises: ConfigError.
    """
    gpus = tuple(map(str, range(MAX_GPUS_PER_NODE))) if config.device == "cuda" else ()
    raise_together(file_problems(resolve(config, Devices(gpus=gpus, cores=1))))
    paths = config.paths
    if config.resume and not paths.holds_run and not paths.run_config.exists():
        raise ConfigError(
            f"`--resume` was given, and there is no run in {paths.root} - expected one to resume. Leave it out to "
            "start a new run, or check `output_dir` and `name`."
        )
    if paths.holds_run and not plan.is_single and not config.resume and config.trainer.ckpt.resume_step is None:
        raise ConfigError(
            f"{paths.root} holds a run already - expected an empty folder: several machines cannot agree on when to "
            "move it aside. Add --resume to resume it, or take another name: `--name another`."
        )
