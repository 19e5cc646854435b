"""Assign the processes of a run to the machines of a cluster, and to the GPUs there.

GPUs are dealt out in one row over all machines, engines first. Machines are whole where the numbers allow it, and one
machine may hold both kinds. The orchestrator needs no GPU and runs on the trainer's first machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from trireme.base.errors import ConfigError
from trireme.config.files import ProcessName

Share = dict[int, tuple[int, ...]]  # machine -> its GPUs


@dataclass(frozen=True)
class Placed:
    """One process on its machine.

    Example:
        Placed("trainer", place=1, machine=3, gpus=(0, 1, 2, 3))  # on the second of the trainer's machines
    """

    kind: ProcessName
    place: int  # of its machine among those of its kind, as `[hosts]` lists them
    machine: int
    gpus: tuple[int, ...] = ()  # as its machine counts them

    def __str__(self) -> str:
        gpus = f"{self.gpus[0]}-{self.gpus[-1]}" if len(self.gpus) > 1 else "".join(map(str, self.gpus))
        return f"{self.kind} on GPU {gpus}" if gpus else self.kind


@dataclass(frozen=True)
class ClusterPlan:
    """All machines and processes. A single machine runs `rl`, which has a plan of its own.

    A machine ends when its first process ends.
    """

    num_nodes: int
    gpus_per_node: int  # 0 runs on CPU
    processes: tuple[Placed, ...] = ()  # in the order of their machines

    @property
    def is_single(self) -> bool:
        return self.num_nodes == 1

    def machines_of(self, kind: ProcessName) -> tuple[int, ...]:
        return tuple(process.machine for process in self.processes if process.kind == kind)

    @property
    def leader(self) -> int:
        """The machine of the orchestrator. The run ends with it."""
        return 0 if self.is_single else self.machines_of("orchestrator")[0]

    @property
    def by_name(self) -> dict[str, int]:
        """The machine of each process, by the name of the process and its log: "rl", or "inference.1"."""
        if self.is_single:
            return {"rl": 0}
        return {self.name_of(process): process.machine for process in self.processes}

    def name_of(self, process: Placed) -> str:
        """Return the name of a process, with a number where there are several of its kind."""
        alone = len(self.machines_of(process.kind)) == 1
        return process.kind if alone else f"{process.kind}.{process.place}"

    def describe(self) -> list[str]:
        if self.is_single:
            count = self.gpus_per_node
            return [f"machine 0  rl on {f'{count} GPU' + 's' * (count > 1) if count else 'the CPU'}"]
        named = groupby(self.processes, key=lambda process: process.machine)
        return [f"machine {machine}  {', '.join(map(str, processes))}" for machine, processes in named]


def plan_nodes(
    nodes: int,
    gpus_per_node: int,
    *,
    inference_gpus: int | None = None,
    trainer_gpus: int | None = None,
    inference_nodes: int | None = None,
    tp: int = 1,
) -> ClusterPlan:
    """Choose the machine and the GPUs of each process.

    Args:
        inference_gpus: of all machines, as are `trainer_gpus`. What is None is chosen here.

    Raises: ConfigError where the GPUs do not divide over the machines as the processes need them.
    """
    if nodes == 1:
        return ClusterPlan(1, gpus_per_node)
    if gpus_per_node and not inference_nodes and (inference_gpus, trainer_gpus) != (None, None):
        engines, trainer = _deal_gpus(nodes, gpus_per_node, inference_gpus, trainer_gpus)
    else:  # whole machines; engines get the larger half by default
        first = inference_nodes or (nodes + 1) // 2
        if first >= nodes:
            raise ConfigError(
                f"{first} of {nodes} machines are for engines (`--inference-nodes`), which leaves none for the "
                f"trainer - expected at most {nodes - 1}. Lower it, or raise `--nodes`."
            )
        gpus = tuple(range(gpus_per_node))
        engines, trainer = dict.fromkeys(range(first), gpus), dict.fromkeys(range(first, nodes), gpus)
    counts = [len(gpus) for gpus in trainer.values()]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the trainer's {sum(counts)} GPUs would lie {' + '.join(map(str, counts))} on its machines - expected "
            f"equally many ranks on each. Set `trainer_gpus` to a multiple of {gpus_per_node} "
            f"and leave whole machines to the engines, or give `--inference-nodes` instead of numbers of GPUs."
        )
    for index, gpus in engines.items():
        if len(gpus) % tp:
            raise ConfigError(
                f"inference.parallel.tp = {tp}, and machine {index} has {len(gpus)} GPUs for engines - expected "
                "a multiple: one engine's GPUs are on one machine. Lower `inference.parallel.tp`, or change "
                "`inference_gpus`."
            )
    processes = [Placed("orchestrator", 0, min(trainer))]
    processes += [Placed("trainer", place, index, gpus) for place, (index, gpus) in enumerate(trainer.items())]
    processes += [Placed("inference", place, index, gpus) for place, (index, gpus) in enumerate(engines.items())]
    return ClusterPlan(nodes, gpus_per_node, tuple(sorted(processes, key=lambda process: process.machine)))


def _deal_gpus(nodes: int, per_node: int, inference_gpus: int | None, trainer_gpus: int | None) -> tuple[Share, Share]:
    """Return the GPUs of the engines and those of the trainer, which follow in the row of all GPUs.

    The trainer begins on the next machine where it then takes fewer machines, or has equal shares only there.
    """
    total = nodes * per_node
    engines = total - (trainer_gpus or 0) if inference_gpus is None else inference_gpus
    trainer = total - engines if trainer_gpus is None else trainer_gpus
    if engines < 1 or trainer < 1 or engines + trainer > total:
        raise ConfigError(
            f"inference_gpus = {engines} and trainer_gpus = {trainer} were asked for, on {nodes} machines of "
            f"{per_node} GPUs - expected at least one each, and at most {total} together. Raise `--nodes`, "
            "or lower one of the two."
        )
    if (idle := nodes - -(-(engines + trainer) // per_node)) > 0:
        raise ConfigError(
            f"{engines + trainer} GPUs were asked for (inference_gpus = {engines}, trainer_gpus = {trainer}), and "
            f"{nodes} machines of {per_node}: {idle} of them would do nothing - expected all to be "
            f"used. Write `--nodes {nodes - idle}`, or raise one of the two."
        )
    boundary = -(-engines // per_node) * per_node
    after, aligned = _row(engines, trainer, per_node), _row(boundary, trainer, per_node)
    is_even = len({len(gpus) for gpus in after.values()}) == 1
    has_room = boundary + trainer <= total
    takes_aligned = has_room and (len(aligned) < len(after) or not is_even)
    return _row(0, engines, per_node), aligned if takes_aligned else after


def _row(first: int, count: int, per_node: int) -> Share:
    """Return a stretch of the row of all GPUs, by machine."""
    row = groupby(range(first, first + count), key=lambda gpu: gpu // per_node)
    return {index: tuple(gpu % per_node for gpu in gpus) for index, gpus in row}
