"""One rollout from its task to its tokens and reward: joins an environment, the engines and a trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import jinja2
import numpy as np

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.log import get_logger
from trireme.config.orchestrator import Sampling, sampling_notes
from trireme.config.run import RunConfig
from trireme.messages import Tokens
from trireme.orchestrator.engines.pool import Generation, InferencePool, OverlongPrompt
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, FinishReason, Reply, RunTask, Split
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.continuation import Rewritten, drops_thinking
from trireme.orchestrator.rollout.sampling import TurnSampling, sampling_arguments
from trireme.orchestrator.rollout.trajectory import Trajectory
from trireme.orchestrator.rollout.turns import Said, TurnReader

log = get_logger("rollouts")

PROMPT_TOO_LONG = "prompt_too_long"


@dataclass(frozen=True)
class Finished:
    """A rollout that ended and was scored. Unpacks into `done, samples`.

    Example:
        Finished(done, num_turns=3, truncated=True, stop="max_tokens", samples=[Tokens(...)])
    """

    done: Done
    num_turns: int  # of the model
    truncated: bool  # the model ran out of tokens, or the conversation out of context
    stop: str | None  # "max_tokens", "context_full", "prompt_too_long", or which of the environment's conditions
    samples: list[Tokens] = field(default_factory=list)  # empty where the model was not an engine of ours
    token_rewards: list[np.ndarray] = field(default_factory=list)
    """Per sample [T] float32, NaN where none was given. Empty: none at all."""
    num_sampled: int | None = None  # tokens of the model; None where nothing counts them
    num_tokens: int | None = None  # of the longest sample, or of the whole conversation

    @classmethod
    def from_environment(cls, done: Done, *, num_sampled: int | None = None, num_tokens: int | None = None) -> Self:
        """Build it from what the environment says alone: the model was not an engine of ours."""
        num_turns = sum(message.get("role") == "assistant" for message in done.completion)
        return cls(done, num_turns, done.truncated, done.stop, num_sampled=num_sampled, num_tokens=num_tokens)

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled any of its tokens."""
        return {int(v) for sample in self.samples for v in np.unique(sample.versions[sample.versions >= 0])}

    def __iter__(self) -> Iterator[Any]:
        return iter((self.done, self.samples))


class RolloutRunner:
    """Runs rollouts; knows nothing of groups and batches."""

    def __init__(self, config: RunConfig, pool: InferencePool, tokenizer: ChatTokenizer) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._reader = TurnReader(config.inference.model, tokenizer, pool)
        self._strategy = config.orchestrator.trajectory_strategy
        self._arguments: dict[int, tuple[Sampling, dict[str, Any]]] = {}
        self._noted: set[tuple[str, ...]] = set()
        self._run_seed = config.seed if config.synchronous else None
        self._model = config.trainer.tokenizer.name or config.model.name
        for note in sampling_notes(config.orchestrator.sampling):
            log.warning("%s", note)
        thinks = config.inference.model.reasoning_parser is not None
        if self._strategy == "interleaved" and thinks and drops_thinking(tokenizer):
            log.warning(
                "The chat template of %s drops the thinking of earlier turns: rollouts of a single turn are fine, the "
                'first one of several ends the run. Set `orchestrator.trajectory_strategy = "branching"` for those.',
                self._model,
            )

    async def run(
        self,
        environment: Environment,
        *,
        key: str,
        split: Split,
        example: int,
        attempt: int,
        sampling: Sampling,
        group: str = "",
        group_size: int = 1,
        trained: bool = True,
    ) -> Finished:
        """One rollout, scored.

        Args:
            key: names the rollout: the same key and attempt have the same seed, where there is one.
            group: of rollouts that are scored together, where the environment's rewards compare them.
            trained: whether it is trained on; else templates may rewrite, and nobody asks what sampling left out.

        Raises:
            RolloutFailed: see `Environment.run`; or nothing was sampled.
            ConfigError: the chat template cannot be trained on as the run is configured.
        """
        turns = TurnSampling(
            sampling,
            run_seed=self._run_seed,
            key=key,
            attempt=attempt,
            trained=trained,
            vocab_size=self._tokenizer.vocab_size or self._tokenizer.num_tokens,
            own=self._arguments_of(sampling),
        )
        play = self._begin(turns, trained=trained)

        def restart_deadline() -> None:
            nonlocal play
            play = self._begin(turns, trained=trained)

        async def ask(question: Ask) -> Reply:
            return await play.turn(question)

        task = RunTask(
            task=f"{key}.{attempt}",
            split=split,
            index=example,
            attempt=attempt,
            sampling=turns.own,
            max_turns=environment.config.max_turns,
            group=group,
            group_size=group_size,
        )
        done = await environment.run(task, ask, restart_deadline=restart_deadline)
        self._note_distortion(environment, turns.distorted)
        if trained and not play.trajectory.samples():
            why = play.refused or "The environment never asked for a model turn."
            raise RolloutFailed("rollout", f"{why} Nothing was sampled, so there is nothing to train on.")
        return play.finish(done)

    def _arguments_of(self, sampling: Sampling) -> dict[str, Any]:
        """Worked out once for each: a section of the configuration never changes."""
        if id(sampling) not in self._arguments:
            self._arguments[id(sampling)] = sampling, sampling_arguments(sampling)
        return self._arguments[id(sampling)][1]

    def _note_distortion(self, environment: Environment, names: set[str]) -> None:
        """Warn once per environment and set of arguments; `sampling_notes` covers the run's own."""
        if names and (environment.name, *sorted(names)) not in self._noted:
            self._noted.add((environment.name, *sorted(names)))
            log.warning(
                "environment %s: its sampling arguments %s make the engine sample from another distribution than the "
                "trainer can compute, so importance ratios are off by it - leave them out of the environment, unless "
                "that is meant.",
                environment.name,
                ", ".join(sorted(names)),
            )

    def _begin(self, sampling: TurnSampling, *, trained: bool) -> _Play:
        """Before the first turn."""
        lenient = self._strategy == "interleaved" and not trained
        trajectory = Trajectory(self._tokenizer, "interleaved_or_new" if lenient else self._strategy)
        return _Play(trajectory, sampling, self._pool, self._reader, model=self._model, trained=trained)


