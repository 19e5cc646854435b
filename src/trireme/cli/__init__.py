"""The commands, one file each."""

from __future__ import annotations

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while a command is still being imported; later, its door answers that."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_quietly
