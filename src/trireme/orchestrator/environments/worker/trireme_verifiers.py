"""Runs verifiers v0 environments (0.2.0) unmodified: our client in, their state out, nothing of theirs patched.

Surprising about verifiers 0.2.0, and why this file is more than a call of `env.run_rollout`:
1. `Rubric` swallows what a reward function raises, logs it and scores 0.0. A silent 0 is a lie that would be trained
   on. We wrap the functions in the rubrics' public `funcs` lists; the wrapper notes the error for the rollout being
   scored (a context variable, as rollouts are scored concurrently) and re-raises it for verifiers to swallow.
2. The number check must be in that wrapper as well: `float(None)` fails inside of verifiers and becomes 0.0, too.
3. `rollout` returns errors as `state["error"]`, and scores them all the same in `run_rollout`; ours end unscored. It
   also moves each finished rollout through a thread to serialise it, so we call its public parts instead.
4. A rubric with a group reward function refuses to score one rollout (an `assert`): refused when it is loaded.
5. Its own client raises on an empty completion. A model that answers with nothing must be scored, so ours does not.
"""

import contextvars
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import verifiers as vf
from trireme_rollout import Ask, EngineError, OverlongPrompt, RewardError, as_dict, as_id, checked_number

_scoring: contextvars.ContextVar[list[Exception] | None] = contextvars.ContextVar("scoring", default=None)


class VerifiersAdapter:
    """One verifiers environment."""

    def __init__(self, environment: Any, *, name: str, versions: dict[str, str]) -> None:
        _refuse_group_rewards(environment)
        self._environment = environment
        self._name = environment.env_id or name
        self._versions = versions
        self._rubrics = list(_rubrics(environment))
        self._train = environment.build_dataset()
        self._eval = environment.build_eval_dataset()
        self._row = functools.lru_cache(maxsize=1024)(self._read_row)  # the rollouts of a group share an example

    def facts(self) -> dict:
        return {
            "num_train": len(self._train) if self._train is not None else 0,
            "num_eval": len(self._eval) if self._eval is not None else 0,
            "name": self._name,
            "versions": self._versions,
        }

    async def rollout(self, request: dict, ask: Ask) -> dict:
        client = AskingClient(ask, max_turns=request.get("max_turns"))
        sampling = {**self._environment.sampling_args, **request["sampling"]}
        row = self._row(request["split"], request["index"])
        state = await self._environment.rollout(row, client, "policy", sampling)
        await self._score(state)
        return _result(state, stopped_by_us=client.reached_max_turns)

    def _read_row(self, split: str, index: int) -> dict:
        """As in verifiers, an environment without an evaluation set evaluates on its training set."""
        use_eval = self._train is None or (split == "eval" and self._eval is not None)
        return (self._eval if use_eval else self._train)[index]

    async def _score(self, state: vf.State) -> None:
        """Scores and cleans up. A failed rollout is not scored: its reward would say nothing about the policy."""
        rubric = self._environment.rubric
        try:
            if state.get("error") is not None:
                raise state["error"]
            for part in self._rubrics:  # again for each rollout: environments add functions as they go
                _watch(part)
            await self._raise_what_rewards_raise(rubric, state)
        finally:
            await rubric.cleanup(state)

    async def _raise_what_rewards_raise(self, rubric: Any, state: vf.State) -> None:
        errors: list[Exception] = []
        token = _scoring.set(errors)
        score = rubric.score_rollout if self._environment.score_rollouts else rubric.dummy_score_rollout
        try:
            await score(state)
        except Exception as error:
            errors.append(error)
        finally:
            _scoring.reset(token)
        if errors:
            raise RewardError from errors[0]


class AskingClient(vf.Client):
    """The policy, as verifiers sees it: prompt and response are the orchestrator's `ask` and `reply`.

    One per rollout. Token ids and logprobs are filled in for environments that read them; no one trains on these.
    """

    def __init__(self, ask: Ask, *, max_turns: int | None) -> None:
        super().__init__(ask)
        self._max_turns = max_turns
        self.reached_max_turns = False

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError(f"This client asks the orchestrator; it has no use for {config!r}")

    async def to_native_tool(self, tool: vf.Tool) -> dict:
        strict = {} if tool.strict is None else {"strict": tool.strict}
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, **strict}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: vf.Messages) -> tuple[list[dict], dict]:
        return to_chat(messages), {}

    async def get_native_response(
        self, prompt: list[dict], model: str, sampling_args: dict, tools: list[dict] | None = None, **kwargs: Any
    ) -> dict:
        self._stop_at_max_turns(kwargs.get("state"))
        try:
            return await self.client(prompt, tools=tools, sampling=_flat(sampling_args))
        except OverlongPrompt as error:
            raise vf.OverlongPromptError(str(error)) from error
        except EngineError as error:
            raise vf.ModelError(str(error)) from error

    def _stop_at_max_turns(self, state: vf.State | None) -> None:
        """The run's own limit of turns; the environment's is its own affair and may be lower.

        An overlong prompt is the one way verifiers knows to end a rollout early and still score it.
        """
        if self._max_turns is not None and state is not None and len(state["trajectory"]) >= self._max_turns:
            self.reached_max_turns = True
            raise vf.OverlongPromptError(f"the run allows {self._max_turns} turns")

    async def raise_from_native_response(self, response: dict) -> None:
        """Every reply is a valid one, an empty one too."""

    async def from_native_response(self, response: dict) -> vf.Response:
        return to_response(response)

    async def close(self) -> None:
        """Nothing to close: the socket is the worker's."""


