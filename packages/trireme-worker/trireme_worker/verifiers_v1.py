"""Runs v1 environments of verifiers (from 0.4), unmodified: a package that exports a `Taskset`, an `Env`, or both.

verifiers v1 lets any program act: it wants an endpoint, not a client. Ours is the gateway of the orchestrator, as for
any agent program. verifiers relays each request in the dialect of its program, with the id of the trace that it belongs
to.

`args` are fields of the environment's configuration (`agent`, `timeout`, `retries`, ...); `select` picks tasks as in
verifiers; every other key is the taskset's own. What differs from verifiers' defaults: programs run as subprocesses
here and not in a sandbox that is rented, and a taskset without a harness gets `trireme_chat` (`chat.py`), not a shell.

The policy plays all agents that have no `client` of their own. Each run of one is reported with its reward, and
compared with the runs of the same agent. There is no evaluation split in v1: give `[[orchestrator.eval.env]]` other
`args`.
"""

import random
import sys
from collections import OrderedDict, defaultdict
from contextlib import AbstractAsyncContextManager
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire

from trireme_worker import chat
from trireme_worker.pictures import with_pictures
from trireme_worker.rollout import Adapter, Ask, RewardError, as_id, checked_number, usable_metrics

FULL = ("context_length_exceeded", "prompt is too long")
"""Words in the gateway's refusal of a conversation that no longer fits into the model's context, by dialect."""

CHAT = "trireme_chat"
"""The id of our harness. verifiers imports a plugin by its id, which can have no dots."""

ENDLESS = 2**31 - 1  # number of tasks that means endless ones, as in the orchestrator's `data/order.py`

KEPT_TASKS = 4096
"""Drawn tasks of an infinite taskset that are kept. An older one is drawn again, with all before it."""


class VerifiersV1Adapter(Adapter):
    """One v1 environment. What compares in v1 is an episode: one rollout."""

    uses_gateway = True
    train: "list[vf.Task] | EndlessTasks"

    def __init__(self, module: str, *, args: dict, versions: dict[str, str]) -> None:
        self.versions = versions
        select = vf.SelectConfig.model_validate(args.get("select", {}))
        config = _configured(module, {name: value for name, value in args.items() if name != "select"})
        self._roles = _roles_of_the_policy(config)
        self._environment = vf.load_environment(config)
        taskset = self._environment.taskset.select(select)
        self.train = list(taskset) if taskset.bounded else EndlessTasks(taskset)

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return self._environment.serving()

    async def play(self, request: dict, ask: Ask) -> dict:
        """Scored too: in v1 an episode ends with its judgement, while what the agent left behind is still there."""
        most = request.get("max_turns")
        for spec in (getattr(self._environment.config, role) for role in self._roles):
            if most is not None and (spec.max_turns is None or spec.max_turns > most):
                spec.max_turns = most  # the run's own limit; the environment's may be lower
        # the key is in the path: verifiers reads keys from variables, which all rollouts of this process share
        url = f"{request['gateway']}/s/{request['api_key']}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="TRIREME_NO_KEY")
        context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling(**request["sampling"]))
        task = self._with_pictures(self.train[request["index"]])
        episode = await self._environment.run_episode(task, context)
        return _result(_policy_traces(episode, self._roles), task)

    def _with_pictures(self, task: vf.Task) -> vf.Task:
        """Return the task with the pictures of its prompt in it, for any harness."""
        prompt = task.data.prompt
        if not isinstance(prompt, list) or all(isinstance(message.content, str | None) for message in prompt):
            return task
        shown = with_pictures([message.model_dump() for message in prompt], self.folder)
        messages = [type(old).model_validate(new) for old, new in zip(prompt, shown, strict=True)]
        return task.with_data(prompt=messages)

    async def score(self, played: list[dict]) -> list[dict]:
        return played


class EndlessTasks:
    """The tasks of an infinite taskset by their place, drawn when they are asked for.

    A task is the same one in each worker, and after a restart, also if the taskset draws from the module `random`:
    each draw starts from the state of `random` that the one before has left.
    """

    def __init__(self, taskset: vf.Taskset) -> None:
        self._taskset = taskset
        self._first_state = random.getstate()
        self._begin()

    def _begin(self) -> None:
        self._tasks, self._state, self._num_drawn = iter(self._taskset), self._first_state, 0
        self._kept: OrderedDict[int, vf.Task] = OrderedDict()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, place: int) -> vf.Task:
        # a task that is kept no longer can only be drawn again from the beginning
        if place < self._num_drawn and place not in self._kept:
            self._begin()
        # the state of `random` is swapped, as other code of the environment uses it between two draws
        outer = random.getstate()
        random.setstate(self._state)
        try:
            while self._num_drawn <= place:
                self._kept[self._num_drawn] = next(self._tasks)
                self._num_drawn += 1
                if len(self._kept) > KEPT_TASKS:
                    self._kept.popitem(last=False)
            self._state = random.getstate()
        except Exception as error:
            self._begin()  # a generator that has raised draws nothing more
            raise RuntimeError(f"Task {place} could not be drawn: {type(error).__name__}: {error}") from error
        finally:
            random.setstate(outer)
        return self._kept[place]


