"""A live rollout whose turns our engines sample: the session that answers them and keeps their tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.faults import reach
from trireme.config.sampling import Sampling
from trireme.journal.model_turn import Turn
from trireme.journal.records import Rollout
from trireme.journal.targets import num_sampled
from trireme.journal.turns import RolloutLog, prompt_digest
from trireme.orchestrator.engines.pool import PromptTooLong, RequestRefused
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.chat import NoRoomForToken
from trireme.orchestrator.rollout.pictures import read_messages, read_transcript
from trireme.orchestrator.rollout.sampling import TurnSampling
from trireme.orchestrator.rollout.trajectory import Prompt, Strategy, Trajectory
from trireme.orchestrator.rollout.turn_reader import call_id
from trireme.orchestrator.session.session import RolloutFailed, Session
from trireme.orchestrator.session.wire import Ask, Done, ErrorKind, FinishReason, Reply

if TYPE_CHECKING:
    from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec

PROMPT_TOO_LONG = "prompt_too_long"


class SampledSession(Session):
    """A live rollout whose turns our engines sample: the session, and the trajectory of its tokens."""

    def __init__(
        self,
        runner: RolloutRunner,
        environment: Environment,
        spec: RolloutSpec,
        sampling: Sampling,
        *,
        trained: bool,
        log: RolloutLog | None = None,
    ) -> None:
        """
        Args:
            log: turns of an earlier, interrupted run of this attempt; new ones are added.
        """
        # a teacher may sample what the policy is trained on; what only importance ratios need is not asked of it
        self.teacher = runner.teachers.get(environment.name) if trained else None
        self.sampling = TurnSampling(
            sampling,
            run_seed=runner.run_seed,
            key=spec.name,
            attempt=spec.attempt,
            trained=trained and self.teacher is None,
            vocab_size=runner.tokenizer.vocab_size or runner.tokenizer.num_tokens,
            num_top=runner.num_top_logprobs,
        )
        self.trained = trained
        own = runner.of_source(environment.name)
        self.echo = own.echo.roles if own.echo and trained else {}
        task = spec.task(environment, self.sampling.own)
        if trained and own.teacher and own.teacher.demonstration:
            task.columns = [own.teacher.demonstration]
        super().__init__(task, log=log)
        self.runner, self.environment, self.spec = runner, environment, spec

        # variables of the chat template: the environment's table replaces the run's, and each turn's request both
        table = {"chat_template_kwargs": environment.config.chat_template_kwargs}
        self.template = runner.read_by_template(sampling.template_request, table)

        # turns still being sampled for a player that has died, keyed by their prompt's digest
        self._lost: dict[str, asyncio.Task[Turn]] = {}
        self._place: int | None = None  # its number in the window of the engines
        self._is_over = False
        self._asking = asyncio.Lock()
        self._begin_trajectory()

    async def reserve(self, slot: ExitStack) -> None:
        """Wait for a place in the window of the engines, unless a teacher samples."""
        if self.teacher is None:
            window = self.runner.pool.window
            self._place = place = window.join()
            slot.callback(window.leave, place)
            async with nullcontext() if window.may_go(place) else self.unless_failed():
                await window.wait_for_turn(place)

    def restart(self) -> None:
        """Forget everything: the environment begins the rollout again."""
        self._begin_trajectory()
        if self.log is not None:
            self.log.rewind()

    def _begin_trajectory(self) -> None:
        # programs change what they send back, so their conversations are never compared to the letter
        runner = self.runner
        strategy: Strategy = (
            "tolerant" if self.environment.uses_gateway else runner.config.orchestrator.trajectory_strategy
        )
        self.trajectory = Trajectory(
            runner.tokenizer,
            strategy,
            runner.pictures,
            runner.max_model_len,
            teacher_weight=self.teacher.config.weight if self.teacher else 0.0,
            echo=self.echo,
        )

        self._refused: str | None = None  # why the last turn was refused as too long, if it was
        self._invalid: str | None = None  # why the first turn can never be sampled, if it cannot
        self._cut: str | None = None  # limit that cut the last turn off (tokens or context), if one did
        self._num_asked = 0
        self._recorded: dict[str, int] = {}  # turns of the trajectory, by the calls that asked for them

    async def answer(self, request: Ask) -> Reply:
        """Answer a request of the environment. A request that cannot be answered is an error of this rollout alone.

        Raises: ConfigError if the chat template rewrites all earlier turns.
        """
        runner = self.runner
        # a program's session numbers its requests, and continues to if it is resumed; all others are counted here
        number = self._num_asked + 1 if self.environment.config.agent is None else int(request.call)
        try:
            # counting a prompt asks no engine and leaves the trajectory as it is
            if request.only_counts:
                given = self.template | runner.read_by_template(request.sampling)
                messages = await read_messages(request.messages, runner.pictures)
                return Reply(prompt_ids=self.trajectory.prompt_ids(messages, request.tools, request.trace, given))

            self._num_asked += 1
            runner.note_arguments(self.environment.name, request.sampling, self.sampling.own)
            arguments = self.sampling.of_turn(number, request.sampling)

            # shielded while pictures are read, as a request must take its number even if it is cancelled
            asking = self._count_and_ask(self.trajectory, request)
            asked = await (asking if runner.pictures is None else asyncio.shield(asking))
            if self.trained and self.trajectory.strategy == "interleaved":
                runner.note_continuation(asked, self.environment.name, self.spec.example, self.template)

            # with a log, a turn that an earlier player asked for is read from disk instead of being sampled again
            tools = request.tools if request.calls_tools else None
            sample = partial(self._sample, asked, arguments, tools, number)
            turn = await (sample() if self.log is None else self._sample_once(self.log, asked, sample))
        except Exception as error:
            return self._refuse(request, error)

        # only an answered turn becomes part of the trajectory
        self._refused, self._cut = None, turn.cut
        finish_reason: FinishReason = "length" if turn.finish_reason == "length" else "stop"
        self.trajectory.record(asked, turn)
        self._recorded[request.call] = asked.number
        calls = turn.calls
        return Reply(
            content=turn.message["content"],
            reasoning=turn.message.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else finish_reason,
            prompt_ids=asked.ids,
            completion_ids=turn.ids,
            logprobs=turn.logprobs,
        )

    def _refuse(self, request: Ask, error: Exception) -> Reply:
        """Return why a request gets no turn. Raises: the error itself, if it is not the fault of this request."""
        kind: ErrorKind = "engine"
        words, is_invalid = str(error), False
        match error:
            case ConfigError():  # the run cannot go on; it is a ValueError too
                raise error
            case PromptTooLong() if request.only_counts:
                kind = "overlong_prompt"
            case PromptTooLong():
                self._refused, self._cut = words, PROMPT_TOO_LONG
                kind, is_invalid = "overlong_prompt", True
            case jinja2.TemplateError():
                words = f"The chat template refuses this conversation: {type(error).__name__}: {error}"
            case NoRoomForToken() | RequestRefused(status=400):
                is_invalid = True
            case ValueError():
                pass
            case TriremeError() | AssertionError():
                raise error
            case _:  # a template, or an engine, failed on a request that it does not expect
                words = f"This request cannot be answered: {type(error).__name__}: {error}"

        # the first prompt can never be answered: another attempt would have the same one
        if is_invalid and self._num_asked == 1:
            self._invalid = words
        return Reply(error=words, error_kind=kind)

    def explain(self, failure: RolloutFailed) -> None:
        """Mark the failure as final if the first prompt was the reason, as a retry would have the same one."""
        if self._invalid is not None and not self._recorded:
            failure.is_final, failure.is_overlong = True, self._refused == self._invalid
            if self._invalid not in failure.error:
                failure.error = f"{self._invalid} ({failure.error})"

    async def _count_and_ask(self, trajectory: Trajectory, request: Ask) -> Prompt:
        """Build the prompt of a turn. It is counted, in the order of requests, even if it is given up meanwhile: only
        pictures take their time."""
        async with self._asking:
            try:
                given = self.template | self.runner.read_by_template(request.sampling)
                messages = await read_messages(request.messages, self.runner.pictures)
            except ValueError:
                trajectory.refuse()
                raise
            return trajectory.ask(messages, request.tools, request.trace, given)

    async def _sample_once(self, kept: RolloutLog, prompt: Prompt, sample: Callable[..., Any]) -> Turn:
        """Return a turn that is on disk, or sample it, shielded: to its end, although its player dies."""
        digest = prompt_digest(prompt.ids, prompt.pictures)

        # a player that died was waiting for this very turn: let it be written, then read it from disk
        if digest in self._lost:
            await asyncio.wait({self._lost.pop(digest)})
        if (turn := kept.replay(digest)) is not None:
            return turn

        sampling: asyncio.Task[Turn] = asyncio.create_task(sample(digest, kept.life))
        try:
            return await asyncio.shield(sampling)
        except asyncio.CancelledError:
            if self._is_over:
                sampling.cancel()
            else:  # the worker or program that plays the rollout has died; its successor asks for this turn again
                self._lost[digest] = sampling
            raise

    async def _sample(
        self,
        prompt: Prompt,
        arguments: dict[str, Any],
        tools: list[dict] | None,
        number: int,
        digest: str = "",
        life: int = 0,
    ) -> Turn:
        """Sample a turn. If there is a log, it is on disk before it is answered.

        Args:
            digest: of the prompt, for the log.
            life: of the log, when the turn was asked for.
        """
        if self.teacher is not None:
            turn = await self.teacher.generate(prompt.ids, arguments)
        else:
            turn = await self._ask_policy(prompt, arguments)

        keeps_stop = bool(arguments.get("include_stop_str_in_output"))
        # a program that is played again may ask in another order, and get turns with the ids of other numbers from disk
        while self.log is not None and call_id(number, 0) in self.log.call_ids:
            number += 1
        read, more = self.runner.reader.read, {"template_kwargs": prompt.template_kwargs}
        turn.message = await read(prompt.ids, turn, tools, number=number, keeps_stop=keeps_stop, **more)
        if self.log is None:
            return turn

        # in a thread, as the disk may be slow or full; the answer waits until the turn is safe
        turn.prompt = digest
        reach("turn.sampled")
        if prompt.number > 0:
            reach("turn.continued")
        write = partial(self.runner.wait_for_room, "a model turn", self.log.path.parent, partial(self.log.write, turn))
        await asyncio.get_running_loop().run_in_executor(self.runner.writers, write)
        self.log.add(turn, life)
        reach("turn.written")
        return turn

    async def _ask_policy(self, prompt: Prompt, arguments: dict[str, Any]) -> Turn:
        # expert routes are replayed in training only, and the engine reports those that are not known yet
        routes_from = prompt.routes_from if self.trained else None
        shown: dict[str, Any] = {} if prompt.since is None else {"since": prompt.since}
        if prompt.pictures and (pictures := self.runner.pictures):
            shown |= {"pictures": prompt.pictures, "content_parts": await pictures.content_parts(prompt.pictures)}

        # The newest rollouts wait here if the window of the engines has shrunk. That is none of their own time.
        pool, place = self.runner.pool, self._place
        if place is not None and not pool.window.may_go(place):
            with self.clock_stopped():
                await pool.window.wait_for_turn(place)
        turn = await pool.generate(prompt.ids, arguments, routes_from=routes_from, **shown)
        if place is not None:
            known = prompt.turn.end if prompt.turn else 0
            pool.window.learn(place, len(prompt.ids), known, turn)
        return turn

    def close(self) -> None:
        """Free what it holds, and give up turns that are still sampled for a player that has died."""
        self._is_over = True
        for task in self._lost.values():
            task.cancel()
        if self.log is not None:
            self.log.close()
        self.trajectory.release()

    async def finish(self, done: Done) -> Rollout:
        """Build the rollout from the recorded turns and the environment's result.

        Raises: RolloutFailed if there is nothing to train on, or rewards are for tokens that do not exist.
        """
        try:
            # the journal names pictures by their digests, so the transcript must not hold their data
            done.prompt = await read_transcript(done.prompt, self.runner.pictures)
            done.completion = await read_transcript(done.completion, self.runner.pictures)
        except ValueError as error:
            raise RolloutFailed("rollout", f"the conversation that the environment reports has {error}") from error

        # if the last turn never reached the program, what cut that turn off did not end the rollout
        given_up = [call for call in self._recorded if call in done.given_up]
        if given_up and given_up[-1] == next(reversed(self._recorded)) and self._refused is None:
            self._cut = None

        # the newest first, as a turn can be removed only from the end of its sample
        for call in reversed(given_up):
            self.trajectory.take_back(self._recorded[call])

        agent = self.environment.config.agent
        if agent is not None:
            self.trajectory.keep(agent.train, only_with_tools=agent.only_with_tools)
        runs = self.trajectory.keep_runs(done.runs) if done.runs else []

        # an evaluation has a reward even without a model turn; training has nothing to learn from
        samples = self.trajectory.samples()
        if self.trained and not samples:
            asked = "gave up each model turn that it asked for" if self._num_asked else "never asked for a model turn"
            why = self._refused or f"The environment {asked}."
            raise RolloutFailed("rollout", f"{why} Nothing was sampled, so there is nothing to train on.")
        try:
            token_rewards = self.trajectory.token_rewards(done.turn_rewards)
        except ValueError as error:
            raise RolloutFailed("score", str(error)) from error

        # programs branch: record each conversation, and why turns on disk are in no sample
        played: dict[str, Any] = {}
        if self.environment.uses_gateway:
            branches = self.trajectory.branches(has_transcript=agent is not None)
            played = {"branches": branches, "left_out": self._left_out()}
        return Rollout.of(
            done,
            env=self.environment.name,
            example=self.spec.example,
            attempt=self.spec.attempt,
            temperature=self.sampling.sampling.temperature,
            **played,
            info=done.info if agent or not self.trained else {},
            model=self.teacher.model if self.teacher else "",
            runs=runs,
            samples=samples,
            token_rewards=token_rewards,
            num_turns=self.trajectory.num_turns,
            rewritten=self.trajectory.num_rewritten,
            num_sampled=num_sampled(samples),
            num_tokens=max((sample.length for sample in samples), default=0),
            num_computed=self.trajectory.num_computed,
            truncated=done.truncated or self._cut is not None,
            stop=self._cut or done.stop,
        )

    def _left_out(self) -> dict[str, list[str]]:
        """Return the turns that are on disk and in no sample, and why."""
        if self.log is None:
            return {}
        prompts = self.trajectory.prompts()
        # counted, as the same prompt may have been answered more than once
        unused = Counter(self.log.prompts) - Counter(prompts[True])
        unread = unused & Counter(self.trajectory.taken_back)
        unchosen = (unused - unread) & Counter(prompts[False])
        why = {"not received by the program": unread, "not chosen by agent.train": unchosen}
        why["not used when played again"] = unused - unread - unchosen
        return {reason: sorted(found.elements()) for reason, found in why.items() if found}
