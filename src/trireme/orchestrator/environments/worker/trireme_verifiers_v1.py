"""Runs v1 environments of verifiers (from 0.4), unmodified: a package that exports a `Taskset`, an `Env`, or both.

verifiers v1 lets any program act: it wants an endpoint, not a client. Ours is the gateway of the orchestrator, as for
any agent program. verifiers relays each request in the dialect of its program, with the id of the trace that it belongs
to.

`args` are fields of the environment's configuration (`agent`, `timeout`, `retries`, ...); `select` picks tasks as in
verifiers; every other key is the taskset's own. What differs from verifiers' defaults: programs run as subprocesses
here and not in a sandbox that is rented, and a taskset without a harness gets `trireme_chat` and not a shell.

What cannot be supported: more than one agent played by the policy. Others may play along at endpoints of their own.
There is no evaluation split in v1: give `[[orchestrator.eval.env]]` other `args`.
"""

from contextlib import AbstractAsyncContextManager
from typing import Any

import verifiers.v1 as vf
from trireme_rollout import Adapter, Ask, RewardError, as_id, checked_number
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire

FULL = ("context_length_exceeded", "prompt is too long")
"""In the gateway's refusal of a conversation that no longer fits into the model's context, by dialect."""


class VerifiersV1Adapter(Adapter):
    """One v1 environment. What compares in v1 is an episode: one rollout."""

    uses_gateway = True

    def __init__(self, module: str, *, args: dict, versions: dict[str, str]) -> None:
        self.name = module
        self.versions = versions
        select = vf.SelectConfig.model_validate(args.get("select", {}))
        config = _configured(module, {name: value for name, value in args.items() if name != "select"})
        self._role = _role_of_the_policy(config)
        self._environment = vf.load_environment(config)
        taskset = self._environment.taskset.select(select)
        if not taskset.bounded:
            raise ValueError(
                "The taskset is infinite - expected a number of tasks to count epochs by - add `select = { limit = "
                "1000 }` to `args`."
            )
        self.train = list(taskset)

    def serving(self) -> AbstractAsyncContextManager[Any]:
        return self._environment.serving()

    async def play(self, request: dict, ask: Ask) -> dict:
        """Scored too: in v1 an episode ends with its judgement, while what the agent left behind is still there."""
        spec, most = getattr(self._environment.config, self._role), request.get("max_turns")
        if most is not None and (spec.max_turns is None or spec.max_turns > most):
            spec.max_turns = most  # the run's own limit; the environment's may be lower
        # the key is in the path: verifiers reads keys from variables, which all rollouts of this process share
        url = f"{request['gateway']}/s/{request['api_key']}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="TRIREME_NO_KEY")
        context = vf.ModelContext(model="policy", client=client, sampling=vf.Sampling(**request["sampling"]))
        task = self.train[request["index"]]
        episode = await self._environment.run_episode(task, context)
        return _result(_only_trace(episode, role=self._role), task)

    async def score(self, played: list[dict]) -> list[dict]:
        return played


def _configured(module: str, args: dict) -> Any:
    """The environment's configuration, as its own class reads it."""
    fields = vf.env_config_type(module, args.get("id", "")).model_fields
    taskset = {name: value for name, value in args.items() if name not in fields}
    raw = {name: value for name, value in args.items() if name in fields}
    raw["taskset"] = {"id": module, **taskset, **raw.get("taskset", {})}
    config = vf.resolve_env_config(raw)
    for name, spec in agent_config_fields(config).items():
        if "runtime" not in raw.get(name, {}) and isinstance(spec.runtime, vf.PrimeConfig):
            spec.runtime = vf.SubprocessConfig()
        if spec.harness is None and vf.default_harness_id(module) == "bash":
            spec.harness = vf.harness_config_type("trireme_chat").model_validate({"id": "trireme_chat"})
    return config


def _role_of_the_policy(config: Any) -> str:
    roles = agent_config_fields(config)
    ours = [name for name, spec in roles.items() if spec.client is None]
    if len(ours) != 1:
        raise TypeError(
            f"The environment has the agents {', '.join(roles)}, of which the policy would play "
            f"{', '.join(ours) or 'none'} - expected it to play one - give each of the others a `client` and a `model` "
            f'of its own in `args`, such as {{{ours[-1] if ours else "agent"} = {{ model = "...", client = '
            '{ type = "eval", base_url = "http://..." } } }.'
        )
    return ours[0]


def _only_trace(episode: Any, *, role: str) -> Any:
    """The policy's. Raises: what went wrong in the episode, RewardError where it was the scoring."""
    if not episode.ok:
        for trace in episode.traces:
            if not trace.ok and trace.last_error is not None:
                if trace.timing.scoring.start:
                    raise RewardError from _failure(trace.last_error)
                raise _failure(trace.last_error)
        raise _failure(episode.last_error) if episode.last_error else _EpisodeFailed("the episode is not ok")
    traces = [trace for trace in episode.traces if trace.agent.name == role]
    if len(traces) != 1:
        raise RuntimeError(
            f"Agent {role!r} was run {len(traces)} times in one episode - expected once - use an environment that runs "
            "it once; `rollouts_per_example` is how often a task is tried."
        )
    return traces[0]


def _failure(error: Any) -> Exception:
    failure = _EpisodeFailed(error.message)
    failure.add_note(error.traceback or "")
    return failure


class _EpisodeFailed(Exception):
    """An episode failed, with the message of verifiers."""


def _result(trace: Any, task: Any) -> dict:
    refusal = trace.calls[-1].error if trace.calls else None
    is_full = refusal is not None and any(words in refusal.message for words in FULL)
    # the last branch of the conversation, up to the first thing that the model said and from there on
    nodes = trace.branches[-1].nodes if trace.branches else []
    first = next((place for place, node in enumerate(nodes) if node.sampled), len(nodes))
    messages = [message_to_wire(node.message) for node in nodes]
    rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    scores = {name: checked_number(reward.score, name=name) for name, reward in rewards.items()}
    metrics = {name: checked_number(value, name=name) for name, value in trace.metrics.items() if value is not None}
    answer = getattr(task.data, "answer", None)
    return {
        "reward": checked_number(trace.reward, name="(the sum of all)"),
        "metrics": {**scores, **metrics, "num_turns": float(trace.num_turns)},
        "prompt": messages[:first],
        "completion": messages[first:],
        "answer": answer if answer is None or isinstance(answer, str) else str(answer),
        "info": {"agent": trace.agent.name, "task": task.data.name or task.data.id or ""},
        "example_id": as_id(task.data.idx if task.data.id is None else task.data.id),
        "stop": "prompt_too_long" if is_full else trace.stop_condition,
        "truncated": is_full or trace.is_truncated,
    }
