"""Logprobs of sampled tokens, and the entropies of the distributions that they were sampled from.

K positions of a row whose next token counts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_IMPOSSIBLE = -1e4  # a logprob whose exponential is 0 in any precision


@dataclass(frozen=True)
class Choices:
    """The tokens that a cut sampler (top_p, top_k, min_p) could choose from, for some of the positions.

    Example:
        Choices(positions=[1], counts=[3], ids=[5, 7, 9])  # position 1 was drawn from three tokens, others from all
    """

    positions: torch.Tensor  # [C] int64, ascending
    counts: torch.Tensor  # [C] int64, all above 0
    ids: torch.Tensor  # [sum of counts] int64

    def within(self, first: int, last: int) -> Choices | None:
        """Return the choices of positions `first` up to `last`, counted from `first`; None if there are none."""
        low, high = (int((self.positions < bound).sum()) for bound in (first, last))
        if low == high:
            return None
        start, end = int(self.counts[:low].sum()), int(self.counts[:high].sum())
        return Choices(self.positions[low:high] - first, self.counts[low:high], self.ids[start:end])


def token_logprobs(
    logits_KV: torch.Tensor,
    targets_K: torch.Tensor,
    temperature_K: torch.Tensor,
    *,
    choices: Choices | None = None,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprob of each target at its sampling temperature, in float32 at least.

    Args:
        logits_KV: [K, V] the model's output at the position before each target.
        targets_K: [K] int64 tokens.
        temperature_K: [K] temperature of the sample that each target belongs to; 0 (greedy) counts as 1.
        choices: if sampling was cut, probabilities are those among the kept tokens, as the engine's are ("keep
            sampling mask", DeepSeek-V3.2, arXiv 2512.02556). Otherwise the ratio would blame the policy for the cut.
        entropy_gradient: the entropies get a gradient too.

    Returns:
        [K] logprobs and [K] entropies in nats. Memory: two to three times the logits; `trainer/model/head.py` passes
        few positions at a time.
    """
    scale = torch.where(temperature_K > 0, temperature_K, torch.ones_like(temperature_K))
    if choices is None:
        return _AmongAll.apply(logits_KV, targets_K, scale, entropy_gradient)

    # Positions with a list of kept tokens are computed separately: they need only these few of their logits.
    cut = torch.zeros(len(targets_K), dtype=torch.bool, device=targets_K.device)
    cut[choices.positions] = True
    uncut = (~cut).nonzero().squeeze(-1)
    among_all = _AmongAll.apply(logits_KV[uncut], targets_K[uncut], scale[uncut], entropy_gradient)
    among_kept = _among_kept(logits_KV, targets_K, scale, choices)

    # Put both parts back into the order of the positions.
    order = torch.cat([uncut, choices.positions]).argsort()
    logprobs, entropies = (torch.cat(parts)[order] for parts in zip(among_all, among_kept, strict=True))
    return logprobs, entropies if entropy_gradient else entropies.detach()


def logprobs_of(
    ids_WK: torch.Tensor,
    logits_KV: torch.Tensor,
    targets_K: torch.Tensor,
    temperature_K: torch.Tensor,
    logprobs_K: torch.Tensor,
) -> torch.Tensor:
    """Return [W, K] logprobs of other tokens at the same places, with gradient.

    Args:
        ids_WK: the tokens. Those that a cut sampler could not choose get a logprob that means nothing.
        logprobs_K: of the targets, from `token_logprobs`: they hold the normaliser, so it is not computed again.
    """
    scale = torch.where(temperature_K > 0, temperature_K, torch.ones_like(temperature_K))
    rows = torch.arange(len(targets_K), device=targets_K.device)
    dtype = torch.promote_types(logits_KV.dtype, scale.dtype)
    chosen, target = (logits_KV[rows, ids].to(dtype) for ids in (ids_WK, targets_K))
    return logprobs_K + (chosen - target) / scale


class _AmongAll(torch.autograd.Function):
    """Logprobs and entropies over the whole vocabulary.

    With l = log p: dl_t/dx_j = ([j = t] - p_j) / temperature, dH/dx_j = -p_j (l_j + H) / temperature. Written out
    because both gradients follow from l alone, while autograd would keep, read and write more tensors of that size.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_KV: torch.Tensor, targets_K: torch.Tensor, scale_K: torch.Tensor, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalised = torch.log_softmax(logits_KV / scale_K[:, None], dim=-1)  # promoted to the temperatures' float32
        shares = normalised.exp()
        # In place, as another [K, V] tensor would cost as much memory as the logits.
        entropies = torch.special.entr(shares, out=shares).sum(-1)
        ctx.dtype, ctx.entropy_gradient = logits_KV.dtype, entropy_gradient
        ctx.save_for_backward(normalised, targets_K, scale_K, entropies)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return normalised.gather(-1, targets_K[:, None]).squeeze(-1), entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs_K: torch.Tensor, of_entropies_K: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        normalised, targets, scale, entropies = ctx.saved_tensors
        of_target = (of_logprobs_K / scale)[:, None]
        if ctx.entropy_gradient:
            # A token that is ruled out has log p = -inf, and would give 0 * inf here.
            slope = normalised.clamp(min=_IMPOSSIBLE).add_(entropies[:, None])
            slope.mul_((of_entropies_K / scale)[:, None]).add_(of_target)
            gradient = slope.mul_(normalised.exp()).neg_()
        else:
            gradient = normalised.exp().mul_(-of_target)
        gradient.scatter_add_(1, targets[:, None], of_target)
        return gradient.to(ctx.dtype), None, None, None


def _among_kept(
    logits_KV: torch.Tensor, targets_K: torch.Tensor, scale_K: torch.Tensor, choices: Choices
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [C] logprobs and entropies, from the few kept logits per position, without a mask of the vocabulary."""
    count = len(choices.positions)
    every = torch.arange(count, device=choices.ids.device)
    # The size is given so that the CPU does not wait for the GPU to count.
    segment = torch.repeat_interleave(every, choices.counts, output_size=len(choices.ids))

    # The kept tokens and the target of each position: only these logits are read and get a gradient.
    rows = choices.positions
    places = torch.cat([rows[segment], rows])
    chosen = logits_KV[places, torch.cat([choices.ids, targets_K[rows]])] / scale_K[places]
    kept, target = chosen[: len(segment)], chosen[len(segment) :]

    # Log-sum-exp over each position's kept tokens, less the largest one so that `exp` cannot overflow.
    lowest = torch.full((count,), -torch.inf, device=kept.device, dtype=kept.dtype)
    highest = lowest.scatter_reduce(0, segment, kept.detach(), reduce="amax")
    zero = torch.zeros(count, device=kept.device, dtype=kept.dtype)
    total = zero.index_add(0, segment, (kept - highest[segment]).exp()).log() + highest

    normalised = kept - total[segment]
    surprise = zero.index_add(0, segment, -normalised.exp() * normalised)
    return target - total, surprise
