"""Runs verifiers v0 environments (0.2.0) unmodified: our client in, their state out, nothing of theirs patched.

Surprising about verifiers 0.2.0, and why this file is more than a call of `env.run_rollout`:
1. `Rubric` swallows what a reward function raises, logs it and scores 0.0. A silent 0 is a lie that would be trained
   on. We wrap the functions in the rubrics' public `funcs` lists; the wrapper notes the error for the rollout being
   scored (a context variable, as rollouts are scored concurrently) and re-raises it for verifiers to swallow.
2. The number check must be in that wrapper as well: `float(None)` fails inside of verifiers and becomes 0.0, too. Only
   a function of weight 0, which is a metric, may fail: it is left out of that rollout's metrics.
3. `rollout` returns errors as `state["error"]`, and scores them all the same in `run_rollout`; ours end unscored. It
   also moves each finished rollout through a thread to serialise it, so we call its public parts instead.
4. A rubric with a group reward function refuses to score one rollout (an `assert`). `score_group` also gives each turn
   without a reward the rollout's own; only what the environment gave itself is a turn's reward here.
5. Its own client raises on an empty completion. A model that answers with nothing must be scored, so ours does not.
"""

import asyncio
import contextvars
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import verifiers as vf

from trireme_worker.pictures import text_of
from trireme_worker.rollout import (
    Adapter,
    Ask,
    EngineError,
    OverlongPrompt,
    RewardError,
    as_dict,
    as_id,
    chat_message,
    checked_group,
    checked_number,
    flat_sampling,
    usable_metrics,
)


@dataclass
class Played:
    """A rollout that is over."""

    state: vf.State
    client: "AskingClient"


class VerifiersAdapter(Adapter):
    """One verifiers environment."""

    train: Any
    eval: Any

    def __init__(self, environment: Any, *, versions: dict[str, str]) -> None:
        self._environment = environment
        self.versions = versions
        members = list(_tree(environment, "envs"))
        self._rubrics = [rubric for member in members for rubric in _tree(member.rubric, "rubrics")]
        for owner in (*members, *self._rubrics):
            remember_signatures(owner)

        self.group_rewards = any(rubric.has_group_rewards for rubric in self._rubrics)
        self.train = environment.build_dataset()
        self.eval = environment.build_eval_dataset()
        self._row = functools.lru_cache(maxsize=1024)(self._read_row)  # the rollouts of a group share an example

    async def play(self, request: dict, ask: Ask) -> Played:
        """A failed rollout is not scored: its reward would say nothing about the policy."""
        own, given = self._environment.sampling_args, request["sampling"]
        # the orchestrator is told what it replaces, so that it can name that
        replaced = {name: value for name, value in flat_sampling(own).items() if name in given}
        client = AskingClient(ask, max_turns=request.get("max_turns"), replaced=replaced)
        sampling = {**own, **given}
        row = self._row(request["split"], request["index"])
        state = await self._environment.rollout(row, client, "policy", sampling)
        # verifiers reports the error in the state instead of raising it
        if state.get("error") is not None:
            await self._environment.rubric.cleanup(state)
            raise state["error"]
        return Played(state, client)

    async def score(self, played: list[Played]) -> list[dict]:
        for rubric in self._rubrics:  # again each time: environments add functions as they go
            watch(rubric)
            if isinstance(rubric, vf.JudgeRubric):
                _let_judge_read_messages(rubric)
        states = [one.state for one in played]
        scoring = Scoring(states)
        rubric, scores = self._environment.rubric, self._environment.score_rollouts
        # an environment may switch scoring off; the dummies fill in the fields of the state all the same
        if self.group_rewards:
            await scoring.run((rubric.score_group if scores else rubric.dummy_score_group)(states))
        else:
            await scoring.run((rubric.score_rollout if scores else rubric.dummy_score_rollout)(states[0]))
        return [_result(one, scoring) for one in played]

    async def dispose(self, played: Played) -> None:
        await self._environment.rubric.cleanup(played.state)

    def _read_row(self, split: str, index: int) -> dict:
        """Read an example. Without an evaluation set, evaluation reads the training set, as in verifiers."""
        use_eval = self.train is None or (split == "eval" and self.eval is not None)
        return (self.eval if use_eval else self.train)[index]


