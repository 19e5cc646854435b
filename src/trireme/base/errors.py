"""Every error that Trireme raises on purpose.

Exit codes: 2 for configuration and 3 for what trying again would repeat or make worse (both are never retried), 1 for
the rest (the launcher starts the process again).

TriremeError
├── ConfigError        what the user typed cannot work; also a ValueError
├── DeadlineExceeded   a wait ran out; names who waited for whom, for what, and that peer's log
├── PeerDied           a process that we depend on ended
├── NotFinite          gradients were not finite, too often in a row
├── WeightsMismatch    an engine does not serve the weights that the trainer sent
├── JournalCorrupt     what lies on disk contradicts its own checksum
└── Refused            a peer answered a request with a reason, and asking again would not help
"""

from __future__ import annotations

FINAL_EXIT_CODES = (2, 3)


class TriremeError(Exception):
    """Base of all. Messages have three parts: what happened with its values - what was expected - what to do."""

    exit_code = 1


class ConfigError(TriremeError, ValueError):
    """What the user typed cannot work. Shown without a traceback; the process ends with exit code 2."""

    exit_code = 2


class DeadlineExceeded(TriremeError, TimeoutError):
    """A wait ran past its deadline."""


class PeerDied(TriremeError):
    """A process that this one depends on has ended, or no longer answers."""


class NotFinite(TriremeError):
    """Gradients were not finite, too often in a row. The same batches would make the same again."""

    exit_code = 3


class WeightsMismatch(TriremeError):
    """An engine's weights are not the trainer's. Training on its rollouts would be training on another policy's."""

    exit_code = 3


class JournalCorrupt(TriremeError):
    """A journal entry or checkpoint does not match its checksum, or misses its place in the order."""

    exit_code = 3


class Refused(TriremeError):
    """A peer refused a request for good (another run's trainer, a batch that will never exist)."""
