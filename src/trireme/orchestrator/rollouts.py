"""One rollout from its task to its tokens and reward: joins an environment, the engines and a trajectory."""

from __future__ import annotations

import hashlib
from typing import Any

import jinja2

from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig
from trireme.messages import Tokens
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, FinishReason, Reply, RunTask, Split
from trireme.orchestrator.inference_pool import Generation, InferencePool, OverlongPrompt
from trireme.orchestrator.tool_calls import split_tool_calls
from trireme.orchestrator.trajectory import Trajectory

ENGINE_KEYS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "logit_bias"}
    | {"allowed_token_ids", "include_stop_str_in_output", "seed"}
)
"""What of an environment's sampling arguments reaches the engine; the rest is for OpenAI clients (`n`, `logprobs`)."""


class RolloutRunner:
    """Runs rollouts; knows nothing of groups and batches."""

    def __init__(self, config: RunConfig, pool: InferencePool, tokenizer: ChatTokenizer) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._branching = config.orchestrator.trajectory_strategy == "branching"
        self._seed = config.seed if config.synchronous else None

    async def run(
        self, environment: Environment, *, key: str, split: Split, example: int, attempt: int, sampling: Sampling
    ) -> tuple[Done, list[Tokens]]:
        """One rollout, scored.

        Args:
            key: names the rollout: the same key and attempt have the same seed in a synchronous run.

        Raises:
            RolloutFailed: see `Environment.run`.
        """
        own = sampling_arguments(sampling)
        trajectory, turns = self._begin()

        def begin_anew() -> None:
            nonlocal trajectory, turns
            trajectory, turns = self._begin()

        async def ask(question: Ask) -> Reply:
            nonlocal turns
            turns += 1
            arguments = {k: v for k, v in question.sampling.items() if k in ENGINE_KEYS and v is not None} | own
            if self._seed is not None and sampling.temperature > 0:
                arguments["seed"] = seed_of(self._seed, key, attempt, turns)
            return await self._turn(trajectory, question, arguments, f"call-{turns}")

        task = RunTask(
            task=f"{key}.{attempt}",
            split=split,
            index=example,
            attempt=attempt,
            sampling=own,
            max_turns=environment.config.max_turns,
        )
        done = await environment.run(task, ask, begin_anew=begin_anew)
        return done, trajectory.samples()

    def _begin(self) -> tuple[Trajectory, int]:
        """Before the first turn: nothing said, no turn taken."""
        return Trajectory(self._tokenizer, branching=self._branching), 0

    async def _turn(self, trajectory: Trajectory, question: Ask, sampling: dict[str, Any], call: str) -> Reply:
        try:
            asked = trajectory.ask(question.messages, question.tools)
            turn = await self._pool.generate(asked.ids, sampling)
        except OverlongPrompt as error:
            return Reply(error=str(error), error_kind="overlong_prompt")
        except jinja2.TemplateError as error:
            return Reply(error=f"The chat template refuses this conversation: {error}", error_kind="engine")
        except ValueError as error:
            return Reply(error=str(error), error_kind="engine")
        text = self._tokenizer.decode(turn.ids)
        content, calls = split_tool_calls(text, call) if question.tools else (text, [])
        trajectory.record(asked, turn, text)
        return Reply(
            content=content,
            tool_calls=calls or None,
            finish_reason=_finish_reason(turn, bool(calls)),
            prompt_ids=asked.ids,
            completion_ids=turn.ids,
            logprobs=turn.logprobs,
        )


def _finish_reason(turn: Generation, called: bool) -> FinishReason:
    if called:
        return "tool_calls"
    return "length" if turn.finish_reason == "length" else "stop"


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """vLLM's names; what is at its default is left out."""
    given = sampling.model_dump(exclude={"extra_body", "stop"}, exclude_defaults=True, exclude_none=True)
    given["temperature"] = sampling.temperature
    if sampling.stop:
        given["stop"] = list(sampling.stop)
    return given | sampling.extra_body


def seed_of(run_seed: int, key: str, attempt: int, turn: int) -> int:
    """31 bits that depend on all four, and on nothing else."""
    digest = hashlib.sha256(f"{run_seed}/{key}/{attempt}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
