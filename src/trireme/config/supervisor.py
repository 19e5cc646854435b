"""`[supervisor]`: what `rl` does when one of its processes dies, freezes or falls silent."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat

from trireme.config.section import Section


class Supervisor(Section):
    """`[supervisor]`: when a process is started again, and when the run is given up."""

    restart: bool = True
    """Start a process that died again, alone. `rl --no-restart` ends the run at the first death instead, and kills
    nobody for being frozen or silent."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one process in a row, without a newly trained step between them, before the run is given up."""
    backoff_s: PositiveFloat = 1.0
    """The first restart in a row is immediate, the second comes after this long; each further one waits twice as
    long."""
    longest_backoff_s: PositiveFloat = 30.0
    """No restart waits longer than this."""
    frozen_after_s: PositiveFloat = 20.0
    """A process that has been stopped (SIGSTOP, a debugger) for this long is killed, and so started again."""
    unhealthy_after_s: PositiveFloat = 60.0
    """A server that answered `/health` before and has not done so for this long is killed, and so started again; one
    whose port is closed is not waited for longer than 10 s."""