class AskingClient(vf.Client):
    """The policy, as verifiers sees it: prompt and response are the orchestrator's `ask` and `reply`.

    One per rollout. Token ids and logprobs are filled in for environments that read them; they are not trained on.
    """

    def __init__(self, ask: Ask, *, max_turns: int | None, replaced: dict | None = None) -> None:
        super().__init__(ask)
        self._replaced = replaced or {}  # sampling arguments of the environment that the run has its own of
        self._max_turns = max_turns
        self._num_asked = 0
        self.reached_max_turns = False
        self.place_of: dict[str, int] = {}  # place of each response among all that was asked for, keyed by its id

    def setup_client(self, config: Any) -> Any:
        raise TypeError(
            f"This client opens no connection and was given {config!r} - expected none. Use the one of the rollout."
        )

    async def to_native_tool(self, tool: vf.Tool) -> dict:
        strict = {} if tool.strict is None else {"strict": tool.strict}
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, **strict}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: vf.Messages) -> tuple[list[dict], dict]:
        return to_chat(messages), {}

    async def get_native_response(
        self, prompt: list[dict], model: str, sampling_args: dict, tools: list[dict] | None = None, **kwargs: Any
    ) -> dict:
        state = kwargs.get("state")
        if self._max_turns is not None and state is not None and len(state["trajectory"]) >= self._max_turns:
            # The run's own limit; the environment's may be lower. An overlong prompt is the one way verifiers knows to
            # end a rollout early and still score it.
            self.reached_max_turns = True
            raise vf.OverlongPromptError(f"the run allows {self._max_turns} turns")

        # the place is taken before the answer comes, as turns may be asked for in parallel
        place = self._num_asked
        self._num_asked += 1
        try:
            asked = flat_sampling(sampling_args) | self._replaced
            reply = await self.client(prompt, tools=tools, sampling=asked)
        except OverlongPrompt as error:
            raise vf.OverlongPromptError(str(error)) from error
        except EngineError as error:
            raise vf.ModelError(str(error)) from error
        self.place_of[reply["call"]] = place
        return reply

    async def raise_from_native_response(self, response: dict) -> None:
        """Every reply is a valid one, an empty one too."""

    async def from_native_response(self, response: dict) -> vf.Response:
        return to_response(response)

    async def close(self) -> None:
        """Nothing to close: the socket is the worker's."""


def to_chat(messages: Any) -> list[dict]:
    """Return verifiers' messages (or dicts, or text) as OpenAI chat messages; `to_response` is the other direction."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    fields = [each if isinstance(each, dict) else each.model_dump(exclude_none=True) for each in messages or []]
    roles = ["user" if each["role"] == "text" else each["role"] for each in fields]
    return [chat_message({**each, "role": role}, n) for n, (each, role) in enumerate(zip(fields, roles, strict=True))]


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


def _result(played: Played, scoring: "Scoring") -> dict:
    state, answer = played.state, played.state.get("answer")
    completion = state.get("completion")
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return {
        "reward": checked_number(state.get("reward"), name="(the sum of all)"),
        **_metrics(state.get("metrics") or {}, scoring.unusable.get(id(state), {})),
        "turn_rewards": _turn_rewards(played, scoring),
        "prompt": to_chat(state.get("prompt")),
        "completion": to_chat(completion),
        "answer": answer if answer is None or isinstance(answer, str) else str(answer),
        "info": as_dict(state.get("info")),
        "example_id": as_id(state.get("example_id", 0)),
        "stop": "max_turns_reached" if played.client.reached_max_turns else state.get("stop_condition"),
        # our limit of turns reaches verifiers as an overlong prompt, but cuts nothing
        "truncated": any(step.get("is_truncated") for step in state["trajectory"])
        if played.client.reached_max_turns
        else bool(state.get("is_truncated")),
    }


def _metrics(metrics: dict, unusable: dict[str, str]) -> dict:
    """Return the fields `metrics` and `left_out`: functions of weight 0 that failed are left out."""
    fields = usable_metrics({name: value for name, value in metrics.items() if name not in unusable})
    return fields | {"left_out": fields["left_out"] | unusable}


def _let_judge_read_messages(rubric: vf.JudgeRubric) -> None:
    """Give the judge dicts: in verifiers' own messages it does not find the question, and asks about an empty one."""
    if getattr(rubric.judge, "_reads_messages", False):
        return
    judge = rubric.judge

    async def ask(prompt: Any, completion: Any, answer: str, state: vf.State | None = None) -> str:
        if not isinstance(prompt, str):  # the judge's own prompt is text
            prompt = [{**message, "content": text_of(message["content"])} for message in to_chat(prompt)]
        return await judge(prompt, completion, answer, state)

    ask._reads_messages = True  # type: ignore[attr-defined]
    rubric.judge = rubric.class_objects["judge"] = ask


def _turn_rewards(played: Played, scoring: "Scoring") -> list[list[float]]:
    """Return what the environment wrote into `reward` of steps of the trajectory, at the places of those turns.

    A step that was not asked for (the environment made it up) has no tokens to credit.
    """
    rewards: list[list[float]] = []
    for step in played.state["trajectory"]:
        place = played.client.place_of.get(getattr(step.get("response"), "id", ""))
        if scoring.is_own(step) and place is not None:
            # turns without a reward get an empty list, so that places count from the first turn
            rewards += [[] for _ in range(place + 1 - len(rewards))]
            rewards[place] = [checked_number(step["reward"], name="reward of a step of the trajectory")]
    return rewards


