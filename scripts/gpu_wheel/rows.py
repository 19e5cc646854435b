"""Rows of the table of `scripts/check_gpu_wheel`, as its parts print them and as it reads them."""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

MARK = "ROW "  # begins the lines that are rows; all others are logs of libraries

State = Literal["ok", "refused", "untried", "failed"]
"""Outcomes: refused is a sentence of Trireme's before anything starts, untried is what only a device can show."""

ASKED_FOR_DEVICE = ("Found no NVIDIA driver", "Cannot re-initialize CUDA in forked subprocess")
"""What torch says when code wants a device, which some modules of vLLM do when they are imported."""


class Row(NamedTuple):
    """One outcome.

    Example:
        Row("refused", "configs/gsm8k/rl.toml", "trainer.num_ranks = 1 - expected …", gpus=8, capability="9.0")
    """

    state: State
    what: str
    why: str = ""
    gpus: int | None = None
    capability: str | None = None

    def print(self) -> None:
        print(MARK + json.dumps(self), flush=True)


def failure(row: Row, error: Exception) -> Row:
    """Return a row that failed, or was not tried because its code needs a device."""
    wants_device = isinstance(error, RuntimeError) and str(error).startswith(ASKED_FOR_DEVICE)
    return row._replace(state="untried" if wants_device else "failed", why=f"{type(error).__name__}: {error}")


def read(line: str) -> Row | None:
    return Row(*json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None
