"""The forward pass over one packed row: logprobs of the tokens that count, beside all that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from trireme.algo.columns import Columns
from trireme.algo.logprobs import Choices
from trireme.algo.packing import positions, shared, unshared
from trireme.algo.weight_checks import probe_ids
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.config.trainer import TrainerModel
from trireme.messages import Kept, MicroBatch, build_tokens
from trireme.trainer.model.head import Head, HeadOutput, NoHead, Targets, run_gathered, score_in_chunks
from trireme.trainer.model.moe import mixtures_of, routes_argument
from trireme.trainer.model.packed_attention import (
    ARGUMENT,
    PackedRow,
    row_given,
    supports_packed_attention,
    use_masked_attention,
    use_packed_attention,
)
from trireme.trainer.model.sharding import reshard
from trireme.trainer.parallel.context_parallel import SharedRow, Team, share_attention
from trireme.trainer.parallel.mesh import World


def compute_columns(
    model: PreTrainedModel, micro_batch: MicroBatch, device: torch.device, *, entropy_gradient: bool = False
) -> Columns:
    """K of the row's T tokens count. A collective; of a team, all ranks get the columns of the whole row."""
    places, has_places = places_of(micro_batch)
    found = scorer_of(model, device).score(micro_batch, places, device, entropy_gradient=entropy_gradient)
    tokens, samples = micro_batch.tokens, np.repeat(np.arange(len(micro_batch.lengths)), micro_batch.lengths)

    def column(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array[places]).to(device=device, dtype=dtype)

    behaviour = column(tokens.logprobs, torch.float32)
    return Columns(
        logprobs=found.logprobs,
        entropies=found.entropies,
        behaviour=behaviour,
        proximal=behaviour,
        advantages=column(tokens.advantages, torch.float32),
        versions=column(tokens.versions, torch.int64),
        samples=column(samples, torch.int64),
        num_samples=len(micro_batch.lengths),
        mask=torch.full((len(places),), has_places, dtype=torch.bool, device=device),
    )


def places_of(micro_batch: MicroBatch) -> tuple[np.ndarray, bool]:
    """[K] places of the tokens that count, ascending, and whether there are any: every rank must run the same
    collectives, so a row without tokens that count runs with its first one."""
    has_past = positions(micro_batch.lengths) > 0  # what stands before a sample's first token is another sample
    places = np.flatnonzero(micro_batch.tokens.loss_mask.astype(bool) & has_past)
    return (places, True) if len(places) else (np.zeros(1, np.int64), False)


log = get_logger("scorer")

PROMPT = 24  # tokens of the row that a model is tried on
PLACES = np.arange(1, PROMPT)
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}  # of logprobs; a wrong pass is off by more

_ATTRIBUTE = "trireme_scorer"


