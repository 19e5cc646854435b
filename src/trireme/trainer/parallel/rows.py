"""What this rank's rows are beside those of the other ranks: given to all of a team, and measured."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trireme.algo.cost import Cost
from trireme.messages import BatchReply, MicroBatch, decode_reply, encode
from trireme.trainer.parallel.mesh import CONTEXT, World


def given_to_team(batch: BatchReply | None, world: World) -> BatchReply:
    """What the first of a team was handed, for all who share its rows. A collective of the team.

    Args:
        batch: None where another of the team has it.
    """
    if world.cp_size > 1:
        batch = _broadcast(batch, world)
    assert batch is not None, "the first of a team has no batch"
    return batch


def _broadcast(batch: BatchReply | None, world: World) -> BatchReply:
    group = world.data_mesh[CONTEXT].get_group()
    content = bytearray(encode(batch)) if batch is not None else bytearray()
    size = torch.tensor([len(content)])
    dist.broadcast(size, group=group, group_src=0)
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    if batch is not None:
        return batch
    reply = decode_reply(data.numpy().tobytes())
    assert isinstance(reply, BatchReply), reply
    return reply


def packing_metrics(rows: list[MicroBatch], *, capacity: int, cost: Cost, world: World) -> dict[str, float]:
    """How full the rows of all ranks are, and how long ranks wait for each other by the cost model. A collective."""
    rounds, ranks = range(len(rows)), range(world.dp_size)
    own = {f"{number}/{world.dp_rank}": cost.of_row(row.lengths) for number, row in enumerate(rows)}
    own["tokens"] = float(sum(row.tokens.length for row in rows))
    costs = world.sum({f"{number}/{rank}": 0.0 for number in rounds for rank in ranks} | own)
    tokens, mean = costs.pop("tokens"), sum(costs.values()) / len(ranks)
    slowest = sum(max(costs[f"{number}/{rank}"] for rank in ranks) for number in rounds)
    return {
        "perf/packing_waste": 1 - tokens / (len(rounds) * len(ranks) * capacity),
        "perf/rank_imbalance": slowest / mean - 1,
    }
