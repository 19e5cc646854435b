"""Rules of `[trainer.model.lora]`, for `rl` and for `sft`."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.run import RunConfig
from trireme.config.trainer import Lora

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be told of."""

NOT_IN_ENGINES = {"all-linear", "lm_head", "experts", "gate_up_proj"}
"""Targets that engines cannot be handed adapters of: they must know the layers before, and have no place for adapters
of fused experts, or (with probes) of the head."""


def serves_adapters(config: RunConfig) -> bool:
    """Whether engines hold the adapters beside the base model."""
    lora = config.trainer.model.lora
    return lora is not None and lora.sync == "adapter"


def engine_rank(rank: int) -> int:
    return min(allowed for allowed in ENGINE_RANKS if allowed >= rank)


def lora_problems(table: str, lora: Lora | None, *, has_engines: bool = True) -> Iterator[str]:
    """What is wrong whatever the model."""
    if lora is None:
        return
    if lora.sync == "adapter" and not has_engines:
        yield (
            f'`{table}.sync = "adapter"` without engines - expected no such key: there is nobody to hand adapters to. '
            "Remove it."
        )
    if not lora.target_modules and not lora.modules_to_save:
        yield (
            f"`{table}.target_modules` is empty - expected the names of layers to adapt. "
            f'Leave it out, or write `{table}.target_modules = ["all-linear"]`.'
        )
    if both := sorted(set(lora.target_modules) & set(lora.modules_to_save)):
        yield (
            f"`{table}` names {', '.join(both)} in `target_modules` and in `modules_to_save` - expected each in one: "
            "a module is adapted or trained whole. Remove it from one of the two."
        )
    if "embed_tokens" in lora.target_modules:
        yield (
            f"`{table}.target_modules` names embed_tokens - expected linear layers: an embedding is trained whole or "
            f'not at all. Write `{table}.modules_to_save = ["embed_tokens"]` instead.'
        )


def _adapters_can_be_trained(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from lora_problems("trainer.model.lora", config.trainer.model.lora)


def _engines_can_hold_them(config: RunConfig, _: Devices) -> Iterator[str]:
    lora = config.trainer.model.lora
    if lora is None or lora.sync == "merged":
        return
    merged = 'Write `trainer.model.lora.sync = "merged"`'
    if lora.modules_to_save:
        yield (
            f'`trainer.model.lora.sync = "adapter"` with modules_to_save = {list(lora.modules_to_save)} - expected no '
            f"such modules: engines keep the base model's. {merged}, or leave `modules_to_save` out."
        )
    if others := sorted(NOT_IN_ENGINES & set(lora.target_modules)):
        yield (
            f'`trainer.model.lora.sync = "adapter"` with {", ".join(others)} in target_modules - expected the names of '
            f"linear layers in the blocks: engines hold adapters of those only. {merged}, or change `target_modules`."
        )
    if lora.rank > ENGINE_RANKS[-1]:
        yield (
            f'`trainer.model.lora.sync = "adapter"` with rank = {lora.rank} - expected at most {ENGINE_RANKS[-1]}, '
            f"the most that engines take. {merged}, or lower `rank`."
        )
    if config.weight_broadcast.delta:
        yield (
            '`trainer.model.lora.sync = "adapter"` with `weight_broadcast.delta` - expected one of the two: adapters '
            "change in all of their values. Remove `weight_broadcast.delta`."
        )


_COMMANDS: tuple[ProcessName | None, ...] = (None, "trainer")
_EVERYBODY: tuple[ProcessName | None, ...] = (None, "trainer", "orchestrator", "inference")

RULES = (
    (_adapters_can_be_trained, _COMMANDS),
    (_engines_can_hold_them, _EVERYBODY),
)
