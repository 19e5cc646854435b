"""The optimizer steps that make the next version from a batch.

The trainer of a run and a replay both train through `Stepper`, so the same batches give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trireme.algo.columns import Columns, LossFunction, LossTerms, Totals
from trireme.algo.loss.divergence import kl_estimate
from trireme.algo.loss.loss import cross_entropy, effective_share, policy_loss
from trireme.algo.loss.mixture import OF, OTHERS, mixed_loss
from trireme.base.errors import ConfigError, NotFinite
from trireme.base.log import get_logger
from trireme.base.timing import Timer
from trireme.config.losses import Loss, resolve_loss
from trireme.config.run import RunConfig
from trireme.config.trainer import Optimizer
from trireme.journal.origin import read_origin
from trireme.journal.settings import Settings
from trireme.messages import BatchReply, MicroBatch
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.custom_loss import load_custom_loss
from trireme.trainer.logprob_log import LogprobLog
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.lora import dropout
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import expert_metrics
from trireme.trainer.model.reference import FixedLogprobs, load_reference
from trireme.trainer.model.vision import give_pictures
from trireme.trainer.optim.optimizer import build_optimizer, set_lr
from trireme.trainer.parallel.mesh import World

log = get_logger("step")


def base_state(config: RunConfig, world: World) -> TrainerState:
    """Load version 0 on this rank: the base model and a fresh optimizer.

    Raises:
        ConfigError: the loss or the model cannot be loaded.
    """
    trainer, settings = config.trainer, [each for _, each in Settings(config).eras()]
    for each in settings:
        run_loss(each)  # raises before anything expensive

    torch.manual_seed(config.seed)  # for weights `from_scratch` and for dropout
    model = load_model(trainer.model, trainer.model.name or config.model.name, world)

    # Eras may differ in whether they need a reference. It is loaded if any does.
    needs_reference = any(own.trainer.loss.beta for each in settings for own in each.losses.values())
    reference = load_reference(config, model, world) if needs_reference else None
    return TrainerState(model=model, optimizer=build_optimizer(model, trainer.optim), reference=reference)


def policy_gradient(loss: Loss, *, length: int = 1) -> LossFunction:
    """Return the reinforcement-learning loss of `algo.loss`.

    Args:
        length: the constant C of `normalize = "constant"` if the configuration has none.

    Raises:
        ConfigError: a loss function of the user's cannot be loaded.
    """
    recipe = resolve_loss(loss, length=length)
    return partial(policy_loss, recipe=recipe, custom=load_custom_loss(recipe))


def run_loss(config: RunConfig) -> tuple[LossFunction, list[Loss]]:
    """Return the loss of a run, which may be another one for each source, and the recipes that it is made of.

    Raises:
        ConfigError: a loss function of the user's cannot be loaded.
    """
    recipes = config.recipes
    losses = {name: (policy_gradient(recipe), recipe.proximal == "recomputed") for name, recipe in recipes.items()}
    if len(losses) == 1:
        return losses[OTHERS][0], [*recipes.values()]
    return partial(mixed_loss, losses=losses, names=tuple(config.orchestrator.sources)), [*recipes.values()]


@dataclass
class Stepper:
    """Trains `state` on one batch after the other; each batch makes one version.

    A step that is repeated, or replayed, is trained by the settings of its time.
    """

    config: RunConfig
    state: TrainerState
    world: World
    timer: Timer = field(default_factory=Timer)
    logprob_log: LogprobLog | None = None  # records the logprobs of the weights before each step
    before_weights_change: Callable[[], None] = lambda: None  # called once the gradients of a step are computed

    def __post_init__(self) -> None:
        self._settings = Settings(self.config)
        origin = read_origin(self.config.paths.root)
        self._schedule_shift = origin.schedule_shift if origin else 0
        self._use(self.config)

    def _use(self, config: RunConfig) -> None:
        self._loss, self._recipes = run_loss(config)
        self._used = config

    def step(self, batch: BatchReply) -> dict[str, float]:
        """Train on a batch in as many optimizer steps as configured; return metrics. A collective."""
        state, config = self.state, self._settings.at(batch.step)
        assert batch.step == state.version, f"batch {batch.step} for version {state.version}"
        # A repeated step is trained by the settings of its time.
        if config is not self._used:
            self._use(config)
        _check_sources(batch, config)
        trainer = config.trainer

        place, length = state.version + self._schedule_shift, config.max_steps + self._schedule_shift
        lr = set_lr(state.optimizer, trainer.optim, trainer.scheduler, step=place, max_steps=length)

        # All iterations of the batch are compared with the same logprobs.
        fixed = self.fixed_logprobs()
        for model in (state.model, *([state.reference.model] if state.reference else [])):
            give_pictures(model, batch.pictures)

        if self.logprob_log:
            self.logprob_log.begin(batch)

        iterations = []
        for _ in range(trainer.num_iterations):
            with self.timer.span("forward_backward"):
                metrics = self.compute_gradients(batch, fixed)
            # Engines may still have to be sent these weights, so they change only once that is settled.
            self.before_weights_change()
            with self.timer.span("optimizer"):
                iterations.append(metrics | optimizer_step(state, trainer.optim))

        state.version += 1
        if state.reference:
            state.reference.update_if_due(state.model, state.version)
        return merge_iterations(iterations) | {"lr": lr}

    def fixed_logprobs(self) -> FixedLogprobs:
        """Return what a batch's logprobs are compared with, still empty."""
        reference = self.state.reference if any(recipe.beta for recipe in self._recipes) else None
        recomputed = any(recipe.proximal == "recomputed" for recipe in self._recipes)
        return FixedLogprobs(recomputed=recomputed, reference=reference)

    def compute_gradients(self, batch: BatchReply, fixed: FixedLogprobs) -> dict[str, float]:
        """Accumulate the gradients of the whole batch's loss; return metrics. A collective."""
        return forward_backward(
            self.state.model,
            batch.micro_batches,
            loss_tokens=batch.loss_tokens,
            loss_samples=batch.loss_samples,
            ce_tokens=batch.ce_tokens,
            step=self.state.version,
            loss_function=self._loss,
            world=self.world,
            fixed=fixed,
            entropy_gradient=any(recipe.entropy_bonus > 0 for recipe in self._recipes),
            logprob_log=self.logprob_log,
        ) | expert_metrics(self.state.model)


