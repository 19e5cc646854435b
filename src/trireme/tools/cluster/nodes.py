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
        Placed("trainer", place=1, gpus=(0, 1, 2, 3))  # on the second of the trainer's machines
    """

    kind: ProcessName
    place: int  # of its machine among those of its kind, as `[hosts]` lists them
    gpus: tuple[int, ...] = ()  # as its machine counts them

    def __str__(self) -> str:
        gpus = f"{self.gpus[0]}-{self.gpus[-1]}" if len(self.gpus) > 1 else "".join(map(str, self.gpus))
        return f"{self.kind} on GPU {gpus}" if gpus else self.kind


@dataclass(frozen=True)
class Node:
    """One machine. It ends when its first process ends."""

    index: int
    processes: tuple[Placed, ...]


@dataclass(frozen=True)
class ClusterPlan:
    """All machines, in order. A single one runs `rl`, which has a plan of its own."""

    nodes: tuple[Node, ...]
    gpus_per_node: int

    @property
    def is_single(self) -> bool:
        return len(self.nodes) == 1

    def machines_of(self, kind: ProcessName) -> tuple[int, ...]:
        return tuple(node.index for node in self.nodes for process in node.processes if process.kind == kind)

    @property
    def leader(self) -> int:
        """The machine of the orchestrator. The run ends with it."""
        return 0 if self.is_single else self.machines_of("orchestrator")[0]

    @property
    def by_name(self) -> dict[str, int]:
        """The machine of each process, by the name of the process and its log: "rl", or "inference.1"."""
        if self.is_single:
            return {"rl": 0}
        return {self.name_of(process): node.index for node in self.nodes for process in node.processes}

    def name_of(self, process: Placed) -> str:
        """Return the name of a process, with a number where there are several of its kind."""
        alone = len(self.machines_of(process.kind)) == 1
        return process.kind if alone else f"{process.kind}.{process.place}"

    def describe(self) -> list[str]:
        if self.is_single:
            count = self.gpus_per_node
            return [f"machine 0  rl on {f'{count} GPU' + 's' * (count > 1) if count else 'the CPU'}"]
        return [f"machine {node.index}  {', '.join(map(str, node.processes))}" for node in self.nodes]


@dataclass(frozen=True)
class Wanted:
    """The user's choice of machines for a run. The plan chooses what is None."""

    nodes: int
    gpus_per_node: int  # 0 runs on CPU
    inference_gpus: int | None = None  # of all machines
    trainer_gpus: int | None = None
    inference_nodes: int | None = None
    tp: int = 1


def plan_nodes(wanted: Wanted) -> ClusterPlan:
    """Raises: ConfigError where the GPUs do not divide over the machines as the processes need them."""
    if wanted.nodes == 1:
        return ClusterPlan((Node(0, ()),), wanted.gpus_per_node)
    is_by_gpu = wanted.gpus_per_node and not wanted.inference_nodes
    is_by_gpu = is_by_gpu and (wanted.inference_gpus, wanted.trainer_gpus) != (None, None)
    engines, trainer = _deal_gpus(wanted) if is_by_gpu else _deal_machines(wanted)
    counts = [len(gpus) for gpus in trainer.values()]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the trainer's {sum(counts)} GPUs would lie {' + '.join(map(str, counts))} on its machines - expected "
            f"equally many ranks on each. Set `trainer_gpus` to a multiple of {wanted.gpus_per_node} "
            f"and leave whole machines to the engines, or give `--inference-nodes` instead of numbers of GPUs."
        )
    for index, gpus in engines.items():
        if len(gpus) % wanted.tp:
            raise ConfigError(
                f"inference.parallel.tp = {wanted.tp}, and machine {index} has {len(gpus)} GPUs for engines - expected "
                "a multiple: one engine's GPUs are on one machine. Lower `inference.parallel.tp`, or change "
                "`inference_gpus`."
            )
    processes: dict[int, list[Placed]] = {index: [] for index in range(wanted.nodes)}
    processes[min(trainer)].append(Placed("orchestrator", 0))
    for place, (index, gpus) in enumerate(trainer.items()):
        processes[index].append(Placed("trainer", place, gpus))
    for place, (index, gpus) in enumerate(engines.items()):
        processes[index].append(Placed("inference", place, gpus))
    return ClusterPlan(tuple(Node(index, tuple(here)) for index, here in processes.items()), wanted.gpus_per_node)


def _deal_machines(wanted: Wanted) -> tuple[Share, Share]:
    """Return whole machines for engines and the trainer. Engines get the larger half by default."""
    engines = wanted.inference_nodes or (wanted.nodes + 1) // 2
    if engines >= wanted.nodes:
        raise ConfigError(
            f"{engines} of {wanted.nodes} machines are for engines (`--inference-nodes`), which leaves none for the "
            f"trainer - expected at most {wanted.nodes - 1}. Lower it, or raise `--nodes`."
        )
    gpus = tuple(range(wanted.gpus_per_node))
    return dict.fromkeys(range(engines), gpus), dict.fromkeys(range(engines, wanted.nodes), gpus)


def _deal_gpus(wanted: Wanted) -> tuple[Share, Share]:
    """Return the GPUs of the engines and those of the trainer, which follow in the row of all GPUs.

    The trainer begins on the next machine where it then takes fewer machines, or has equal shares only there.
    """
    per_node, total = wanted.gpus_per_node, wanted.nodes * wanted.gpus_per_node
    engines = total - (wanted.trainer_gpus or 0) if wanted.inference_gpus is None else wanted.inference_gpus
    trainer = total - engines if wanted.trainer_gpus is None else wanted.trainer_gpus
    if engines < 1 or trainer < 1 or engines + trainer > total:
        raise ConfigError(
            f"inference_gpus = {engines} and trainer_gpus = {trainer} were asked for, on {wanted.nodes} machines of "
            f"{per_node} GPUs - expected at least one each, and at most {total} together. Raise `--nodes`, "
            "or lower one of the two."
        )
    if (idle := wanted.nodes - -(-(engines + trainer) // per_node)) > 0:
        raise ConfigError(
            f"{engines + trainer} GPUs were asked for (inference_gpus = {engines}, trainer_gpus = {trainer}), and "
            f"{wanted.nodes} machines of {per_node}: {idle} of them would do nothing - expected all to be "
            f"used. Write `--nodes {wanted.nodes - idle}`, or raise one of the two."
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
