"""Rows of the table of `scripts/check_gpu_wheel`, as its parts print them and as it reads them."""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

MARK = "ROW "  # begins the lines that are rows; all others are logs of libraries

State = Literal["ok", "refused", "failed"]


class Row(NamedTuple):
    """One outcome.

    Example:
        Row("refused", "configs/gsm8k/rl.toml", "trainer.num_ranks = 1 - expected …", gpus=8, capability="9.0")
    """

    state: State  # "refused" is a sentence of Trireme's before anything starts
    what: str
    why: str = ""
    gpus: int | None = None
    capability: str | None = None

    def print(self) -> None:
        print(MARK + json.dumps(self), flush=True)


def read(line: str) -> Row | None:
    return Row(*json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None