def _check_sources(batch: BatchReply, config: RunConfig) -> None:
    """Raises: ConfigError if the orchestrator and this trainer do not know of the same losses."""
    known = set(config.orchestrator.sources) if len(config.losses) > 1 else set()
    rows = [row for row in batch.micro_batches if row.tokens.loss_mask.any()]
    named = {source for row in rows for source in row.sources}
    if not named <= known or (known and not all(row.sources for row in rows)):
        theirs, ours = (", ".join(sorted(names)) or "none by name" for names in (named, known))
        raise ConfigError(
            f"Batch {batch.step} has samples of sources with losses of their own: {theirs}; this trainer has those of: "
            f"{ours} (`[orchestrator.env.loss]`) - expected the same. Start the trainer and the orchestrator with the "
            "same `[[orchestrator.env]]` tables."
        )


def merge_iterations(iterations: list[dict[str, float]]) -> dict[str, float]:
    """Average metrics over the optimizer steps of a batch, with three exceptions.

    `mismatch_kl` and `mismatch_kl/cached` are those of the first step, whose weights are those that sampled;
    `skipped_in_a_row` is that of the last step; `skipped_update` is a count.
    """
    first, last = iterations[0], iterations[-1]
    merged = {name: sum(metrics[name] for metrics in iterations) / len(iterations) for name in first}
    merged |= {name: first[name] for name in ("mismatch_kl", "mismatch_kl/cached") if name in first}
    merged |= {name: last[name] for name in ("skipped_in_a_row",) if name in last}
    return merged | {"skipped_update": sum(metrics["skipped_update"] for metrics in iterations)}


