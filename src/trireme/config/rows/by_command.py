"""The rows that hold for a command, told by its configuration."""

from __future__ import annotations

from trireme.config.rows.elsewhere import ELSEWHERE
from trireme.config.rows.prime_rl import PRIME_RL
from trireme.config.rows.prime_rl_sft import PRIME_RL_EVALS, PRIME_RL_SFT
from trireme.config.section import Section, fields_of
from trireme.config.translation import Row

_RL = (*PRIME_RL, *ELSEWHERE)
_SFT = (*PRIME_RL_SFT, *ELSEWHERE)


def rows_for(root: type[Section]) -> tuple[Row, ...]:
    """Return the rows of files and flags of this configuration; none for a format that has a schema of its own."""
    fields = fields_of(root)
    if "orchestrator" in fields:
        return _RL
    if "optim" in fields:
        return _SFT
    return PRIME_RL_EVALS if "weights_dir" in fields else ()
