"""Every error that Trireme raises on purpose.

Exit codes: 2 for configuration errors and 3 for errors that a retry would repeat or make worse (neither is retried), 1
for the rest (the launcher restarts the process).

    TriremeError
    ├── ConfigError          2   the user's input cannot work
    ├── DeadlineExceeded     1   a wait was too long
    ├── PeerDied             1   a process that this one needs has gone
    │   └── WorkerDied           an environment's worker (orchestrator/environments/worker_process.py)
    ├── PeerRefused          1   a peer said no, and would again
    ├── AllRolloutsFail      3   no rollout succeeds
    ├── NotFinite            3   gradients or logprobs are not numbers
    ├── WeightsMismatch      3   an engine has other weights than were sent
    ├── EngineRefused        3   an engine takes a request of ours for invalid
    ├── JournalCorrupt       3   what is on disk contradicts its checksum
    └── of one module each       RolloutFailed, Garbage, MalformedRequest, LoadFailed, WeightsReplaced
"""

from __future__ import annotations

FINAL_EXIT_CODES = (2, 3)


class TriremeError(Exception):
    """Base class. Messages have three parts: what happened, with values; what was expected; what to do."""

    exit_code = 1


class ConfigError(TriremeError, ValueError):
    """The user's input cannot work. Shown without a traceback; the process exits with code 2."""

    exit_code = 2


class DeadlineExceeded(TriremeError, TimeoutError):
    """A wait ran past its deadline."""


class PeerDied(TriremeError):
    """A process that this one depends on has ended or no longer answers."""


class AllRolloutsFail(TriremeError):
    """No rollout has succeeded since the start, so a restart would fail in the same way."""

    exit_code = 3


class NotFinite(TriremeError):
    """Gradients were not finite too often in a row. The same batches would produce them again."""

    exit_code = 3


class WeightsMismatch(TriremeError):
    """An engine's weights differ from the trainer's, so its rollouts come from another policy."""

    exit_code = 3


class EngineRefused(TriremeError):
    """An engine refused a request as invalid (status 400). It would refuse the same request again."""

    exit_code = 3


class JournalCorrupt(TriremeError):
    """A journal entry or checkpoint does not match its checksum, or is missing from the sequence."""

    exit_code = 3


class PeerRefused(TriremeError):
    """A peer refused a request for good (another run's trainer, a batch that will never exist)."""


def message_of(error: BaseException) -> str:
    """Return an exception's message, or its type's name if it has none, as a timeout."""
    return str(error) or type(error).__name__
