"""What the two adapters share: how a rollout asks for a model turn, how it fails, and what counts as a reward."""

import math
from asyncio import CancelledError
from collections.abc import Awaitable
from typing import Protocol


class Ask(Protocol):
    """Asks the orchestrator for one model turn. Raises OverlongPrompt, EngineError or TurnCancelled."""

    def __call__(self, messages: list[dict], *, tools: list[dict] | None, sampling: dict) -> Awaitable[dict]: ...


class OverlongPrompt(Exception):
    """The conversation no longer fits into the model's context."""


class EngineError(Exception):
    """The orchestrator could get no answer from an engine."""


class TurnCancelled(CancelledError):
    """The orchestrator gave this rollout up. A CancelledError, so that no environment takes it for an error to handle.

    `except Exception` in an environment must not turn a cancelled turn into a bad answer with a low reward.
    """


class RewardError(Exception):
    """Scoring failed; the cause is in `__cause__`, or this is it. Costs this one rollout, never a reward of 0."""


def checked_number(value: object, *, name: str) -> float:
    """The value as a finite float. Text is refused even where `float` would read it."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise RewardError(
            f"Reward function `{name}` returned {_short(value)}, a {type(value).__name__} - expected a finite number - "
            f"return a float from `{name}`."
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(
            f"Reward function `{name}` returned {number} - expected a finite number - look for a division by zero or "
            f"the logarithm of zero in `{name}`."
        )
    return number


def as_dict(info: object) -> dict:
    return info if isinstance(info, dict) else {} if info is None else {"info": info}


def as_id(example_id: object) -> int | str:
    return example_id if isinstance(example_id, int | str) else str(example_id)


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