@dataclass(frozen=True)
class Scorer:
    """Of one model on one rank."""

    model: PreTrainedModel
    team: Team
    chunk: int  # tokens whose logits exist at once
    tolerance: float
    head: Head | None = None  # None: the model makes all logits at once, as its head cannot be run by itself
    is_packed: bool = False  # samples of a row attend without a mask of the whole row
    shares_prefixes: bool = False  # and what they have in common at their beginning is computed once
    is_tried: bool = False

    def score(
        self, row: MicroBatch, places: np.ndarray, device: torch.device, *, entropy_gradient: bool = False
    ) -> HeadOutput:
        """Logprobs and entropies of the tokens at these places of the row, at the temperatures at which they were
        sampled. A collective; of a team, each rank runs its part and gets all.

        Args:
            places: [K] ascending.
        """
        before = np.maximum(places - 1, 0)  # where the model says what comes next
        part = self.team.part_of(row.tokens.length)
        is_ours = before // part.size == self.team.rank
        targets = targets_at(row, places[is_ours], device)
        if self.is_packed:
            with row_given():
                found = self._run(*self._packed_inputs(row, before, device), targets, entropy_gradient)
        else:
            keep = torch.from_numpy(before[is_ours] - part.first).to(device)
            found = self._run(self._inputs(row, device), keep, targets, entropy_gradient)
        if not torch.is_grad_enabled():
            reshard(self.model)
        logprobs, entropies = self.team.gather(torch.stack(found), self.team.counts(part, before))
        return HeadOutput(logprobs, entropies if entropy_gradient else entropies.detach())

    def _inputs(self, row: MicroBatch, device: torch.device) -> dict[str, Any]:
        """Positions that restart, and no attention mask, are how transformers is told of packed samples: it then builds
        block-diagonal attention (or, with flash attention, cumulative lengths) by itself, unless given the row."""
        part, of_team = self.team.part_of(row.tokens.length), SharedRow(self.team, row.lengths, device)
        ids = torch.from_numpy(part.take(row.tokens.ids).astype(np.int64)).to(device)
        position_ids = of_team.position_ids[:, part.first : part.first + part.size]
        inputs = {"input_ids": ids[None], "position_ids": position_ids, "attention_mask": None, "use_cache": False}
        context = {"shared_row": of_team} if self.team.size > 1 else {}
        return inputs | context | routes_argument(self.model, row.tokens.routed, device, part.take)

    def _packed_inputs(
        self, row: MicroBatch, before: np.ndarray, device: torch.device
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """The same for samples that attend apart, where what they have in common at their beginning is computed once;
        and where the places before the tokens that count are then."""
        ids = row.tokens.ids.astype(np.int64)
        common = shared(ids, row.lengths) if self.shares_prefixes else unshared(len(ids))

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[common.kept]).to(device)[None]

        inputs = {
            "input_ids": on_device(ids),
            "position_ids": on_device(positions(row.lengths)),
            "attention_mask": None,
            "use_cache": False,
            ARGUMENT: PackedRow(row.lengths, device, common.places),
        }
        routes = routes_argument(self.model, row.tokens.routed, device, lambda column: column)
        return inputs | routes, torch.from_numpy(common.places[before]).to(device)

    def _run(self, inputs: dict[str, Any], keep: torch.Tensor, targets: Targets, entropy_gradient: bool) -> HeadOutput:
        head = self.head
        if head is None:
            logits = self.model(**inputs, logits_to_keep=keep).logits[0]
            return score_in_chunks(NoHead(), logits, targets, chunk=self.chunk, entropy_gradient=entropy_gradient)

        def compute() -> HeadOutput:
            hidden = self.model.base_model(**inputs)[0][0, keep]
            return score_in_chunks(head, hidden, targets, chunk=self.chunk, entropy_gradient=entropy_gradient)

        return run_gathered(self.model, compute)


def targets_at(row: MicroBatch, places: np.ndarray, device: torch.device) -> Targets:
    temperatures = np.repeat(np.array(row.temperatures, np.float32), row.lengths)
    return Targets(
        torch.from_numpy(row.tokens.ids[places].astype(np.int64)).to(device),
        torch.from_numpy(temperatures[places]).to(device),
        choices_at(row.tokens.kept, places, device),
    )


def choices_at(kept: Kept | None, places: np.ndarray, device: torch.device) -> Choices | None:
    """What the sampler could choose from at these places of a row; None where it was never cut."""
    if kept is None:
        return None
    cut = np.flatnonzero(kept.counts[places] > 0)
    if len(cut) == 0:
        return None
    counts = kept.counts[places[cut]].astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(kept.counts)])[places[cut]]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = kept.ids[np.repeat(starts, counts) + within]

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Choices(to_device(cut), to_device(counts), to_device(ids))


def attach_scorer(model: PreTrainedModel, config: TrainerModel, world: World) -> None:
    """How this model is going to score rows. It is tried before the first."""
    tolerance = TOLERANCES[config.optimization_dtype]
    vars(model)[_ATTRIBUTE] = Scorer(model, Team.of(world), config.head_chunk, tolerance)


