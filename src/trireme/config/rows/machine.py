"""The GPUs that a translated file may count on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from trireme.base.devices import Devices, detect_devices

_MACHINE: ContextVar[Devices | None] = ContextVar("machine", default=None)


@contextmanager
def on_machine(devices: Devices) -> Iterator[None]:
    """Translate for other devices than those of this machine, such as a cluster's."""
    before = _MACHINE.set(devices)
    try:
        yield
    finally:
        _MACHINE.reset(before)


def has_gpus() -> bool:
    return bool((_MACHINE.get() or detect_devices()).gpus)