def _tree(root: Any, children: str) -> Iterator[Any]:
    """Yield an environment or a rubric, and of a group (EnvGroup, RubricGroup) its members and theirs."""
    yield root
    for member in getattr(root, children, []):
        yield from _tree(member, children)


def remember_signatures(owner: Any) -> None:
    """Note the signatures of an environment's or a rubric's stop conditions and cleanup handlers on these functions.

    verifiers asks `inspect.signature` for each of them in each rollout, which takes longer than most of them run. A
    function that has a `__signature__` answers at once.
    """
    for method in (*getattr(owner, "_stop_conditions", ()), *getattr(owner, "_cleanup_handlers", ())):
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function):
            function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]


# scoring by rubrics, without what they hide: each reward function is wrapped in the rubric's own list

LONGEST_REASON = 200  # characters

_current: contextvars.ContextVar["Scoring | None"] = contextvars.ContextVar("scoring", default=None)


class Scoring:
    """One scoring of a rollout or a group. The wrappers find theirs by a context variable: many run at once."""

    def __init__(self, states: list[Any]) -> None:
        self.states = states
        self.unusable: dict[int, dict[str, str]] = {}  # metrics of weight 0 and what is wrong, by the state's `id`
        self.errors: list[BaseException] = []
        self._own: set[int] = set()  # steps whose reward the environment gave, by `id`
        self.note_own_rewards(states)

    async def run(self, scoring: Awaitable[None]) -> None:
        """Raises: RewardError, with the first of the causes."""
        token = _current.set(self)
        try:
            await scoring
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.errors.append(error)
        finally:
            _current.reset(token)
        if self.errors:
            raise RewardError from self.errors[0]

    def leave_out(self, name: str, states: Iterable[Any], why: object) -> None:
        for state in states:
            self.unusable.setdefault(id(state), {})[name] = str(why)[:LONGEST_REASON]

    def is_own(self, step: Any) -> bool:
        return id(step) in self._own and step.get("reward") is not None

    def note_own_rewards(self, states: Iterable[Any]) -> None:
        """Note rewards that only the environment can have set since `take_back`, or since the beginning."""
        self._own |= {id(step) for state in states for step in state["trajectory"] if step.get("reward") is not None}

    def take_back(self, states: Iterable[Any]) -> None:
        """Remove what `score_group` of a first rubric filled in, before a function of a second one runs."""
        for state in states:
            for step in state["trajectory"]:
                if id(step) not in self._own:
                    step["reward"] = None


def watch(rubric: Any) -> None:
    names = {function.__name__ for function in rubric.funcs if getattr(function, "_watched_by_trireme", False)}
    for place, function in enumerate(rubric.funcs):
        if not getattr(function, "_watched_by_trireme", False):
            name = own = getattr(function, "__name__", type(function).__name__)
            for number in range(2, len(rubric.funcs) + 2):  # two lambdas are two metrics
                name = f"{own}_{number}" if name in names else name
            names.add(name)
            rubric.funcs[place] = _watched(function, name, rubric)


def _watched(function: Callable, name: str, rubric: Any) -> Callable:
    """Wrap a reward function (verifiers reads its signature and name) so that failures are recorded.

    One of weight 0 is a metric: it costs no rollout, and is left out of the metrics of the rollouts in which it fails.
    """
    scores_group = rubric._is_group_func(function)
    signature = inspect.signature(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    takes_state = takes_any or "state" in signature.parameters

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        scoring = _current.get()
        scored = scoring.states if scoring is not None and scores_group else [kwargs.get("state")]
        if not takes_state:
            kwargs.pop("state", None)
        # a function that takes neither `state` nor `states` cannot give a turn a reward
        states = [*kwargs.get("states", ()), *([kwargs["state"]] if "state" in kwargs else ())]
        if scoring is not None:
            scoring.take_back(states)
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            if scoring is not None:
                scoring.note_own_rewards(states)
            if scoring is None or not scores_group:
                return checked_number(value, name=name)
            values = checked_group(value, size=len(scored), name=name)
            return [checked_number(number, name=name) for number in values]
        except (Exception, SystemExit) as error:
            if scoring is None:
                raise
            # weights are looked up now, as environments may change them after the wrapping
            if dict(zip(map(id, rubric.funcs), rubric.weights, strict=False)).get(id(watched)) == 0:
                scoring.leave_out(name, scored, f"{type(error).__name__}: {error}")
                return [0.0] * len(scored) if scores_group else 0.0
            scoring.errors.append(error)
            raise

    if not scores_group and not takes_state:  # verifiers passes the state, which names the rollout of the metric
        asked = [*signature.parameters.values(), inspect.Parameter("state", inspect.Parameter.KEYWORD_ONLY)]
        signature = signature.replace(parameters=asked)
    watched.__signature__ = signature  # type: ignore[attr-defined]  # verifiers asks for it seven times per rollout
    watched.__name__ = name
    watched._watched_by_trireme = True  # type: ignore[attr-defined]
    return watched
