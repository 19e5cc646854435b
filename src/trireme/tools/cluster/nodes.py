"""Which process of a run goes to which machine of a cluster, and to which GPUs there. Pure; Slurm's script and
Kubernetes' manifests are rendered from it.

GPUs are dealt out in one row over all machines, engines first: machines are whole where the numbers allow it, and one
may hold both kinds. The orchestrator needs none; it goes to the trainer's first machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from trireme.base.errors import ConfigError
from trireme.config.files import ProcessName


@dataclass(frozen=True)
class Placed:
    """One process on its machine.

    Example:
        Placed("trainer", place=1, gpus=(0, 1, 2, 3))  # the second of the trainer's machines
    """

    room: ProcessName
    place: int  # of its machine among those of the room, as `[hosts]` lists them
    gpus: tuple[int, ...] = ()  # as its machine counts them


@dataclass(frozen=True)
class Node:
    """One machine. Its first process is the one that it ends with."""

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

    def machines_of(self, room: ProcessName) -> tuple[int, ...]:
        return tuple(node.index for node in self.nodes for process in node.processes if process.room == room)

    @property
    def leader(self) -> int:
        """The machine of the orchestrator, with which the run ends."""
        return 0 if self.is_single else self.machines_of("orchestrator")[0]

    @property
    def by_name(self) -> dict[str, int]:
        """The machine of each process: "rl", or "inference.1", as its log is called."""
        if self.is_single:
            return {"rl": 0}
        return {self.name_of(process): node.index for node in self.nodes for process in node.processes}

    def name_of(self, process: Placed) -> str:
        """With a number where there are several of its room."""
        alone = len(self.machines_of(process.room)) == 1
        return process.room if alone else f"{process.room}.{process.place}"

    def describe(self) -> list[str]:
        if self.is_single:
            return [f"machine 0  rl on {_gpus(self.gpus_per_node)}"]
        return [f"machine {node.index}  {', '.join(map(_described, node.processes))}" for node in self.nodes]


def _described(process: Placed) -> str:
    ids = process.gpus
    return process.room + (f" on GPU {ids[0]}-{ids[-1]}" if len(ids) > 1 else f" on GPU {ids[0]}" if ids else "")


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}" if count else "the CPU"


@dataclass(frozen=True)
class Wanted:
    """How a run is to be spread, as far as somebody said so."""

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
    engines, trainer = _by_gpu(wanted) if wanted.gpus_per_node else _by_machine(wanted)
    _check_trainer(trainer, wanted)
    _check_engines(engines, wanted)
    processes: dict[int, list[Placed]] = {index: [] for index in range(wanted.nodes)}
    processes[min(trainer)].append(Placed("orchestrator", 0))
    for place, (index, gpus) in enumerate(trainer.items()):
        processes[index].append(Placed("trainer", place, gpus))
    for place, (index, gpus) in enumerate(engines.items()):
        processes[index].append(Placed("inference", place, gpus))
    return ClusterPlan(tuple(Node(index, tuple(here)) for index, here in processes.items()), wanted.gpus_per_node)


Share = dict[int, tuple[int, ...]]  # machine -> its GPUs


def _by_machine(wanted: Wanted) -> tuple[Share, Share]:
    """Whole machines; engines have the larger half where nothing is said."""
    engines = wanted.inference_nodes or (wanted.nodes + 1) // 2
    if engines >= wanted.nodes:
        raise ConfigError(
            f"{engines} of {wanted.nodes} machines are for engines (`--inference-nodes`), which leaves none for the "
            f"trainer - expected at most {wanted.nodes - 1}. Lower it, or raise `--nodes`."
        )
    gpus = tuple(range(wanted.gpus_per_node))
    return dict.fromkeys(range(engines), gpus), dict.fromkeys(range(engines, wanted.nodes), gpus)


def _by_gpu(wanted: Wanted) -> tuple[Share, Share]:
    asked, total = (wanted.inference_gpus, wanted.trainer_gpus), wanted.nodes * wanted.gpus_per_node
    if wanted.inference_nodes or asked == (None, None):
        return _by_machine(wanted)
    engines = asked[0] if asked[0] is not None else total - (asked[1] or 0)
    trainer = asked[1] if asked[1] is not None else total - engines
    if engines < 1 or trainer < 1 or engines + trainer > total:
        raise ConfigError(
            f"inference_gpus = {engines} and trainer_gpus = {trainer} were asked for, on {wanted.nodes} machines of "
            f"{wanted.gpus_per_node} GPUs - expected at least one each, and at most {total} together. Raise `--nodes`, "
            "or lower one of the two."
        )
    if (idle := wanted.nodes - -(-(engines + trainer) // wanted.gpus_per_node)) > 0:
        raise ConfigError(
            f"{engines + trainer} GPUs were asked for (inference_gpus = {engines}, trainer_gpus = {trainer}), and "
            f"{wanted.nodes} machines of {wanted.gpus_per_node}: {idle} of them would do nothing - expected all to be "
            f"used. Write `--nodes {wanted.nodes - idle}`, or raise one of the two."
        )
    return _deal(0, engines, wanted.gpus_per_node), _deal_evenly(engines, trainer, wanted)


def _deal_evenly(first: int, count: int, wanted: Wanted) -> Share:
    """Right after the engines; from the next machine on where that takes fewer machines, or shares would differ."""
    per_node = wanted.gpus_per_node
    boundary = -(-first // per_node) * per_node
    after, aligned = _deal(first, count, per_node), _deal(boundary, count, per_node)
    is_even = len({len(gpus) for gpus in after.values()}) == 1
    has_room = boundary + count <= wanted.nodes * per_node
    return aligned if has_room and (len(aligned) < len(after) or not is_even) else after


def _deal(first: int, count: int, per_node: int) -> Share:
    """A stretch of the row of all GPUs, by machine."""
    row = groupby(range(first, first + count), key=lambda gpu: gpu // per_node)
    return {index: tuple(gpu % per_node for gpu in gpus) for index, gpus in row}


def _check_trainer(trainer: Share, wanted: Wanted) -> None:
    counts = [len(gpus) for gpus in trainer.values()]
    if len(set(counts)) > 1:
        total = sum(counts)
        raise ConfigError(
            f"the trainer's {total} GPUs would lie {' + '.join(map(str, counts))} on its machines - expected equally "
            f"many ranks on each. Set `trainer_gpus` to a multiple of {wanted.gpus_per_node} "
            f"and leave whole machines to the engines, or give `--inference-nodes` instead of numbers of GPUs."
        )


def _check_engines(engines: Share, wanted: Wanted) -> None:
    for index, gpus in engines.items():
        if len(gpus) % wanted.tp:
            raise ConfigError(
                f"inference.parallel.tp = {wanted.tp}, and machine {index} has {len(gpus)} GPUs for engines - expected "
                "a multiple: one engine's GPUs are on one machine. Lower `inference.parallel.tp`, or change "
                "`inference_gpus`."
            )