def to_chat(messages: Any) -> list[dict]:
    """verifiers' messages (or dicts, or text) as OpenAI chat messages; `to_response` goes the other way."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_to_chat_message(message, number) for number, message in enumerate(messages or [])]


def to_response(reply: dict) -> vf.Response:
    prompt_ids, completion_ids = reply.get("prompt_ids") or [], reply.get("completion_ids") or []
    tool_calls = [vf.ToolCall(**call) for call in reply.get("tool_calls") or []] or None
    content = reply.get("content")
    return vf.Response(
        id=reply["call"],
        created=int(time.time()),
        model="policy",
        usage=vf.Usage(
            prompt_tokens=len(prompt_ids),
            reasoning_tokens=0,
            completion_tokens=len(completion_ids),
            total_tokens=len(prompt_ids) + len(completion_ids),
        ),
        message=vf.ResponseMessage(
            content="" if content is None and tool_calls is None else content,
            reasoning_content=reply.get("reasoning"),
            tool_calls=tool_calls,
            finish_reason=reply.get("finish_reason"),
            is_truncated=reply.get("finish_reason") == "length",
            tokens=vf.ResponseTokens(
                prompt_ids=prompt_ids,
                prompt_mask=[0] * len(prompt_ids),
                completion_ids=completion_ids,
                completion_mask=[1] * len(completion_ids),
                # JSON has no infinity: a logprob of -inf arrives as null
                completion_logprobs=[float("-inf") if x is None else x for x in reply.get("logprobs") or []],
            ),
        ),
    )


def _to_chat_message(message: Any, number: int) -> dict:
    fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    role = "user" if fields["role"] == "text" else fields["role"]
    chat = {"role": role, "content": _only_text(fields.get("content"), number=number)}
    if fields.get("reasoning_content"):
        chat["reasoning_content"] = fields["reasoning_content"]
    if fields.get("tool_calls"):
        chat["tool_calls"] = [_to_chat_tool_call(call) for call in fields["tool_calls"]]
    if fields.get("tool_call_id"):
        chat["tool_call_id"] = fields["tool_call_id"]
    return chat


def _to_chat_tool_call(call: dict) -> dict:
    """verifiers holds calls flat, OpenAI nests them. Old data sets hold the nested form already."""
    if "function" in call:
        return call
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def _only_text(content: Any, *, number: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, str) and part.get("type") != "text":
            raise ValueError(
                f"Message {number} has a part of type {part.get('type')!r} - expected text only - use an environment "
                "without images or sound: no model trained here reads them."
            )
    return "\n".join(part if isinstance(part, str) else part["text"] for part in content)


def _flat(sampling_args: dict) -> dict:
    """Sampling as one flat dict: `extra_body` is how an OpenAI client is told of vLLM's own parameters."""
    sampling = {name: value for name, value in sampling_args.items() if value is not None and name != "extra_body"}
    if sampling.pop("n", 1) != 1:
        raise ValueError(
            f"The environment samples with n={sampling_args['n']} - expected one completion per turn - remove `n` from "
            "its sampling_args; the orchestrator makes the group."
        )
    return {**sampling, **(sampling_args.get("extra_body") or {})}


def _result(state: vf.State, *, stopped_by_us: bool) -> dict:
    answer = state.get("answer")
    return {
        "reward": checked_number(state.get("reward"), name="(the sum of all)"),
        "metrics": {name: checked_number(value, name=name) for name, value in (state.get("metrics") or {}).items()},
        "prompt": to_chat(state.get("prompt")),
        "completion": _completion(state.get("completion")),
        "answer": answer if answer is None or isinstance(answer, str) else str(answer),
        "info": as_dict(state.get("info")),
        "example_id": as_id(state.get("example_id", 0)),
        "stop": "max_turns_reached" if stopped_by_us else state.get("stop_condition"),
        "truncated": bool(state.get("is_truncated")),
    }


def _completion(completion: Any) -> list[dict]:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else to_chat(completion)


def _members(environment: Any) -> Iterator[Any]:
    """The environment and, of an EnvGroup, its members and theirs."""
    yield environment
    for member in getattr(environment, "envs", []):
        yield from _members(member)


def _rubrics(environment: Any) -> Iterator[Any]:
    """All rubrics of an environment, those inside of a RubricGroup too."""
    pending = [member.rubric for member in _members(environment)]
    while pending:
        rubric = pending.pop()
        yield rubric
        pending += getattr(rubric, "rubrics", [])


def _watch(rubric: Any) -> None:
    for place, function in enumerate(rubric.funcs):
        if not getattr(function, "_watched_by_trireme", False):
            rubric.funcs[place] = _watched(function)


def _watched(function: Callable) -> Callable:
    """The same reward function (verifiers reads its signature and name) that also tells us when it fails."""
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return checked_number(await value if inspect.isawaitable(value) else value, name=name)
        except Exception as error:
            if (errors := _scoring.get()) is not None:
                errors.append(error)
            raise

    watched.__name__ = name
    watched._watched_by_trireme = True  # type: ignore[attr-defined]
    return watched


def _refuse_group_rewards(environment: Any) -> None:
    rubrics = [
        rubric for rubric in _rubrics(environment) if rubric.has_group_rewards and not hasattr(rubric, "rubrics")
    ]
    if rubrics:
        names = ", ".join(function.__name__ for rubric in rubrics for function in rubric.funcs)
        raise TypeError(
            f"A reward function among {names} scores a whole group (plural parameters such as `completions`, or a list "
            "as its return type) - expected functions that score one rollout - rewrite it per rollout; comparison "
            "within a group is the advantage's work."
        )
