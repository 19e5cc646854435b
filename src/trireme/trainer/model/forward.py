"""The forward pass over a packed row: logprobs and entropies of the tokens that count.

A `Scorer` runs this rank's tokens through the decoder, and the head on a few tokens at a time. Before a model's first
row, it tries on a short prompt which shortcuts give the logprobs of the model's own forward pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from trireme.algo.columns import Columns
from trireme.algo.loss.logprobs import Choices
from trireme.algo.packing import SharedPrefixes, num_distinct, positions, share_prefixes, unsampled_row
from trireme.algo.pictures import distinct_ids
from trireme.algo.weight_checks import probe_ids
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.config.trainer import TrainerModel
from trireme.messages import Kept, MicroBatch, TopLogprobs
from trireme.trainer.model.head import Head, HeadOutput, NoHead, Targets, run_gathered, score_in_chunks
from trireme.trainer.model.moe import mixtures_of, routes_argument
from trireme.trainer.model.packing.attention import (
    ARGUMENT,
    FLASH,
    SDPA,
    PackedRow,
    row_given,
    supports_packed_attention,
    use_packed_attention,
)
from trireme.trainer.model.packing.check import dropout_off
from trireme.trainer.model.sharding import reshard
from trireme.trainer.model.vision import picture_inputs
from trireme.trainer.parallel.context_parallel import SharedRow, Team, share_attention
from trireme.trainer.parallel.mesh import World

log = get_logger("scorer")

PROMPT = 24  # tokens of the row that a model is tried on
PLACES = np.arange(1, PROMPT)
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}  # largest difference of a logprob; a wrong pass is off by more

_ATTRIBUTE = "trireme_scorer"


def compute_columns(
    model: PreTrainedModel, micro_batch: MicroBatch, device: torch.device, *, entropy_gradient: bool = False
) -> Columns:
    """Compute the columns of the K tokens of a row that count. A collective; a team's ranks all get the whole row."""
    places, has_places = places_of(micro_batch)
    found = scorer_of(model, device).score(micro_batch, places, device, entropy_gradient=entropy_gradient)

    tokens, samples = micro_batch.tokens, np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)

    def column(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array[places]).to(device=device, dtype=dtype)

    behaviour = column(tokens.logprobs, torch.float32)
    return Columns(
        logprobs=found.logprobs,
        entropies=found.entropies,
        top_logprobs=found.top,
        top_behaviour=None if found.top is None else top_at(tokens.top_logprobs, places, device)[1],
        ce_weights=None if tokens.ce_weights is None else column(tokens.ce_weights, torch.float32),
        restrained=None if tokens.restrained is None else column(tokens.restrained, torch.bool),
        behaviour=behaviour,
        proximal=behaviour,
        advantages=column(tokens.advantages, torch.float32),
        versions=column(tokens.versions, torch.int64),
        oldest=None if tokens.oldest is None else column(tokens.oldest, torch.int64),
        samples=column(samples, torch.int64),
        num_samples=len(micro_batch.lengths),
        mask=torch.full((len(places),), has_places, dtype=torch.bool, device=device),
        sources=tuple(micro_batch.sources),
    )


def places_of(micro_batch: MicroBatch) -> tuple[np.ndarray, bool]:
    """Return [K] the places of the tokens that count, ascending, and whether there are any.

    Every rank must run the same collectives, so a row without such tokens runs with its first token.
    """
    has_past = positions(micro_batch.lengths) > 0  # the token before a sample's first one is of another sample
    tokens = micro_batch.tokens
    places = np.flatnonzero((tokens.by_policy_loss | tokens.by_cross_entropy) & has_past)
    return (places, True) if len(places) else (np.zeros(1, np.int64), False)


