"""The smallest environment: a list of examples and a reward function, in one file, without any framework.

Example:
    def dataset():
        return [{"prompt": "Reverse: abc", "answer": "cba"}]

    def reward(completion, answer):
        return float(completion.strip() == answer)

`eval_dataset` is optional. `load_environment(**args)` may return an object or a dict with the same names instead.

`reward` is called with those of the following that it has parameters for: `completion` (the model's last message),
`messages` (the whole conversation), `example` (all fields), and each field of the example by its name. It may be async.
It returns a number, or {"reward": 0.5, "any_metric": 3.0}, to which "turn_rewards" may be added: one entry per model
turn, which is a number, a list with a number per token, or None.

Rewards that compare the rollouts of one example take `completions` (and `conversations`) instead, and return a list:

    def reward(completions):
        shortest = min(map(len, completions))
        return [float(len(completion) == shortest) for completion in completions]

More than one turn: `respond` is called after each turn of the model, with the same names, and returns what is said next
(text, or messages), or None if the rollout is over. It may be async. `example` is the rollout's own copy, so notes
may be kept in it, and `reward` finds them there:

    def respond(completion, example):
        example["guesses"] = example.get("guesses", 0) + 1
        if completion == example["answer"] or example["guesses"] == 5:
            return None
        return "higher" if completion < example["answer"] else "lower"
"""

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trireme_worker.rollout import (
    Adapter,
    Ask,
    OverlongPrompt,
    RewardError,
    as_dict,
    as_id,
    chat_message,
    checked_group,
    checked_scores,
)

Example = Mapping[str, Any]


@dataclass
class Played:
    """A conversation that is over."""

    example: dict[str, Any]
    index: int
    messages: list[dict]  # the prompt, and what came after
    num_prompt: int  # messages of the prompt
    stop: str | None = None
    truncated: bool = False

    @property
    def completion(self) -> str:
        """The model's last message. The environment's may follow it, if the conversation no longer fits."""
        said = self.messages[self.num_prompt :]
        return next((message["content"] or "" for message in reversed(said) if message["role"] == "assistant"), "")


class PlainAdapter(Adapter):
    """Runs rollouts over examples held in memory."""

    train: list[Example]
    eval: list[Example]

    offered: frozenset[str] = frozenset()  # more names that functions may ask for
    needs_reward = True
    player = ""  # the name of the program or client that takes the turns in place of the environment

    def __init__(self, source: object, *, args: dict, versions: dict[str, str]) -> None:
        self.name = getattr(source, "__name__", type(source).__name__)
        self.versions = versions
        self.train = read_examples(_member(source, "dataset"), args=args, name=f"dataset of {self.name}")
        evaluation = _member(source, "eval_dataset", required=False)
        self.eval = read_examples(evaluation, args=_accepted(evaluation, args), name=f"eval_dataset of {self.name}")

        self._reward = _member(source, "reward", required=self.needs_reward)
        self._respond = _member(source, "respond", required=False)
        self.group_rewards = bool(self._reward) and "completions" in inspect.signature(self._reward).parameters
        # an agent program or client has the conversation to itself, and its rollouts end one by one
        if self.player and (self._respond is not None or self.group_rewards):
            raise TypeError(
                f"{self.name} has `respond`, or a reward that compares rollouts - expected `dataset` and `reward` "
                f"alone, as {self.player} takes the turns - remove it, or remove `agent`."
            )

        # a parameter that no example can fill would fail in every rollout, so functions are checked now
        known = {"answer", "completion", "messages", "example", *self.offered}
        fields = set((self.train or self.eval or [{}])[0]) | known
        if self._respond is not None:
            _check_parameters(self._respond, fields)
        # a group's reward gets lists in place of one rollout's conversation
        if self.group_rewards:
            fields = fields - {"completion", "messages", "example"} | {"completions", "conversations", "examples"}
        if self._reward is not None:
            _check_parameters(self._reward, fields)

    def begin(self, request: dict) -> tuple[dict[str, Any], int, list[dict]]:
        """Return a copy of the example of a rollout, its index, and its prompt."""
        index = request["index"]
        # without an evaluation set, evaluation reads the training set, as in verifiers
        examples = self.eval if request["split"] == "eval" and self.eval else self.train
        # a copy: `respond` and `reward` may keep notes in it, which are for this rollout alone
        example = copy.deepcopy(dict(examples[index]))
        return example, index, to_messages(example["prompt"])

    async def play(self, request: dict, ask: Ask) -> Played:
        example, index, prompt = self.begin(request)
        played = Played(example, index, list(prompt), len(prompt))
        for num_turns in range(1, 1 << 31):
            try:
                reply = await ask(list(played.messages), tools=None, sampling=request["sampling"])
            except OverlongPrompt:
                # without any turn there is nothing to score; later, the conversation ends here and counts
                if num_turns == 1:
                    raise
                played.stop, played.truncated = "prompt_too_long", True
                break

            message = {"role": "assistant", "content": reply.get("content") or ""}
            if reply.get("reasoning"):
                message["reasoning_content"] = reply["reasoning"]
            played.messages.append(message)

            # the limits of tokens and turns come first, as after them the environment is asked for nothing
            played.stop = reply.get("finish_reason")
            played.truncated = played.stop == "length"
            if played.truncated or self._respond is None:
                break
            if num_turns == request.get("max_turns"):
                played.stop = "max_turns_reached"
                break

            if (said := await _call(self._respond, self.offer(played))) is None:
                played.stop = "ended_by_environment"
                break
            played.messages += to_messages(said)
        return played

    async def score(self, played: list[Played]) -> list[dict]:
        name = _callable_name(self._reward)
        try:
            if self.group_rewards:
                # fields of the example are those of the first rollout, as all of a group have the same one
                offered = {
                    "answer": None,
                    **played[0].example,
                    "completions": [one.completion for one in played],
                    "conversations": [copy.deepcopy(one.messages) for one in played],
                    "examples": [one.example for one in played],
                }
                values = checked_group(await _call(self._reward, offered), size=len(played), name=name)
            else:
                values = [await _call(self._reward, self.offer(played[0]))]
            return [
                checked_scores(value, name=name) | self.fields(one) for value, one in zip(values, played, strict=True)
            ]
        except (RewardError, asyncio.CancelledError):
            raise
        # `exit()` in a reward function too costs this rollout, not the worker
        except BaseException as error:
            raise RewardError from error

    def offer(self, played: Played) -> dict[str, Any]:
        """Return what functions may ask for by name. Messages are copies, so a function may change them."""
        said = {"completion": played.completion, "messages": copy.deepcopy(played.messages), "example": played.example}
        return {"answer": None, **played.example, **said}

    def fields(self, played: Played) -> dict[str, Any]:
        """Return fields of the `done` message."""
        example, answer = played.example, played.example.get("answer")
        return {
            "prompt": played.messages[: played.num_prompt],
            "completion": played.messages[played.num_prompt :],
            "answer": answer if answer is None or isinstance(answer, str) else json.dumps(answer, default=str),
            "info": as_dict(example.get("info")),
            "example_id": as_id(example.get("example_id", played.index)),
            "stop": played.stop,
            "truncated": played.truncated,
        }