class _Play:
    """One attempt at a rollout: its turns so far, and how the last one ended."""

    def __init__(
        self,
        trajectory: Trajectory,
        sampling: TurnSampling,
        pool: InferencePool,
        reader: TurnReader,
        *,
        model: str,
        trained: bool,
    ) -> None:
        self.trajectory = trajectory
        self.refused: str | None = None  # what was too long, if that was the last thing that happened
        self._cut: str | None = None  # what the last turn ran out of
        self._sampling = sampling
        self._pool = pool
        self._reader = reader
        self._model = model
        self._trained = trained
        self._num_asked = 0

    async def turn(self, question: Ask) -> Reply:
        """Answer a request of the environment. Whatever is wrong with it is an error of this rollout alone.

        Raises: ConfigError where the chat template cannot be trained on as the run is configured.
        """
        self._num_asked += 1
        number = self._num_asked
        try:
            arguments = self._sampling.of_turn(number, question.sampling)
            asked = self.trajectory.ask(question.messages, question.tools)
            routes_from = asked.routes_from if self._trained else None
            turn = await self._pool.generate(asked.ids, arguments, routes_from=routes_from)
            keeps_stop = bool(arguments.get("include_stop_str_in_output"))
            said = await self._reader.read(asked.ids, turn, question.tools, number=number, keeps_stop=keeps_stop)
        except OverlongPrompt as error:
            self.refused, self._cut = str(error), PROMPT_TOO_LONG
            return Reply(error=str(error), error_kind="overlong_prompt")
        except Rewritten as error:
            raise ConfigError(_refusal(self._model, str(error))) from error
        except jinja2.TemplateError as error:
            return Reply(error=f"The chat template refuses this conversation: {error}", error_kind="engine")
        except ValueError as error:
            return Reply(error=str(error), error_kind="engine")
        except (TriremeError, AssertionError):
            raise
        except Exception as error:  # of a template or an engine that was given what it does not expect
            words = f"This request cannot be answered: {type(error).__name__}: {error}"
            return Reply(error=words, error_kind="engine")
        self.refused, self._cut = None, turn.cut
        self.trajectory.record(asked, turn, said)
        return _to_reply(asked.ids, turn, said)

    def finish(self, done: Done) -> Finished:
        """Raises: RolloutFailed where the environment gave rewards for tokens that there are not."""
        try:
            token_rewards = self.trajectory.token_rewards(done.turn_rewards)
        except ValueError as error:
            raise RolloutFailed("score", str(error)) from error
        samples = self.trajectory.samples()
        return Finished(
            done=done,
            num_turns=self.trajectory.num_turns,
            truncated=done.truncated or self._cut is not None,
            stop=self._cut or done.stop,
            samples=samples,
            token_rewards=token_rewards,
            num_sampled=sum(int(sample.loss_mask.sum()) for sample in samples),
            num_tokens=max((sample.length for sample in samples), default=0),
        )


def _to_reply(prompt: list[int], turn: Generation, said: Said) -> Reply:
    return Reply(
        content=said.content,
        reasoning=said.reasoning,
        tool_calls=list(said.tool_calls) or None,
        finish_reason=_finish_reason(turn, bool(said.tool_calls)),
        prompt_ids=prompt,
        completion_ids=turn.ids,
        logprobs=turn.logprobs,
    )


def _finish_reason(turn: Generation, called: bool) -> FinishReason:
    if called:
        return "tool_calls"
    return "length" if turn.finish_reason == "length" else "stop"


def _refusal(model: str, how: str) -> str:
    return (
        f"The chat template of {model} rewrites earlier turns when a conversation goes on: {how}. With "
        '`orchestrator.trajectory_strategy = "interleaved"` all turns of a rollout are one sample, so a template was '
        "expected that only adds to what it rendered before; those of many thinking models (Qwen3, DeepSeek-R1) drop "
        'the thinking of earlier turns. Set `trajectory_strategy = "branching"` (one sample per turn), or give the '
        "model a template that keeps them. Single-turn environments work with either."
    )
