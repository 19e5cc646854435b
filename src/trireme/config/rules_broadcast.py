"""Rules of `[weight_broadcast]`: what can send changes alone."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.run import RunConfig


def _memory_handles_carry_whole_tensors(config: RunConfig, _: Devices) -> Iterator[str]:
    broadcast = config.weight_broadcast
    if broadcast.delta and broadcast.type == "ipc":
        yield (
            '`weight_broadcast.delta = true` with `weight_broadcast.type = "ipc"` - expected false, as engines read '
            "the trainer's own memory and nothing is sent that could be less. "
            'Remove `delta`, or set `weight_broadcast.type = "nccl"` with GPUs of their own for the engines.'
        )


_COMMANDS: tuple[ProcessName | None, ...] = (None, "trainer", "orchestrator", "inference")

RULES = ((_memory_handles_carry_whole_tensors, _COMMANDS),)