def _configured(module: str, args: dict) -> Any:
    """Return the environment's configuration, as its own class reads it."""
    sys.modules[CHAT] = chat
    fields = vf.env_config_type(module, args.get("id", "")).model_fields
    taskset = {name: value for name, value in args.items() if name not in fields}
    raw = {name: value for name, value in args.items() if name in fields}
    raw["taskset"] = {"id": module, **taskset, **raw.get("taskset", {})}
    config = vf.resolve_env_config(raw)
    for name, spec in agent_config_fields(config).items():
        # a sandbox that is rented costs money, so only a user who names one gets it
        if "runtime" not in raw.get(name, {}) and isinstance(spec.runtime, vf.PrimeConfig):
            spec.runtime = vf.SubprocessConfig()
        if spec.harness is None and vf.default_harness_id(module) == "bash":
            spec.harness = vf.harness_config_type(CHAT).model_validate({"id": CHAT})
    return config


def _roles_of_the_policy(config: Any) -> list[str]:
    roles = agent_config_fields(config)
    for name, spec in roles.items():
        if spec.client is None and spec.model is not None:
            raise ValueError(
                f"Agent {name!r} names the model {spec.model!r} and no endpoint - expected a `client` with it, such as "
                f'{{ {name} = {{ model = "...", client = {{ type = "eval", base_url = "http://..." }} }} }} - add one, '
                "or leave `model` out: then the policy plays it."
            )
    if not (ours := [name for name, spec in roles.items() if spec.client is None]):
        raise TypeError(
            f"The environment's agents ({', '.join(roles)}) all have a `client` of their own - expected one that the "
            "policy plays - remove the `client` of one from `args`."
        )
    return ours


def _policy_traces(episode: Any, roles: list[str]) -> list[Any]:
    """Return the runs of the policy's agents that are trained on.

    Raises: what went wrong in the episode; RewardError if it was the scoring.
    """
    if not episode.ok:
        for trace in episode.traces:
            if not trace.ok and trace.last_error is not None:
                # scoring had begun, so the rollout itself went well
                if trace.timing.scoring.start:
                    raise RewardError from _failure(trace.last_error)
                raise _failure(trace.last_error)
        raise _failure(episode.last_error) if episode.last_error else _EpisodeFailed("the episode is not ok")
    if not (traces := [trace for trace in episode.traces if trace.agent.name in roles and trace.agent.trainable]):
        raise RuntimeError(
            f"The episode has no run of {' or '.join(roles)} that is trained on - expected one at least - see that "
            "`Env.setup` leaves an agent `trainable`."
        )
    return traces


def _failure(error: Any) -> Exception:
    failure = _EpisodeFailed(error.message)
    failure.add_note(error.traceback or "")
    return failure


class _EpisodeFailed(Exception):
    """An episode failed, with the message of verifiers."""


def _result(traces: list[Any], task: Any) -> dict:
    """Return the mean reward of several runs, means of metrics by agent, and the messages of the longest."""
    trace = max(traces, key=lambda each: each.num_turns)

    # agents end their run when the gateway refuses an overlong conversation, so its words are the reason
    refusals = [each.calls[-1].error.message for each in traces if each.calls and each.calls[-1].error is not None]
    is_full = any(words in refusal for words in FULL for refusal in refusals)
    # the last branch of the conversation, split before the first message of the model
    nodes = trace.branches[-1].nodes if trace.branches else []
    first = next((place for place, node in enumerate(nodes) if node.sampled), len(nodes))
    messages = [message_to_wire(node.message) for node in nodes]

    runs, of_runs = [], defaultdict(list)
    left_out: dict[str, str] = {}
    for each in traces:
        scores = {name: value.score for name, value in each.rewards.items() if value is not None}
        scores |= {name: value for name, value in each.metrics.items() if value is not None}
        usable = usable_metrics(scores)
        metrics, left_out = usable["metrics"], left_out | usable["left_out"]
        metrics["num_turns"] = float(each.num_turns)
        # as `each.reward`, without those of weight 0: nan times 0 is nan
        weighted = {name: value for name, value in each.rewards.items() if value is not None and value.weight != 0}
        for name, value in weighted.items():
            checked_number(value.score, name=name)
        total = sum(value.value for value in weighted.values())
        reward, agent = checked_number(total, name="(the sum of all)"), each.agent.name
        runs.append({"agent": agent, "trace": each.id, "reward": reward})
        # with several agents, a metric's name begins with the agent that it is of
        if len(traces) > 1:
            metrics = {f"{agent}/{name}": value for name, value in (metrics | {"reward": reward}).items()}
        for name, value in metrics.items():
            of_runs[name].append(value)

    answer = getattr(task.data, "answer", None)
    return {
        "reward": sum(run["reward"] for run in runs) / len(runs),
        "runs": runs,
        "metrics": {name: sum(values) / len(values) for name, values in of_runs.items()},
        "left_out": left_out,
        "prompt": messages[:first],
        "completion": messages[first:],
        "answer": answer if answer is None or isinstance(answer, str) else str(answer),
        "info": {"agent": trace.agent.name, "task": task.data.name or task.data.id or ""},
        "example_id": as_id(task.data.idx if task.data.id is None else task.data.id),
        "stop": "prompt_too_long" if is_full else trace.stop_condition,
        "truncated": is_full or any(each.is_truncated for each in traces),
    }
