"""One rollout from its task to its tokens and reward: joins an environment, the engines and a trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.log import get_logger
from trireme.config.orchestrator import Sampling, sampling_notes
from trireme.config.run import RunConfig
from trireme.journal.records import Rollout
from trireme.orchestrator.engines.pool import InferencePool, OverlongPrompt
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, FinishReason, Reply, RunTask, Split
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.continuation import Rewritten, drops_thinking
from trireme.orchestrator.rollout.sampling import TurnSampling, sampling_arguments
from trireme.orchestrator.rollout.trajectory import Trajectory
from trireme.orchestrator.rollout.turns import TurnReader

log = get_logger("rollouts")

PROMPT_TOO_LONG = "prompt_too_long"

RolloutKey = tuple[int, int]
"""Example, and index of the rollout among those of its example: what a result is resumed by."""


@dataclass(frozen=True)
class RolloutSpec:
    """One rollout to make.

    Example:
        RolloutSpec("eval", example=3, rollout=1, name="eval-wordle-3-1", group="eval-wordle-3", group_size=4)
    """

    split: Split
    example: int  # index in the split
    rollout: int  # among those of its example, from 0
    name: str  # the same name and attempt have the same seed, where there is one
    group: str = ""  # rollouts that are scored together, where the environment's rewards compare them
    group_size: int = 1
    attempt: int = 0

    @property
    def key(self) -> RolloutKey:
        return self.example, self.rollout

    def task(self, environment: Environment, sampling: dict[str, Any] | None = None) -> RunTask:
        """Return the message that asks an environment worker for this rollout."""
        return RunTask(
            task=f"{self.name}.{self.attempt}",
            split=self.split,
            index=self.example,
            attempt=self.attempt,
            sampling=sampling or {},
            max_turns=environment.config.max_turns,
            group=self.group or self.name,
            group_size=self.group_size,
        )


class RolloutRunner:
    """Runs rollouts; knows nothing of groups and batches."""

    def __init__(self, config: RunConfig, pool: InferencePool, tokenizer: ChatTokenizer) -> None:
        self.pool = pool
        self.tokenizer = tokenizer
        self.reader = TurnReader(config.inference.model, tokenizer, pool)
        self.strategy = config.orchestrator.trajectory_strategy
        self.model = config.trainer.tokenizer.name or config.model.name
        self._arguments: dict[int, tuple[Sampling, dict[str, Any]]] = {}
        self._warned: set[tuple[str, ...]] = set()
        self._run_seed = config.seed if config.synchronous else None
        for note in sampling_notes(config.orchestrator.sampling):
            log.warning("%s", note)
        thinks = config.inference.model.reasoning_parser is not None
        if self.strategy == "interleaved" and thinks and drops_thinking(tokenizer):
            log.warning(
                "The chat template of %s drops the thinking of earlier turns: rollouts of a single turn are fine, the "
                'first one of several ends the run. Set `orchestrator.trajectory_strategy = "branching"` for those.',
                self.model,
            )

    async def run(
        self, environment: Environment, spec: RolloutSpec, *, sampling: Sampling, trained: bool = True
    ) -> Rollout:
        """Run and score one rollout.

        Args:
            trained: whether it is trained on. If not, templates may rewrite earlier turns, and engines need not report
                what only training needs.

        Raises:
            RolloutFailed: see `Environment.run`; or nothing was sampled.
            ConfigError: the chat template cannot be trained on as the run is configured.
        """
        if id(sampling) not in self._arguments:  # made once for each: a section of the configuration never changes
            self._arguments[id(sampling)] = sampling, sampling_arguments(sampling)
        turns = TurnSampling(
            sampling,
            run_seed=self._run_seed,
            key=spec.name,
            attempt=spec.attempt,
            trained=trained,
            vocab_size=self.tokenizer.vocab_size or self.tokenizer.num_tokens,
            own=self._arguments[id(sampling)][1],
        )
        conversation = _Conversation(self, turns, trained=trained)
        task = spec.task(environment, turns.own)
        done = await environment.run(task, conversation.answer, on_retry=conversation.restart)
        self._warn_of_distortion(environment, turns.distorted)
        issued = {"env": environment.name, "example": spec.example, "attempt": spec.attempt}
        return conversation.finish(done, issued | {"temperature": sampling.temperature})

    def _warn_of_distortion(self, environment: Environment, names: set[str]) -> None:
        """Warn once per environment and set of arguments; `sampling_notes` covers the run's own."""
        if names and (environment.name, *sorted(names)) not in self._warned:
            self._warned.add((environment.name, *sorted(names)))
            log.warning(
                "environment %s: its sampling arguments %s make the engine sample from another distribution than the "
                "trainer can compute, so importance ratios are off by it - leave them out of the environment, unless "
                "that is meant.",
                environment.name,
                ", ".join(sorted(names)),
            )


