"""The run as its machines load it: what was typed and nothing else, so that each machine derives the rest as `rl` and
the commands of single processes do; and checked here, as each of them will check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.files import NONE, to_table, to_toml
from trireme.config.problems import raise_together
from trireme.config.readiness import engines_other_model_exists, environment_files_exist, trainer_model_exists
from trireme.config.resolve import resolve, updated
from trireme.config.rules import check, problems
from trireme.config.run import RunConfig
from trireme.config.section import Section
from trireme.launch.folder import holds_run
from trireme.tools.cluster.nodes import ClusterPlan, Placed, Wanted

MOST_GPUS_PER_NODE = 8  # of a machine that nobody described
_SPLIT = ("inference_gpus", "trainer_gpus", "inference_gpu_ids", "trainer_gpu_ids")


def run_toml(config: RunConfig, plan: ClusterPlan, *, output_dir: Path, origin: str) -> str:
    """
    Args:
        output_dir: as the machines see it.
        origin: the file that users typed.
    """
    table = _said(config) | {"output_dir": str(output_dir), "device": "cuda" if plan.gpus_per_node else "cpu"}
    if not plan.is_single:
        table = {key: value for key, value in table.items() if key not in (*_SPLIT, "hosts")}
    return f"# {origin}, as it was submitted\n\n{to_toml(table)}"


def _said(section: Section) -> dict[str, Any]:
    """Values that were given. Defaults stay open: some are derived where nothing was said."""
    given = {name: getattr(section, name) for name in section.model_fields_set}
    return {name: _plain(given[name]) for name in type(section).model_fields if name in given}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return _said(value)
    if isinstance(value, tuple) and value and all(isinstance(item, Section) for item in value):
        return [_said(item) for item in value]
    return NONE if value is None else to_table(value)


# how many machines, and of what kind


def wanted(config: RunConfig, *, nodes: int | None, gpus_per_node: int | None, inference_nodes: int | None) -> Wanted:
    """Raises: ConfigError where nothing says how many GPUs a machine has, or where the run places itself."""
    _refuse_places(config, nodes)
    asked = _gpus_asked(config)
    if gpus_per_node is None:
        gpus_per_node = _gpus_of_a_machine(config, asked, nodes)
    if nodes is None:
        nodes = max(1, -(-asked // gpus_per_node)) if gpus_per_node else 1
    raise_together([*_too_small("--nodes", nodes, 1), *_too_small("--gpus-per-node", gpus_per_node, 0)])
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
        inference_nodes=inference_nodes,
        tp=config.inference.parallel.tp if gpus_per_node else 1,
    )


def _refuse_places(config: RunConfig, nodes: int | None) -> None:
    if "hosts" in config.model_fields_set:
        raise ConfigError(
            "the run has a table `[hosts]` - expected none: which machines it gets is the cluster's to say, and their "
            "addresses are filled in then. Remove the table, or start the processes yourself."
        )
    if (nodes or 1) > 1 and (config.inference_gpu_ids is not None or config.trainer_gpu_ids is not None):
        raise ConfigError(
            f"inference_gpu_ids or trainer_gpu_ids was given, with `--nodes {nodes}` - GPUs of several machines are "
            "dealt out by number. Write `inference_gpus` and `trainer_gpus`, counted over all machines."
        )


def _gpus_asked(config: RunConfig) -> int:
    """Over all machines; 0 where the run does not say."""
    ids = {*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ())}
    return max(len(ids), (config.inference_gpus or 0) + (config.trainer_gpus or 0))


def _gpus_of_a_machine(config: RunConfig, asked: int, nodes: int | None) -> int:
    if config.device == "cpu":
        return 0
    if not asked:
        raise ConfigError(
            "nothing says how many GPUs each machine has - expected `--gpus-per-node`, or GPUs in the run itself. "
            "Write `--gpus-per-node 8`, or 0 to run on CPUs."
        )
    return min(MOST_GPUS_PER_NODE, -(-asked // (nodes or 1)))


def _too_small(flag: str, number: int, least: int) -> list[str]:
    if number >= least:
        return []
    return [f"`{flag} {number}` - expected {least} or more. Write `{flag} {max(least, 1)}`, or leave it out."]


# what every machine will say to it


def check_on_machines(config: RunConfig, plan: ClusterPlan, *, cores: int) -> None:
    """Raises: ConfigError where one of them would refuse the run."""
    devices = Devices(gpus=tuple(map(str, range(plan.gpus_per_node))), cores=cores)
    config = updated(config, {"device": "cuda" if plan.gpus_per_node else "cpu"})
    if plan.is_single:
        check(resolve(config, devices), devices)
        return
    config = updated(config, dict.fromkeys(_SPLIT) | _addresses(plan))
    found = [
        message for node in plan.nodes for process in node.processes for message in _problems(config, process, devices)
    ]
    raise_together(list(dict.fromkeys(found)))


def _addresses(plan: ClusterPlan) -> dict[str, Any]:
    """Nobody's, in place of those that the machines will have."""
    at = [f"10.99.0.{node.index + 1}" for node in plan.nodes]
    return {
        "hosts.inference": tuple(at[index] for index in plan.machines_of("inference")),
        "hosts.orchestrator": at[plan.leader],
        "hosts.trainer": tuple(at[index] for index in plan.machines_of("trainer")),
    }


def _problems(config: RunConfig, process: Placed, devices: Devices) -> list[str]:
    if process.gpus:
        config = updated(config, {f"{process.room}_gpu_ids": process.gpus})
    resolved = resolve(config, devices, section=process.room, node=process.place)
    return problems(resolved, devices, section=process.room)


def check_folder(config: RunConfig, plan: ClusterPlan) -> None:
    """Where the machines share this file system: the model, the environments, and the run to go on with or not.

    Raises: ConfigError.
    """
    resolved = resolve(config, Devices(cores=1)) if config.device != "cuda" else resolve(config, _many())
    rules = (trainer_model_exists, engines_other_model_exists, environment_files_exist)
    raise_together([message for rule in rules for message in rule(resolved, Devices())])
    paths = config.paths
    is_there = holds_run(paths) or paths.run_config.exists()
    if config.resume and not is_there:
        raise ConfigError(
            f"`--resume` was given, and there is no run in {paths.root} - expected one to go on with. Leave it out to "
            "start afresh, or check `output_dir` and `name`."
        )
    if holds_run(paths) and not plan.is_single and not config.resume and config.trainer.ckpt.resume_step is None:
        raise ConfigError(
            f"{paths.root} holds a run already - expected an empty folder: several machines cannot agree on when to "
            "move it aside. Add --resume to go on with it, or take another name: `--name another`."
        )


def _many() -> Devices:
    return Devices(gpus=tuple(map(str, range(MOST_GPUS_PER_NODE))), cores=1)
