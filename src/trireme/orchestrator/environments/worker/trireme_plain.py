"""The smallest environment: a list of examples and a reward function, in one file, without any framework.

Example:
    def dataset():
        return [{"prompt": "Reverse: abc", "answer": "cba"}]

    def reward(completion, answer):
        return float(completion.strip() == answer)

`eval_dataset` is optional. `load_environment(**args)` may return an object or a dict with the same names instead.
`reward` is called with those of completion, answer, prompt and the example's other fields that it has parameters for;
it may be async, and may return {"reward": 0.5, "any_metric": 3.0}.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trireme_rollout import Ask, RewardError, as_dict, as_id, checked_number

Example = Mapping[str, Any]


class PlainAdapter:
    """Single-turn rollouts over examples held in memory."""

    def __init__(self, source: object, *, args: dict, versions: dict[str, str]) -> None:
        self._name = getattr(source, "__name__", type(source).__name__)
        self._versions = versions
        self._train = _examples(_member(source, "dataset"), args=args, name=f"dataset of {self._name}")
        evaluation = _member(source, "eval_dataset", required=False)
        accepted = _only(args, _accepted_names(evaluation))
        self._eval = _examples(evaluation, args=accepted, name=f"eval_dataset of {self._name}")
        self._reward = _member(source, "reward")
        self._accepts = _accepted_names(self._reward)
        _check_reward_parameters(self._reward, self._train or self._eval)

    def facts(self) -> dict:
        return {
            "num_train": len(self._train),
            "num_eval": len(self._eval),
            "name": self._name,
            "versions": self._versions,
        }

    async def rollout(self, request: dict, ask: Ask) -> dict:
        example = self._examples_of(request["split"])[request["index"]]
        prompt = _messages(example["prompt"])
        reply = await ask(prompt, tools=None, sampling=request["sampling"])
        content = reply.get("content") or ""
        reward, metrics = await self._score(content, example)
        return {
            "reward": reward,
            "metrics": metrics,
            "prompt": prompt,
            "completion": [_assistant(content, reply.get("reasoning"))],
            "answer": _text(example.get("answer")),
            "info": as_dict(example.get("info")),
            "example_id": as_id(example.get("example_id", request["index"])),
            "stop": reply.get("finish_reason"),
            "truncated": reply.get("finish_reason") == "length",
        }

    def _examples_of(self, split: str) -> list[Example]:
        """Without an evaluation set, evaluation reads the training set, as in verifiers."""
        return self._eval if split == "eval" and self._eval else self._train

    async def _score(self, completion: str, example: Example) -> tuple[float, dict[str, float]]:
        offered = {"answer": None, **example, "completion": completion}
        try:
            value = self._reward(**_only(offered, self._accepts))
            if inspect.isawaitable(value):
                value = await value
            if not isinstance(value, Mapping):
                return checked_number(value, name=_callable_name(self._reward)), {}
            numbers = {str(name): checked_number(number, name=str(name)) for name, number in value.items()}
            return numbers.pop("reward"), numbers
        except RewardError:
            raise
        except Exception as error:
            raise RewardError from error


def _member(source: object, name: str, *, required: bool = True) -> Any:
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    if value is None and required:
        where = getattr(source, "__file__", None) or f"the {type(source).__name__} that `load_environment` returned"
        raise AttributeError(
            f"{where} has no `{name}` - expected `load_environment`, or `dataset` (examples, or a function that "
            f"returns them) and `reward(completion, answer)` - define `{name}` there."
        )
    return value


def _examples(source: Any, *, args: dict, name: str) -> list[Example]:
    examples = list(source(**args) if callable(source) else source or [])
    for number, example in enumerate(examples):
        if not isinstance(example, Mapping) or "prompt" not in example:
            raise ValueError(
                f"Example {number} of {name} is {example!r:.120} - expected a dict with a `prompt` (text or chat "
                "messages) and usually an `answer` - name its fields so."
            )
        _messages(example["prompt"])
    return examples


def _messages(prompt: str | Sequence[dict]) -> list[dict]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError(
                f"A message of a prompt is {message!r:.120} - expected a dict with a `role` and text as `content` - "
                "leave out images, sound and other parts that are not text."
            )
    return [dict(message) for message in prompt]


def _check_reward_parameters(reward: Callable, examples: list[Example]) -> None:
    """Found at load, before any rollout is paid for: a parameter that no example can fill."""
    offered = {"completion", "answer"}.union(*(examples[:1] or [{}]))
    parameters = inspect.signature(reward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in offered]:
        raise TypeError(
            f"`{_callable_name(reward)}` asks for {', '.join(missing)} - expected parameters among "
            f"{', '.join(sorted(offered))} (what examples have, by name) - rename the parameter or add the field."
        )


def _accepted_names(function: Any) -> frozenset[str] | None:
    """The keyword arguments it takes; None where it takes any."""
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _only(offered: Mapping[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if names is None or name in names}


def _callable_name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _assistant(content: str, reasoning: str | None) -> dict:
    message = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _text(answer: object) -> str | None:
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer, default=str)