def scorer_of(model: PreTrainedModel, device: torch.device) -> Scorer:
    """A collective when it is asked for the first time.

    Raises:
        ConfigError: ranks are to share rows, and this model cannot.
    """
    if not vars(model)[_ATTRIBUTE].is_tried:
        vars(model)[_ATTRIBUTE] = _tried(vars(model)[_ATTRIBUTE], device)
    return vars(model)[_ATTRIBUTE]


def _tried(scorer: Scorer, device: torch.device) -> Scorer:
    """Whether the head alone, and the team together, give what the model's own forward pass gives on a short row."""
    row, model = _prompt(scorer.model), scorer.model
    with _at_rest(model), torch.no_grad():
        alone = replace(scorer, team=Team())
        own = alone.score(row, PLACES, device).logprobs
        head = Head(model) if _agrees(replace(alone, head=Head(model)), row, own) else None
        scorer = replace(scorer, head=head, is_tried=True)
        if scorer.team.size == 1 and supports_packed_attention(model):
            scorer = _apart(scorer, row, own)
        if head is None:
            log.warning(
                "the head of %s by itself does not give the logits of its forward pass: all logits of a row are made "
                "at once, whatever `head_chunk` says",
                type(model).__name__,
            )
        if scorer.team.size > 1:
            share_attention(model, scorer.team.size)
            _require_team(scorer, row, own)
    return scorer


def shared_frac(model: PreTrainedModel, rows: list[MicroBatch]) -> float:
    """Of these rows' tokens, those that are not computed, as another sample's stand for them."""
    if not vars(model)[_ATTRIBUTE].shares_prefixes:
        return 0.0
    computed = sum(len(shared(row.tokens.ids, row.lengths).kept) for row in rows)
    return 1 - computed / max(1, sum(row.tokens.length for row in rows))


def _apart(scorer: Scorer, row: MicroBatch, own: torch.Tensor) -> Scorer:
    """With attention sample by sample, where that gives the same."""
    use_packed_attention(scorer.model)
    apart = replace(scorer, is_packed=True, shares_prefixes=_is_told_by_the_past(scorer.model))
    if _agrees(apart, row, own):
        return apart
    use_masked_attention(scorer.model)
    log.warning("%s: attention over packed samples needs a mask of the whole row", type(scorer.model).__name__)
    return scorer


def _is_told_by_the_past(model: PreTrainedModel) -> bool:
    """What a token becomes depends on those before it, and on nothing drawn at random. The loads of experts are counted
    token by token, so models with experts share nothing."""
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    drops |= (getattr(model.config.get_text_config(), "attention_dropout", None) or 0.0) > 0
    return not drops and not mixtures_of(model)


def _require_team(scorer: Scorer, row: MicroBatch, own: torch.Tensor) -> None:
    if not _agrees(scorer, row, own):
        raise ConfigError(
            f"trainer.model.cp = {scorer.team.size}: {type(scorer.model).__name__} gives other logprobs for a row that "
            "ranks share - expected a model whose tokens meet only in attention, and there through transformers' "
            "attention interface. Set `cp = 1`."
        )


def _agrees(scorer: Scorer, row: MicroBatch, own: torch.Tensor) -> bool:
    try:
        found = scorer.score(row, PLACES, own.device).logprobs
    except (TypeError, AttributeError, ValueError, KeyError) as error:  # a forward pass with other ideas
        log.warning("%s: %r", type(scorer.model).__name__, error)
        return False
    return bool((found - own).abs().max() <= scorer.tolerance)


def _prompt(model: PreTrainedModel) -> MicroBatch:
    """Two samples, the second of which begins like the first."""
    ids = probe_ids(model.config.get_text_config().vocab_size, PROMPT)
    ids[-7:-3] = ids[:4]
    zeros = [0.0] * PROMPT
    tokens = build_tokens(
        ids=ids,
        loss_mask=[0] * PROMPT,
        logprobs=zeros,
        advantages=zeros,
        versions=[-1] * PROMPT,
    )
    return MicroBatch(tokens=tokens, lengths=[PROMPT - 7, 7], temperatures=[1.0, 1.0])


@contextmanager
def _at_rest(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