def forward_backward(
    model: PreTrainedModel,
    micro_batches: list[MicroBatch],
    *,
    loss_tokens: int,
    step: int,
    loss_function: LossFunction,
    world: World,
    loss_samples: int = 0,
    ce_tokens: int = 0,
    fixed: FixedLogprobs | None = None,
    entropy_gradient: bool = False,
    logprob_log: LogprobLog | None = None,
) -> dict[str, float]:
    """Accumulate the gradients of the whole batch's loss; return metrics, averaged over all ranks' tokens.

    FSDP averages gradients over ranks, while the loss is already divided by all ranks' tokens. So the loss is
    multiplied by `world.dp_size`, the number of ranks whose losses differ: ranks that share a row gather its logprobs
    and compute the same loss, and their gradients are added up.

    Args:
        loss_tokens: N, for losses that average over tokens.
        loss_samples: S, for losses that average over samples.
        ce_tokens: N_ce, the tokens that cross-entropy trains.
        fixed: the logprobs that the policy's are compared with; the same object for all iterations of a batch.
        entropy_gradient: the loss has a term in the entropies.
        logprob_log: records the logprobs of each row of a batch that has begun.
    """
    fixed, totals = fixed or FixedLogprobs(), Totals(loss_tokens, loss_samples)

    sums: dict[str, torch.Tensor] = {}
    for row, micro_batch in enumerate(micro_batches):
        fixed.compute_reference(row, micro_batch, world.device)
        # Dropout stays on through the backward pass, in which blocks are recomputed.
        with dropout(model, step=step, rank=world.rank, row=row):
            columns = compute_columns(model, micro_batch, world.device, entropy_gradient=entropy_gradient)
            columns = fixed.add_to(row, columns)
            columns, weighted = columns.split()
            terms = loss_function(columns, totals)
            if ce_tokens:  # on every row, so that all ranks add up the same sums
                terms = _add_cross_entropy(terms, weighted, Totals(ce_tokens, 0))
            (terms.loss * world.dp_size).backward()
        if logprob_log:
            logprob_log.take(columns)

        # Summed in float64 on the device, so that no row waits for a copy.
        for name, value in (terms.sums | {"loss": terms.value} | _mismatch(columns, step)).items():
            sums[name] = sums.get(name, 0.0) + value.double()

    return _means(world.sum({name: float(total) for name, total in sums.items()}), loss_tokens, ce_tokens)


def _add_cross_entropy(terms: LossTerms, weighted: Columns | None, totals: Totals) -> LossTerms:
    """Add the cross-entropy of a row's tokens that have a weight."""
    zero = terms.value.new_zeros((), dtype=torch.float64)
    if weighted is None:
        return replace(terms, sums=terms.sums | {"ce/loss": zero, "ce/nll": zero})
    own = cross_entropy(weighted, totals)
    sums = terms.sums | {"ce/loss": own.value, "ce/nll": own.sums["nll"]}
    return LossTerms(loss=terms.loss + own.loss, value=terms.value + own.value, sums=sums)


def _mismatch(columns: Columns, step: int) -> dict[str, torch.Tensor]:
    """Compare trainer and engine on tokens of lag 0: the weights are the same, so any difference is numeric, or comes
    from caches that older weights have computed."""
    fresh = columns.mask & (columns.versions == step)
    cached = torch.zeros_like(fresh) if columns.oldest is None else fresh & (columns.oldest < step)
    difference = torch.where(fresh, columns.logprobs.detach() - columns.behaviour, 0.0)
    mismatch = kl_estimate(difference)
    return {
        "entropy_sum": torch.where(columns.mask, columns.entropies.detach(), 0.0).sum(),
        "fresh_tokens": (fresh & ~cached).sum(),
        "mismatch_sum": torch.where(cached, 0.0, mismatch).sum(),
        "cached_tokens": cached.sum(),
        "cached_mismatch_sum": torch.where(cached, mismatch, 0.0).sum(),
    }


def _means(sums: dict[str, float], loss_tokens: int, ce_tokens: int = 0) -> dict[str, float]:
    # These sums have divisors of their own, or none; all others are divided by the batch's loss tokens.
    of_weighted = {"ce/loss": sums.pop("ce/loss"), "ce/nll": sums.pop("ce/nll") / ce_tokens} if ce_tokens else {}
    fresh, mismatch, loss = sums.pop("fresh_tokens"), sums.pop("mismatch_sum"), sums.pop("loss")
    cached, cached_mismatch = sums.pop("cached_tokens"), sums.pop("cached_mismatch_sum")
    weights, squared_weights = sums.pop("weights", 0.0), sums.pop("squared_weights", 0.0)
    of_sources = {name: sums.pop(name) for name in [*sums] if OF in name}
    means = {name: total / max(1, loss_tokens) for name, total in sums.items()} | _means_of_sources(of_sources)
    means |= {"loss": loss, "policy/entropy": means.pop("entropy_sum")} | of_weighted

    # A batch that another model sampled says nothing about the policy that samples.
    if of_weighted and not squared_weights:
        return {"loss": loss} | of_weighted

    if squared_weights:
        means["ess"] = effective_share(weights, squared_weights, loss_tokens)
    if fresh:
        means["mismatch_kl"] = mismatch / fresh
    if cached:
        means["mismatch_kl/cached"] = cached_mismatch / cached
    return means