class _Conversation:
    """The model's side of one rollout: answers its turns and records their tokens."""

    def __init__(self, runner: RolloutRunner, sampling: TurnSampling, *, trained: bool) -> None:
        self._runner = runner
        self._sampling = sampling
        self._trained = trained
        self.restart()

    def restart(self) -> None:
        """Forget everything: the environment begins the rollout again."""
        strategy = self._runner.strategy
        is_lenient = strategy == "interleaved" and not self._trained
        self._trajectory = Trajectory(self._runner.tokenizer, "interleaved_or_new" if is_lenient else strategy)
        self._refused: str | None = None  # why the last turn was refused as too long, if it was
        self._cut: str | None = None  # what the last turn ran out of
        self._num_asked = 0

    async def answer(self, question: Ask) -> Reply:
        """Answer a request of the environment. Whatever is wrong with the request is an error of this rollout alone.

        Raises: ConfigError where the chat template cannot be trained on as the run is configured.
        """
        self._num_asked += 1
        number, runner = self._num_asked, self._runner
        try:
            arguments = self._sampling.of_turn(number, question.sampling)
            asked = self._trajectory.ask(question.messages, question.tools)
            routes_from = asked.routes_from if self._trained else None
            turn = await runner.pool.generate(asked.ids, arguments, routes_from=routes_from)
            keeps_stop = bool(arguments.get("include_stop_str_in_output"))
            message = await runner.reader.read(asked.ids, turn, question.tools, number=number, keeps_stop=keeps_stop)
        except OverlongPrompt as error:
            self._refused, self._cut = str(error), PROMPT_TOO_LONG
            return Reply(error=str(error), error_kind="overlong_prompt")
        except Rewritten as error:
            raise ConfigError(_rewritten_message(runner.model, str(error))) from error
        except jinja2.TemplateError as error:
            return Reply(error=f"The chat template refuses this conversation: {error}", error_kind="engine")
        except ValueError as error:
            return Reply(error=str(error), error_kind="engine")
        except (TriremeError, AssertionError):
            raise
        except Exception as error:  # of a template or an engine that was given what it does not expect
            words = f"This request cannot be answered: {type(error).__name__}: {error}"
            return Reply(error=words, error_kind="engine")
        self._refused, self._cut = None, turn.cut
        finish_reason: FinishReason = "length" if turn.finish_reason == "length" else "stop"
        self._trajectory.record(asked, turn, message)
        return Reply(
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=list(message.tool_calls) or None,
            finish_reason="tool_calls" if message.tool_calls else finish_reason,
            prompt_ids=asked.ids,
            completion_ids=turn.ids,
            logprobs=turn.logprobs,
        )

    def finish(self, done: Done, issued: dict[str, Any]) -> Rollout:
        """
        Raises: RolloutFailed where there is nothing to train on, or rewards are for tokens that do not exist.
        """
        samples = self._trajectory.samples()
        if self._trained and not samples:
            why = self._refused or "The environment never asked for a model turn."
            raise RolloutFailed("rollout", f"{why} Nothing was sampled, so there is nothing to train on.")
        try:
            token_rewards = self._trajectory.token_rewards(done.turn_rewards)
        except ValueError as error:
            raise RolloutFailed("score", str(error)) from error
        return Rollout.of(
            done,
            **issued,
            info={} if self._trained else done.info,
            samples=samples,
            token_rewards=token_rewards,
            num_turns=self._trajectory.num_turns,
            num_sampled=sum(int(sample.loss_mask.sum()) for sample in samples),
            num_tokens=max((sample.length for sample in samples), default=0),
            truncated=done.truncated or self._cut is not None,
            stop=self._cut or done.stop,
        )


def _rewritten_message(model: str, how: str) -> str:
    return (
        f"The chat template of {model} rewrites earlier turns when a conversation continues: {how}. With "
        '`orchestrator.trajectory_strategy = "interleaved"` all turns of a rollout are one sample, so a template was '
        "expected that only adds to what it rendered before; those of many thinking models (Qwen3, DeepSeek-R1) drop "
        'the thinking of earlier turns. Set `trajectory_strategy = "branching"` (one sample per turn), or give the '
        "model a template that keeps them. Single-turn environments work with either."
    )
