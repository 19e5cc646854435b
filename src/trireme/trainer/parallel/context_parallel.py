"""Context parallelism: each rank of a team holds a part of every row, so that longer rows fit.

Everything but attention works token by token, so each rank does it for its own tokens. Around attention, ranks exchange
tensors (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1): from some tokens of all heads to all tokens of some heads,
and back. In between, any attention implementation of transformers runs on the packed samples of the whole row.

Letters: N ranks of a team, T tokens of a row (a multiple of N here), t = T / N of one rank, D size of a head.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from trireme.algo.packing import positions
from trireme.base.errors import ConfigError
from trireme.trainer.parallel.mesh import CONTEXT, World

NAMES = {
    "sdpa": "team_sdpa",
    "flex_attention": "team_flex",
    "packed_varlen": "team_varlen",  # flash attention, `model/packing/attention.py`
}
"""Names of attention implementations as a team runs them."""


@dataclass(frozen=True)
class Part:
    """A rank's tokens of a row; each rank of a team has the same number."""

    first: int  # the first of this rank's tokens, counted in the row
    size: int  # t; the last ones may be beyond the row's end

    def take(self, column: np.ndarray) -> np.ndarray:
        """Return this rank's part of a column of the row, padded with 0 beyond the row's end."""
        ours = column[self.first : self.first + self.size]
        return np.pad(ours, (0, self.size - len(ours)))


@dataclass(frozen=True)
class Team:
    """One rank's view of the ranks that share its rows. A single rank is a team too."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(world: World) -> Team:
        return Team(world.cp_rank, world.cp_size, world.data_mesh[CONTEXT].get_group())

    def part_of(self, length: int) -> Part:
        size = -(-length // self.size)
        return Part(self.rank * size, size)

    def counts(self, part: Part, places: np.ndarray) -> list[int]:
        """Return how many of these ascending places in the row each rank of the team holds."""
        return np.bincount(places // part.size, minlength=self.size).tolist()

    def gather(self, columns: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Gather [C, k] columns of each rank's tokens into [C, K] of all tokens. A collective.

        Every rank computes the same loss from the result, and in the backward pass their gradients are added up. So a
        loss is multiplied by `dp_size`, not `size`, before FSDP averages over all ranks.
        """
        return columns if self.size == 1 else _Gather.apply(columns, counts, self)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange [1, A, B / N, D] for [1, A / N, B, D]: heads for tokens, or tokens for heads. A collective."""
        return tensor if self.size == 1 else _Exchange.apply(tensor, 1, 2, self)


class _Exchange(torch.autograd.Function):
    """Splits a tensor over ranks along `split` and joins it along `join`. Its gradient does the reverse."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: int, join: int, team: Team) -> torch.Tensor:
        ctx.way_back = (join, split, team)
        return _exchange(tensor, split, join, team)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, *ctx.way_back), None, None, None


def _exchange(tensor: torch.Tensor, split: int, join: int, team: Team) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(team.size, dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=team.group)
    return torch.cat(received.unbind(), dim=join)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: torch.Tensor, counts: list[int], team: Team) -> torch.Tensor:
        ctx.counts, ctx.team = counts, team
        widest = max(counts)

        # Collectives need equal sizes, so all ranks send as many columns as the longest part has.
        ours = nn.functional.pad(columns, (0, widest - columns.shape[1]))
        received = ours.new_empty(team.size, *ours.shape)
        dist.all_gather_single(received, ours.contiguous()[None], group=team.group)
        return torch.cat([each[:, :count] for each, count in zip(received, counts, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Scale this rank's part: all ranks have the same gradient, so their sum takes no collective."""
        first = sum(ctx.counts[: ctx.team.rank])
        ours = gradient[:, first : first + ctx.counts[ctx.team.rank]]
        return ours * ctx.team.size, None, None


class SharedRow:
    """A packed row of a team, for the attention layers.

    It is an argument of the model's forward pass, so that activation checkpointing has it in the backward pass too.
    """

    def __init__(self, team: Team, lengths: list[int], device: torch.device) -> None:
        """
        Args:
            lengths: of the row's samples. Padding to a multiple of the team's size becomes one more sample.
        """
        self.team = team
        total = sum(lengths)

        # Every rank of a team has as many tokens, which `all_to_all` needs.
        padding = team.part_of(total).size * team.size - total
        self.lengths = [*lengths, padding] if padding else lengths
        self.positions = positions(self.lengths)  # [T]
        self.position_ids = torch.from_numpy(self.positions).to(device)[None]
        self._masks: dict[tuple[str, int | None], Any] = {}

    def mask(self, name: str, window: int | None, query: torch.Tensor) -> Any:
        """Return the mask that transformers builds for the attention `name`, for all layers with one window."""
        if (name, window) not in self._masks:
            create = create_sliding_window_causal_mask if window else create_causal_mask
            self._masks[name, window] = create(
                config=SimpleNamespace(_attn_implementation=name, sliding_window=window),
                inputs_embeds=query.new_empty(1, query.shape[2], 0),
                attention_mask=None,
                past_key_values=None,
                position_ids=self.position_ids,
            )
        return self._masks[name, window]


def share_attention(model: PreTrainedModel, team_size: int) -> None:
    """Let the model's attention layers work for a team. From then on every row must be shared.

    Raises:
        ConfigError: the model's attention cannot be shared.
    """
    name, text = model.config._attn_implementation, model.config.get_text_config()
    name_of_team = NAMES.get(name)
    if name_of_team is None:
        raise ConfigError(
            f'trainer.model.attn = "{name}" with trainer.model.cp = {team_size} - expected sdpa, flex_attention or '
            "flash_attention_2, which can be given all tokens of some heads. Set one of these, or `cp = 1`."
        )

    # A rank computes whole heads.
    if text.num_attention_heads % team_size:
        raise ConfigError(
            f"trainer.model.cp = {team_size}, and the model has {text.num_attention_heads} attention heads - expected "
            "a divisor of them, as ranks that share a row share its heads. Set `cp` to one."
        )

    AttentionInterface.register(name_of_team, _team_attention(name))
    AttentionMaskInterface.register(name_of_team, lambda *_, **__: None)  # `SharedRow` builds that of the whole row
    model.set_attn_implementation(name_of_team)


def _team_attention(name: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    plain = AttentionInterface()[name]

    @torch.compiler.disable
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _: Any,
        *,
        shared_row: SharedRow,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        team = shared_row.team
        heads = key.shape[1]  # repeated, so that all ranks get the same number of them
        key, value = (each.repeat_interleave(math.lcm(heads, team.size) // heads, dim=1) for each in (key, value))
        query, key, value = (team.exchange(each) for each in (query, key, value))

        # This rank now has all tokens of some heads: the positions of the whole row, and its part of the sinks.
        options |= {"position_ids": shared_row.position_ids, "sliding_window": sliding_window}
        if (sinks := options.get("s_aux")) is not None:
            options["s_aux"] = sinks.chunk(team.size)[team.rank]

        # The module is copied, because its number of groups holds for other passes.
        groups = query.shape[1] // key.shape[1]
        module = copy.copy(module)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = groups

        found, weights = plain(module, query, key, value, shared_row.mask(name, sliding_window, query), **options)
        return team.exchange(found), weights

    return attend