def _means_of_sources(sums: dict[str, float]) -> dict[str, float]:
    """Return the means over each source's own tokens; of a source without any, nothing. Its loss is a part of a sum."""
    means: dict[str, float] = {}
    for name, total in sums.items():
        measure, _, source = name.partition(OF)
        tokens = sums[f"tokens{OF}{source}"]
        if tokens:
            means[f"{measure}/{source}"] = total if measure in ("loss", "tokens") else total / tokens
    return means


def optimizer_step(state: TrainerState, config: Optimizer) -> dict[str, float]:
    """Update the weights; count steps in a row whose gradient was not finite.

    Raises:
        NotFinite: there were as many of these as the configuration allows, or the update made weights that are not
            finite. All ranks raise it together.
    """
    # Broken weights are found before the version counts, so neither engines nor checkpoints get them.
    metrics = update(state.model, state.optimizer, config.max_norm)
    if not metrics["skipped_update"] and (broken := find_broken_weight(state.model)):
        raise NotFinite(
            f"The optimizer step on batch {state.version} made weights that are not finite (on this rank: {broken}; "
            f"`lr` {state.optimizer.param_groups[0]['lr']:g}, gradient norm {metrics['grad_norm']:g}) - finite ones "
            "were expected, so the run ends here and no checkpoint holds them. Go back to an earlier checkpoint "
            "(`ckpt.resume_step`) with a lower `optim.lr`."
        )

    # A gradient that is not finite leaves the weights as they are, for so many steps in a row.
    state.skipped_in_a_row = state.skipped_in_a_row + 1 if metrics["skipped_update"] else 0
    allowed = config.max_nonfinite if config.nonfinite == "skip" else 1
    if state.skipped_in_a_row >= allowed:
        raise NotFinite(
            f"The gradient was not finite in {state.skipped_in_a_row} optimizer steps in a row, the last one on batch "
            f"{state.version} (norm {metrics['grad_norm']}) - finite ones were expected, so the run ends here with the "
            "weights as they are. See `loss` and `grad_norm` in metrics.jsonl; go back to an earlier checkpoint "
            "(`ckpt.resume_step`) with a lower `optim.lr`, or allow more with `optim.max_nonfinite` and "
            '`optim.nonfinite = "skip"`.'
        )
    return metrics | {"skipped_in_a_row": float(state.skipped_in_a_row)}


def find_broken_weight(model: PreTrainedModel) -> str | None:
    """Return which trained tensor of this rank has a value that is not finite, or that another rank has one; None if
    all values are finite. It costs one read of the weights. A collective.
    """
    local: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad and part.numel():
            local[name] = part.detach()

    # The extremes are NaN where any value is, and need no memory, unlike `isfinite` of all values.
    device = next(model.parameters()).device
    extremes = [torch.stack(torch.aminmax(part)) for part in local.values()]
    broken = [~each.isfinite().all() for each in extremes]
    any_broken = torch.stack(broken).any().int() if broken else torch.zeros((), dtype=torch.int32, device=device)
    dist.all_reduce(any_broken, op=dist.ReduceOp.MAX)
    if not any_broken:
        return None
    return next((name for name, is_broken in zip(local, broken, strict=True) if is_broken), "none; on another rank")


def update(model: PreTrainedModel, optimizer: torch.optim.Optimizer, max_norm: float) -> dict[str, float]:
    """Clip the global gradient norm, take the optimizer step, and clear the gradients.

    A gradient that is not finite is thrown away: clipping would turn it into weights that are all NaN. The weights stay
    as they are, and the metric `skipped_update` is 1.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    is_finite = math.isfinite(grad_norm)
    if is_finite:
        optimizer.step()
    else:
        log.warning("the gradient is not finite (norm %s): this step leaves the weights as they are", grad_norm)
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": grad_norm, "skipped_update": float(not is_finite)}
