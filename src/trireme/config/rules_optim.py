"""Rules of the optimizer and of its schedule, for `rl` and for `sft`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.run import RunConfig
from trireme.config.trainer import Optimizer, Scheduler, TrainerModel


def optim_problems(
    prefix: str, optim: Optimizer, scheduler: Scheduler, model: TrainerModel, *, max_steps: int
) -> Iterator[str]:
    """
    Args:
        prefix: what stands before the names of tables ("trainer.", or nothing).
    """
    yield from _check_betas(f"{prefix}optim", optim)
    yield from _check_floor(prefix, optim, scheduler)
    yield from _check_decay(f"{prefix}scheduler", scheduler, max_steps)
    yield from _check_adapters(prefix, optim, model)


def _check_betas(table: str, optim: Optimizer) -> Iterator[str]:
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield (
            f"{table}.betas = {list(optim.betas)} - expected two numbers from 0 to below 1: shares of what was before. "
            "Write [0.9, 0.999] or leave it out."
        )


def _check_floor(prefix: str, optim: Optimizer, scheduler: Scheduler) -> Iterator[str]:
    if scheduler.min_lr > optim.lr:
        yield (
            f"{prefix}scheduler.min_lr = {scheduler.min_lr:g}, {prefix}optim.lr = {optim.lr:g} - expected the rate to "
            f"fall to `min_lr`. Set it to {optim.lr / 10:g} or leave it out."
        )
    elif scheduler.min_lr and scheduler.type == "constant":
        yield (
            f'{prefix}scheduler.min_lr = {scheduler.min_lr:g} with type = "constant" - expected no such key, as the '
            f'rate never falls. Remove it, or set `{prefix}scheduler.type = "cosine"`.'
        )


def _check_decay(table: str, scheduler: Scheduler, max_steps: int) -> Iterator[str]:
    decay, warmup = scheduler.decay_steps, scheduler.warmup_steps
    if scheduler.type != "wsd":
        if decay is not None:
            yield (
                f'{table}.decay_steps = {decay} with type = "{scheduler.type}" - expected no such key: it belongs to '
                f'"wsd", others fall from the warm-up on. Remove it, or set `{table}.type = "wsd"`.'
            )
        return
    length = scheduler.decay_of(max_steps)
    if warmup + length > max_steps:
        yield (
            f"{table}.warmup_steps = {warmup} and decay_steps = {length} of max_steps = {max_steps} - expected room "
            f"for both: they take {warmup + length}. Lower one of them, or raise `max_steps`."
        )


def _check_adapters(prefix: str, optim: Optimizer, model: TrainerModel) -> Iterator[str]:
    if optim.type == "muon" and model.lora is not None:
        yield (
            f'{prefix}optim.type = "muon" with `[{prefix}model.lora]` - expected another optimizer: of an adapter\'s '
            "two factors, each alone is no map whose directions could be made alike. "
            f'Set `{prefix}optim.type = "adamw"`, or remove the table.'
        )


def optim_launch_problems(prefix: str, optim: Optimizer, device: str) -> Iterator[str]:
    """What must be there for it."""
    has_compiler = any(shutil.which(name) for name in ("gcc", "cc", "clang"))
    if optim.type == "adamw_8bit" and device == "cuda" and not has_compiler:
        yield (
            f'{prefix}optim.type = "adamw_8bit" on a GPU, and there is no C compiler - expected gcc or clang, with '
            f'which its kernels are compiled. Install one, or set `{prefix}optim.type = "adamw"`.'
        )


def _optimizer_makes_sense(config: RunConfig, _: Devices) -> Iterator[str]:
    trainer = config.trainer
    yield from optim_problems("trainer.", trainer.optim, trainer.scheduler, trainer.model, max_steps=config.max_steps)


def _optimizer_can_run(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from optim_launch_problems("trainer.", config.trainer.optim, config.device)


_COMMANDS: tuple[ProcessName | None, ...] = (None, "trainer")

RULES = ((_optimizer_makes_sense, _COMMANDS),)

LAUNCH_RULES = ((_optimizer_can_run, _COMMANDS),)
