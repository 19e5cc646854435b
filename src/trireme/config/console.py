"""`[console]`: what a run says in the terminal while it goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from trireme.config.section import Section


class Console(Section):
    """`[console]`: what the terminal shows. Nothing of it changes what is trained."""

    style: Literal["trireme", "vf-rl"] = "trireme"
    """`vf-rl`: plain lines as that command has them, and its folders `checkpoint-N` and `runs` beside ours."""
    every: PositiveInt = 1
    """Steps from one line to the next, where lines are written."""
    samples_every: PositiveInt | None = None
    """Steps from one look at what the model writes to the next; none where not given."""
    num_samples: PositiveInt = 1
    """Rollouts shown at each look."""
