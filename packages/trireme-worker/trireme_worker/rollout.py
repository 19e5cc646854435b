"""Types shared by the adapters: asking for a model turn, failures of a rollout, and checks of rewards."""

import math
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Awaitable, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from trireme_worker.pictures import content_of


class Ask(Protocol):
    """Asks the orchestrator for one model turn. Raises OverlongPrompt, EngineError or TurnCancelled.

    With `example` and `has_reward`, it asks for a client that plays the whole rollout (see `wire.Ask`).
    """

    def __call__(
        self, messages: list[dict], *, tools: list[dict] | None, sampling: dict, **more: Any
    ) -> Awaitable[dict]: ...


class Adapter(ABC):
    """One loaded environment of any kind."""

    group_rewards = False  # its rewards compare rollouts of one example: `score` wants a whole group
    uses_gateway = False  # its agents ask the policy through the gateway, not with `ask`
    folder = Path()  # its own, whose pictures it may show
    versions: dict[str, str]
    train: Sized | None = None  # examples
    eval: Sized | None = None

    def facts(self) -> dict:
        """Return the fields of the `ready` message."""
        return {
            "num_train": len(self.train) if self.train is not None else 0,
            "num_eval": len(self.eval) if self.eval is not None else 0,
            "versions": self.versions,
            "group_rewards": self.group_rewards,
            "uses_gateway": self.uses_gateway,
        }

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Keep open what all its rollouts share."""
        return nullcontext()

    @abstractmethod
    async def play(self, request: dict, ask: Ask) -> Any:
        """Run the example of a `run` message, up to its last turn."""

    @abstractmethod
    async def score(self, played: list[Any]) -> list[dict]:
        """Return the fields of the `done` message for each of a group, or of the one rollout if rewards compare
        nothing.

        Raises: RewardError, for all of them.
        """

    async def dispose(self, played: Any) -> None:
        """Clean up after the scoring, or if there was none."""


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
    """Return the value as a finite float. Text is refused even if `float` would read it."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise RewardError(
            f"Reward function `{name}` returned {_short(value)}, a {type(value).__name__} - expected a finite number - "
            f"return a float from `{name}`."
        )
    # an infinite reward or NaN would spoil the advantages of the whole group
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(
            f"Reward function `{name}` returned {number} - expected a finite number - look for a division by zero or "
            f"the logarithm of zero in `{name}`."
        )
    return number


def checked_scores(value: object, *, name: str) -> dict[str, Any]:
    """Convert what a reward function returned to the fields `reward`, `metrics` and `turn_rewards` of a `done` message.

    Example:
        checked_scores({"reward": 1, "turn_rewards": [0.5, None, [0, 1]], "length": 7}, name="reward")
        # {"reward": 1.0, "metrics": {"length": 7.0}, "turn_rewards": [[0.5], [], [0.0, 1.0]]}
    """
    if not isinstance(value, Mapping):
        return {"reward": checked_number(value, name=name), "metrics": {}, "turn_rewards": []}
    if "reward" not in value:
        raise RewardError(
            f"Reward function `{name}` returned {_short(dict(value))}, which has no `reward` - expected a number, or a "
            'dict such as {"reward": 0.5, "any_metric": 3.0} - add `reward` to it.'
        )
    metrics = {key: number for key, number in value.items() if key not in ("reward", "turn_rewards")}
    return {
        "reward": checked_number(value["reward"], name=name),
        "turn_rewards": checked_turns(value.get("turn_rewards"), name=name),
        **usable_metrics(metrics),
    }


def usable_metrics(metrics: Mapping) -> dict[str, Any]:
    """Return the fields `metrics` and `left_out` of a `done` message: no metric costs a rollout, number or not.

    Example:
        usable_metrics({"length": 7, "time": None})  # {"metrics": {"length": 7.0}, "left_out": {"time": "None"}}
    """
    numbers, left_out = {}, {}
    for key, value in metrics.items():
        name = str(key)
        try:
            numbers[name] = checked_number(value, name=name)
        except Exception:
            # a large value, such as a tensor, is described by its type alone
            is_short = isinstance(value, str | float | None)
            left_out[name] = _short(value) if is_short else f"a {type(value).__name__}"
    return {"metrics": numbers, "left_out": left_out}


def checked_turns(rewards: Any, *, name: str) -> list[list[float]]:
    """Return a list per turn: of one number for the whole turn, of one per token, or empty if it has no reward."""
    if rewards is None:
        return []
    if not _is_list(rewards):
        raise RewardError(
            f"Reward function `{name}` returned {_short(rewards)} as `turn_rewards` - expected a list with one entry "
            "per model turn: a number, a number per token, or None - return it so."
        )
    of_turns = [turn if _is_list(turn) else [] if turn is None else [turn] for turn in rewards]
    return [[checked_number(number, name=f"{name}, turn_rewards") for number in turn] for turn in of_turns]


def checked_group(values: Any, *, size: int, name: str) -> list[Any]:
    """Return the values of a reward function of a whole group, one per rollout, each still to be checked."""
    # a NumPy array or a tensor is as good as a list
    values = values.tolist() if hasattr(values, "tolist") else values
    if not _is_list(values) or len(values) != size:
        what = f"{len(values)} values" if _is_list(values) else f"{_short(values)}, a {type(values).__name__}"
        raise RewardError(
            f"Reward function `{name}` returned {what} for a group of {size} rollouts - expected a list of {size}, one "
            f"per rollout - return it from `{name}`."
        )
    return list(values)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def nested_call(call: dict) -> dict:
    """Return a tool call in OpenAI's form. The wire and verifiers hold calls flat; old data sets hold them nested."""
    function = call.get("function") or call
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments")},
    }


ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates do not know, as the gateway reads them."""


def chat_message(message: dict, number: int) -> dict:
    """Return the `number`th message of a conversation in OpenAI's form, without what is empty."""
    chat = {
        "role": ROLES.get(message["role"], message["role"]),
        "content": content_of(message.get("content"), number=number),
    }
    chat |= {name: message[name] for name in ("reasoning_content", "tool_call_id") if message.get(name)}
    return chat | ({"tool_calls": list(map(nested_call, message["tool_calls"]))} if message.get("tool_calls") else {})


def flat_sampling(arguments: Mapping[str, Any]) -> dict:
    """Return sampling arguments as one flat dict. OpenAI clients take vLLM's own parameters in `extra_body`."""
    sampling = {name: value for name, value in arguments.items() if value is not None and name != "extra_body"}
    if sampling.pop("n", 1) != 1:
        raise ValueError(
            f"The environment samples with n={arguments['n']} - expected one completion per turn - remove `n` from its "
            "sampling arguments; the orchestrator makes the group."
        )
    return {**sampling, **(arguments.get("extra_body") or {})}


def as_dict(info: object) -> dict:
    return info if isinstance(info, dict) else {} if info is None else {"info": info}


def as_id(example_id: object) -> int | str:
    return example_id if isinstance(example_id, int | str) else str(example_id)


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