@dataclass
class ClientPlayed(Played):
    """A rollout that its client has ended."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class ClientAdapter(PlainAdapter):
    """Has the rollouts played by clients of a user's own harness, through the gateway, and scores what they made.

    `reward` is optional: it is called if a client ends a rollout without posting a reward.
    """

    needs_reward = False
    player = "a client"

    async def play(self, request: dict, ask: Ask) -> ClientPlayed:
        example, index, prompt = self.begin(request)
        reply = await ask(prompt, tools=None, sampling={}, example=example, has_reward=self._reward is not None)
        done = reply["played"]
        said = done["messages"] or prompt
        num_prompt = next((place for place, each in enumerate(said) if each["role"] == "assistant"), len(said))
        return ClientPlayed(
            example, index, said, num_prompt, stop="client_ended", reward=done["reward"], metrics=done["metrics"]
        )

    async def score(self, played: list[Played]) -> list[dict]:
        (one,) = played
        assert isinstance(one, ClientPlayed), one
        # the client's reward counts; without one, the environment's own function is called
        if one.reward is None:
            return [scored | {"metrics": one.metrics | scored["metrics"]} for scored in await super().score(played)]
        return [{"reward": one.reward, "metrics": one.metrics, "turn_rewards": []} | self.fields(one)]


async def _call(function: Callable, offered: Mapping[str, Any]) -> Any:
    value = function(**_accepted(function, offered))
    return await value if inspect.isawaitable(value) else value


def _member(source: object, name: str, *, required: bool = True) -> Any:
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    if value is None and required:
        where = getattr(source, "__file__", None) or f"the {type(source).__name__} that `load_environment` returned"
        raise AttributeError(
            f"{where} has no `{name}` - expected `load_environment`, or `dataset` (examples, or a function that "
            f"returns them) and `reward(completion, answer)` - define `{name}` there."
        )
    return value


def _check_parameters(function: Callable, offered: set[str]) -> None:
    """Refuse a parameter that nothing can fill: at load, before any rollout is paid for."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in offered]:
        raise TypeError(
            f"`{_callable_name(function)}` asks for {', '.join(missing)} - expected parameters among "
            f"{', '.join(sorted(offered))} (the conversation, and what examples have, by name) - rename the parameter "
            "or add the field."
        )


def _accepted(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the keyword arguments that a function takes."""
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    names = {parameter.name for parameter in parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {name: value for name, value in offered.items() if takes_any or name in names}


def _callable_name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def read_examples(source: Any, *, args: dict, name: str) -> list[Example]:
    """Read and check the examples of a data set: a list, a function that returns one for these `args`, or None."""
    examples = list(source(**args) if callable(source) else source or [])
    for number, example in enumerate(examples):
        if not isinstance(example, Mapping) or "prompt" not in example:
            raise ValueError(
                f"Example {number} of {name} is {example!r:.120} - expected a dict with a `prompt` (text or chat "
                "messages) and usually an `answer` - name its fields so."
            )
        # a malformed prompt is found when the environment is loaded, not when a rollout begins
        to_messages(example["prompt"])
    return examples


def to_messages(said: str | Mapping | Sequence[Mapping]) -> list[dict]:
    """Return text, a chat message or several of them as chat messages."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    messages = [said] if isinstance(said, Mapping) else said
    return [_to_message(message, number) for number, message in enumerate(messages)]


def _to_message(message: Mapping, number: int) -> dict:
    """Return a message without its empty fields: rows of a data set have those of all other messages, too."""
    try:
        fields = {name: value for name, value in message.items() if value is not None}
        if not fields.keys() & {"content", "tool_calls", "reasoning_content"}:
            raise KeyError("content")
        return fields | chat_message({"content": "", **fields}, number)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"A message of a prompt is {message!r:.120} - expected a dict with a `role` and a `content`, which is text "
            "or a list of parts (text and pictures); one with `tool_calls` in OpenAI's form needs none - write it so."
        ) from error
