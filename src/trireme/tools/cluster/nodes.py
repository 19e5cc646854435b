"""Assign the processes of a run to the machines of a cluster.

Machines are whole: the first ones hold one inference server each, the others the trainer's ranks. The orchestrator
needs no GPU and runs on the trainer's first machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trireme.base.errors import ConfigError
from trireme.config.files import ProcessName
from trireme.config.run import RunConfig

MAX_GPUS_PER_NODE = 8  # GPUs of a machine if the user does not give their number


@dataclass(frozen=True)
class ClusterPlan:
    """All machines of a run. A single machine runs `rl`, which has a plan of its own.

    Example:
        ClusterPlan(num_nodes=3, gpus_per_node=8, num_engines=2).machines  # inference on 0 and 1, all else on 2
    """

    num_nodes: int
    gpus_per_node: int  # 0 runs on CPU
    num_engines: int = 0  # machines of inference servers, which are the first; 0 for a single machine

    @property
    def is_single(self) -> bool:
        return self.num_nodes == 1

    @property
    def leader(self) -> int:
        """The machine of the orchestrator. The run ends with it."""
        return self.num_engines

    @property
    def machines(self) -> dict[ProcessName, Sequence[int]]:
        """The machines of each process, as `[hosts]` lists them."""
        trainer = range(self.num_engines, self.num_nodes)
        return {"inference": range(self.num_engines), "orchestrator": [self.leader], "trainer": trainer}

    def describe(self) -> list[str]:
        count = self.gpus_per_node
        gpus = f" on {count} GPU{'s' * (count > 1)}" if count else ""
        if self.is_single:
            return [f"machine 0  rl{gpus or ' on the CPU'}"]
        lines = []
        for machine in range(self.num_nodes):
            names = [name for name, machines in self.machines.items() if machine in machines]
            lines.append(f"machine {machine}  {', '.join(names)}{gpus}")
        return lines


def plan_nodes(
    config: RunConfig, *, nodes: int | None = None, gpus_per_node: int | None = None, inference_nodes: int | None = None
) -> ClusterPlan:
    """Choose how many machines of how many GPUs the run takes, and which of them hold engines.

    Args:
        nodes: as the user gave it, like the others. What is None is chosen here.

    Raises: ConfigError if nothing says how many GPUs a machine has, if the run places itself, or if the GPUs
        are not those of whole machines.
    """
    # the cluster chooses the machines, so the run cannot name their addresses
    if "hosts" in config.model_fields_set:
        raise ConfigError(
            "the run has a table `[hosts]` - expected none: the cluster chooses the machines, and their "
            "addresses are filled in then. Remove the table, or start the processes yourself."
        )
    # what the user left out: first the GPUs of a machine, then the number of machines
    ids = {*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ())}
    asked = max(len(ids), (config.inference_gpus or 0) + (config.trainer_gpus or 0))  # over all machines
    if gpus_per_node is None and config.device != "cpu":
        if not asked:
            raise ConfigError(
                "nothing says how many GPUs each machine has - expected `--gpus-per-node`, or GPUs in the run itself. "
                "Write `--gpus-per-node 8`, or 0 to run on CPUs."
            )
        gpus_per_node = min(MAX_GPUS_PER_NODE, -(-asked // (nodes or 1)))
    gpus_per_node = gpus_per_node or 0
    nodes = nodes or (-(-asked // gpus_per_node) if gpus_per_node else 1) or 1
    # GPU ids are of use on a single machine alone: `rl` places the processes there
    if nodes == 1:
        if asked > gpus_per_node:
            raise ConfigError(
                f"the run asks for {asked} GPUs, and its one machine has {gpus_per_node} - expected that to be enough. "
                f"Write `--nodes {-(-asked // gpus_per_node) if gpus_per_node else 2}`, or raise `--gpus-per-node`."
            )
        return ClusterPlan(1, gpus_per_node)
    if ids:
        raise ConfigError(
            f"inference_gpu_ids or trainer_gpu_ids was given, with {nodes} machines - expected no numbers of GPUs: "
            "machines are taken whole. Write `--inference-nodes`."
        )
    # engines and trainer share no machine, and each has at least one
    if inference_nodes is None:
        inference_nodes = _engines_of(config, nodes, gpus_per_node) if asked else (nodes + 1) // 2
    if not 0 < inference_nodes < nodes:
        raise ConfigError(
            f"{inference_nodes} of {nodes} machines are for engines (`--inference-nodes`) - expected 1 to {nodes - 1}: "
            "the trainer takes the others. Change it, or raise `--nodes`."
        )

    if gpus_per_node % (tp := config.inference.parallel.tp):
        raise ConfigError(
            f"inference.parallel.tp = {tp}, and each machine has {gpus_per_node} GPUs - expected a divisor: one "
            "engine's GPUs are on one machine. Change `inference.parallel.tp`."
        )
    return ClusterPlan(nodes, gpus_per_node, inference_nodes)


def _engines_of(config: RunConfig, nodes: int, gpus_per_node: int) -> int:
    """Return the machines that the engines' GPUs fill.

    Raises: ConfigError if engines and trainer do not fill all machines, each its own.
    """
    # what is not given is what the other one leaves
    total = nodes * gpus_per_node
    engines = total - (config.trainer_gpus or 0) if config.inference_gpus is None else config.inference_gpus
    trainer = total - engines if config.trainer_gpus is None else config.trainer_gpus
    if engines + trainer != total or not gpus_per_node or engines % gpus_per_node:
        raise ConfigError(
            f"inference_gpus = {engines} and trainer_gpus = {trainer} were asked for, on {nodes} machines of "
            f"{gpus_per_node} GPUs - expected whole machines for each, and no machine left over. Write multiples of "
            "`--gpus-per-node`, or `--inference-nodes` in their place."
        )
    return engines // gpus_per_node