@dataclass(frozen=True)
class Scorer:
    """Computes logprobs with one model on one rank."""

    model: PreTrainedModel
    team: Team
    chunk: int  # tokens whose logits exist at once
    tolerance: float
    head: Head | None = None  # None: the model computes all logits at once, as its head cannot run by itself
    attention: str = SDPA  # the way in which samples attend one by one
    is_packed: bool = False  # samples of a row attend one by one, without a mask of the whole row
    shares_prefixes: bool = False  # tokens before which samples are the same are computed once
    is_tried: bool = False

    def score(
        self, row: MicroBatch, places: np.ndarray, device: torch.device, *, entropy_gradient: bool = False
    ) -> HeadOutput:
        """Return logprobs and entropies of the tokens at these places, at their sampling temperatures; with a gradient,
        also the logprobs of the likeliest tokens there if they are known.

        A collective. Each rank of a team runs its part of the row and gets all results.

        Args:
            places: [K] ascending.
        """
        before = np.maximum(places - 1, 0)  # the token at which the model predicts the next one

        # Each rank of a team runs the head on the tokens that it holds only.
        part = self.team.part_of(row.tokens.length)
        is_ours = before // part.size == self.team.rank
        # The logprobs of the likeliest tokens are needed for a gradient only.
        targets = targets_at(row, places[is_ours], device)
        if row.tokens.top_logprobs is not None and torch.is_grad_enabled():
            targets = targets._replace(top=top_at(row.tokens.top_logprobs, places, device)[0][:, is_ours])
        if self.is_packed:
            with row_given():
                found = self._run(*self._packed_inputs(row, before, device), targets, entropy_gradient)
        else:
            keep = torch.from_numpy(before[is_ours] - part.first).to(device)
            with row_given() if self.team.size > 1 else nullcontext():
                found = self._run(self._inputs(row, device), keep, targets, entropy_gradient)

        # Without a backward pass, nothing else frees the gathered parameters.
        if not torch.is_grad_enabled():
            reshard(self.model)

        columns = torch.cat([torch.stack(found[:2]), *found[2:]]) if found.top is not None else torch.stack(found[:2])
        gathered = self.team.gather(columns, self.team.counts(part, before))
        entropies = gathered[1] if entropy_gradient else gathered[1].detach()
        return HeadOutput(gathered[0], entropies, None if found.top is None else gathered[2:])

    def _inputs(self, row: MicroBatch, device: torch.device) -> dict[str, Any]:
        """Return the model's inputs for a row whose samples transformers keeps apart.

        Positions that restart, and no attention mask, are how transformers recognizes packed samples. It then builds a
        block-diagonal mask. A team's attention is given the row too: flash attention builds no mask from it.
        """
        part, of_team = self.team.part_of(row.tokens.length), SharedRow(self.team, row.lengths, device)
        ids = torch.from_numpy(part.take(row.tokens.ids).astype(np.int64)).to(device)
        position_ids = of_team.position_ids[:, part.first : part.first + part.size]
        inputs = {"input_ids": ids[None], "position_ids": position_ids, "attention_mask": None, "use_cache": False}

        # Attention needs the whole row, of which this rank's inputs are a part.
        context: dict[str, Any] = {}
        if self.team.size > 1:
            context = {"shared_row": of_team, ARGUMENT: PackedRow(of_team.lengths, device)}
        routes = routes_argument(self.model, row.tokens.routed, device, part.take)
        return inputs | context | routes | picture_inputs(self.model, row, np.arange(row.tokens.length), device)

    def _packed_inputs(
        self, row: MicroBatch, before: np.ndarray, device: torch.device
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the inputs for packed attention, and where the places in `before` are among the computed tokens."""
        every = np.arange(row.tokens.length)
        computed = _shared(row) if self.shares_prefixes else SharedPrefixes(kept=every, places=every)

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[computed.kept]).to(device)[None]

        inputs = {
            "input_ids": on_device(row.tokens.ids.astype(np.int64)),
            "position_ids": on_device(positions(row.lengths)),
            "attention_mask": None,
            "use_cache": False,
            ARGUMENT: PackedRow(row.lengths, device, computed.places),
        }
        routes = routes_argument(self.model, row.tokens.routed, device)
        seen = picture_inputs(self.model, row, computed.kept, device)
        return inputs | routes | seen, torch.from_numpy(computed.places[before]).to(device)

    def _run(self, inputs: dict[str, Any], keep: torch.Tensor, targets: Targets, entropy_gradient: bool) -> HeadOutput:
        # Without a head of its own, all logits exist at once, and only the scores are computed in chunks.
        head = self.head
        if head is None:
            logits = self.model(**inputs, logits_to_keep=keep).logits[0]
            return score_in_chunks(NoHead(), logits, targets, chunk=self.chunk, entropy_gradient=entropy_gradient)

        # The head's parameters are those of the root, which FSDP gathers around this call.
        def compute() -> HeadOutput:
            hidden = self.model.base_model(**inputs)[0][0, keep]
            return score_in_chunks(head, hidden, targets, chunk=self.chunk, entropy_gradient=entropy_gradient)

        return run_gathered(self.model, compute)


def targets_at(row: MicroBatch, places: np.ndarray, device: torch.device) -> Targets:
    temperatures = np.repeat(np.array(row.temperatures, np.float32), row.lengths)
    temperatures[row.tokens.by_cross_entropy] = 1.0  # the policy sampled none of these at any temperature
    return Targets(
        torch.as_tensor(row.tokens.ids[places], dtype=torch.int64, device=device),
        torch.as_tensor(temperatures[places], device=device),
        choices_at(row.tokens.kept, places, device),
    )


def choices_at(kept: Kept | None, places: np.ndarray, device: torch.device) -> Choices | None:
    """Return what the sampler could choose from at these places; None if it was never cut."""
    if kept is None:
        return None

    cut = np.flatnonzero(kept.counts[places] > 0)
    if len(cut) == 0:
        return None

    counts, _, where = _entries(kept.counts, places[cut])
    found = (cut, counts, kept.ids[where])
    return Choices(*(torch.as_tensor(each, dtype=torch.int64, device=device) for each in found))


def top_at(top: TopLogprobs | None, places: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [W, K] the likeliest tokens at these places and their logprobs, W the most there are at any place.

    Gaps are token 0 with a logprob of -inf.
    """
    assert top is not None, "the row has no likeliest tokens"
    counts, within, where = _entries(top.counts, places)
    column = np.repeat(np.arange(len(places)), counts)
    ids = np.zeros((max(1, counts.max(initial=0)), len(places)), np.int64)
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    ids[within, column], logprobs[within, column] = top.ids[where], top.logprobs[where]
    return torch.from_numpy(ids).to(device), torch.from_numpy(logprobs).to(device)


def _entries(counts_T: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the entries of some tokens in lists of all tokens that lie one behind the other.

    Returns: [K] how many each has; and of each entry its number within its list, and its index among all.
    """
    counts = counts_T[places].astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(counts_T)])[places]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return counts, within, np.repeat(starts, counts) + within


def attach_scorer(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    """Give the model its scorer. `scorer_of` tries it before the first row."""
    tolerance = TOLERANCES[config.optimization_dtype]
    attention = FLASH if config.uses_flash else SDPA
    vars(model)[_ATTRIBUTE] = Scorer(model, Team.of(world), config.head_chunk, tolerance, attention=attention)


def scorer_of(model: PreTrainedModel, device: torch.device) -> Scorer:
    """Return the model's scorer. The first call for a model is a collective.

    Raises:
        ConfigError: ranks are to share rows and this model cannot.
    """
    if not vars(model)[_ATTRIBUTE].is_tried:
        vars(model)[_ATTRIBUTE] = _try_shortcuts(vars(model)[_ATTRIBUTE], device)
    return vars(model)[_ATTRIBUTE]


def computed_fracs(model: PreTrainedModel, rows: list[MicroBatch]) -> tuple[float, float]:
    """Return the tokens that a pass over the rows computes, by the rows' tokens, and by those that exist: tokens of
    all samples, those that stand behind the same beginning once."""
    lengths = [row.tokens.length for row in rows]
    shares = vars(model)[_ATTRIBUTE].shares_prefixes
    computed = sum(len(_shared(row).kept) for row in rows) if shares else sum(lengths)
    ids = [distinct_ids(row.tokens.ids, row.tokens.pictures) for row in rows]
    samples = [part for row, own in zip(rows, ids, strict=True) for part in np.split(own, np.cumsum(row.lengths)[:-1])]
    return computed / max(1, sum(lengths)), computed / max(1, num_distinct(samples))


def _shared(row: MicroBatch) -> SharedPrefixes:
    return share_prefixes(distinct_ids(row.tokens.ids, row.tokens.pictures), row.lengths)


def _try_shortcuts(scorer: Scorer, device: torch.device) -> Scorer:
    """Use the head alone, packed attention and the team if they give the logprobs of the model's own forward pass."""
    # A row of two samples that begin alike tries every shortcut: the head, packing and shared prefixes.
    model = scorer.model
    ids = probe_ids(model.config.get_text_config().vocab_size, PROMPT)
    ids[-7:-3] = ids[:4]  # the second of two samples begins like the first
    row = unsampled_row(ids, [PROMPT - 7, 7])

    # Without dropout, passes that differ only by rounding can be compared.
    with dropout_off(model), torch.no_grad():
        alone = replace(scorer, team=Team())
        own = alone.score(row, PLACES, device).logprobs
        head = Head(model) if _agrees(replace(alone, head=Head(model)), row, own) else None
        scorer = replace(scorer, head=head, is_tried=True)

        if scorer.team.size == 1 or scorer.attention == FLASH:
            scorer = _try_packed_attention(scorer, row, own)

        if head is None:
            log.warning(
                "the head of %s by itself does not give the logits of its forward pass: all logits of a row are "
                "computed at once, whatever `head_chunk` is",
                type(model).__name__,
            )

        # Sharing a row is no shortcut but asked for by the user, so a model that cannot do it ends the run.
        if scorer.team.size > 1:
            share_attention(model, scorer.team.size)
            if not _agrees(scorer, row, own):
                raise ConfigError(
                    f"trainer.model.cp = {scorer.team.size}: {type(model).__name__} gives other logprobs for a row "
                    "that ranks share - expected a model whose tokens meet only in attention, and there through "
                    "transformers' attention interface. Set `cp = 1`."
                )
    return scorer


def _try_packed_attention(scorer: Scorer, row: MicroBatch, own: torch.Tensor) -> Scorer:
    """Let samples attend one by one if that gives the logprobs `own`, with which a mask of the whole row does."""
    model = scorer.model
    if is_supported := supports_packed_attention(model, scorer.attention):
        use_packed_attention(model, scorer.attention)
        packed = replace(scorer, team=Team(), is_packed=True, shares_prefixes=_depends_on_the_past_only(model))
        if _agrees(packed, row, own):
            return packed if scorer.team.size == 1 else scorer  # a team's attention is built from the model's
        model.set_attn_implementation("sdpa")
    if is_supported or scorer.attention == FLASH:
        log.warning("%s: attention over packed samples needs a mask of the whole row", type(model).__name__)
    return scorer


def _depends_on_the_past_only(model: PreTrainedModel) -> bool:
    """Return whether a token's result depends on the tokens before it and on nothing random: adapters may drop.

    Models with experts count their load token by token, so they do not share prefixes either.
    """
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return not drops and not mixtures_of(model)


def _agrees(scorer: Scorer, row: MicroBatch, own: torch.Tensor) -> bool:
    try:
        found = scorer.score(row, PLACES, own.device).logprobs
    except (TypeError, AttributeError, ValueError, KeyError) as error:  # a forward pass with another signature
        log.warning("%s: %r", type(scorer.model).__name__, error)
        return False
    return bool((found - own).abs().max() <= scorer.tolerance)
