"""Scoring by verifiers v0 rubrics, without what they hide: each reward function is wrapped where the rubric lists it.

The wrapper tells of what the function raised, or returned that is no number (verifiers logs it and goes on with 0.0),
and which turns it gave a reward (`score_group` fills the others with the rollout's own).
"""

import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from trireme_rollout import RewardError, checked_group, checked_number

_current: contextvars.ContextVar["Scoring | None"] = contextvars.ContextVar("scoring", default=None)


class Scoring:
    """One scoring of one rollout, or of a group. A context variable leads the wrappers to it: many go on at once."""

    def __init__(self, states: list[Any]) -> None:
        self.num_states = len(states)
        self.errors: list[BaseException] = []
        self._own: set[int] = set()  # steps whose reward the environment gave, by `id`
        self.note_own_rewards(states)

    async def run(self, scoring: Awaitable[None]) -> None:
        """Raises: RewardError, with the first of the causes."""
        token = _current.set(self)
        try:
            await scoring
        except (Exception, SystemExit) as error:
            self.errors.append(error)
        finally:
            _current.reset(token)
        if self.errors:
            raise RewardError from self.errors[0]

    def is_own(self, step: Any) -> bool:
        return id(step) in self._own and step.get("reward") is not None

    def note_own_rewards(self, states: Iterable[Any]) -> None:
        """To be called when only the environment can have written any since `take_back`, or the beginning."""
        self._own |= {id(step) for state in states for step in state["trajectory"] if step.get("reward") is not None}

    def take_back(self, states: Iterable[Any]) -> None:
        """Before a function of a second rubric: what `score_group` of the first has filled in is none of its own."""
        for state in states:
            for step in state["trajectory"]:
                if id(step) not in self._own:
                    step["reward"] = None


def watch(rubric: Any) -> None:
    for place, function in enumerate(rubric.funcs):
        if not getattr(function, "_watched_by_trireme", False):
            rubric.funcs[place] = _watched(function, scores_group=rubric._is_group_func(function))


def _watched(function: Callable, *, scores_group: bool) -> Callable:
    """The same reward function (verifiers reads its signature and name) that also tells us when it fails."""
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        scoring, states = _current.get(), _states_in(kwargs)
        if scoring is not None:
            scoring.take_back(states)
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            if scoring is not None:
                scoring.note_own_rewards(states)
            return _checked(value, name=name, num_states=scoring.num_states if scores_group and scoring else None)
        except (Exception, SystemExit) as error:
            if scoring is not None:
                scoring.errors.append(error)
            raise

    watched.__name__ = name
    watched._watched_by_trireme = True  # type: ignore[attr-defined]
    return watched


def _states_in(arguments: dict[str, Any]) -> list[Any]:
    """A function that takes neither `state` nor `states` cannot give a turn a reward."""
    return [*arguments.get("states", ()), *([arguments["state"]] if "state" in arguments else ())]


def _checked(value: Any, *, name: str, num_states: int | None) -> Any:
    if num_states is None:
        return checked_number(value, name=name)
    return [checked_number(number, name=name) for number in checked_group(value, size=num_states, name=name)]
