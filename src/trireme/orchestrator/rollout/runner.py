"""One rollout from its task to its tokens and reward: joins an environment, the engines and a trajectory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import jinja2
import msgspec

from trireme.base.disk import when_there_is_room
from trireme.base.errors import ConfigError, TriremeError
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Sampling, sampling_notes
from trireme.config.run import RunConfig
from trireme.journal.pictures import PictureFiles, pictures_folder, rules_of_model
from trireme.journal.records import Rollout
from trireme.journal.requests import RequestLog
from trireme.journal.targets import num_sampled
from trireme.journal.turns import Generation, TurnLog, TurnRecord, newest_attempts, prompt_digest, turns_file
from trireme.orchestrator.engines.pool import InferencePool, PromptTooLong, RequestRefused
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Ask, Done, FinishReason, Reply, RunTask, Split
from trireme.orchestrator.gateway.dialects.turn import ToolCall
from trireme.orchestrator.rollout.chat import ChatTokenizer, NoRoomForToken
from trireme.orchestrator.rollout.continuation import rewrites_always
from trireme.orchestrator.rollout.pictures import ConversationPictures, read_messages, read_transcript
from trireme.orchestrator.rollout.sampling import (
    ArgumentNotes,
    TurnSampling,
    ignored_arguments,
    merge_template_kwargs,
    replaced_arguments,
)
from trireme.orchestrator.rollout.trajectory import Question, Strategy, Trajectory
from trireme.orchestrator.rollout.turns import ModelMessage, TurnReader, call_id

log = get_logger("rollouts")

T = TypeVar("T")

PROMPT_TOO_LONG = "prompt_too_long"

MOST_REWRITTEN = 4
"""Examples: a template that rewrote conversations of so many, and continued none, is taken to rewrite always."""

WRITERS = 32  # threads that write turns to disk: the kernel commits what waits at the same time together

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
    name: str  # the same name and attempt have the same seed, if the run has one
    group: str = ""  # rollouts that are scored together, if the environment's rewards compare them
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
            sampling=sampling or {},
            max_turns=environment.config.max_turns,
            group=self.group or self.name,
            group_size=self.group_size,
        )


@dataclass(eq=False)
class RolloutRunner:
    """Runs rollouts; knows nothing of groups and batches."""

    config: RunConfig
    pool: InferencePool
    tokenizer: ChatTokenizer
    waits: Waits  # for a full disk
    journal: Path | None = None  # folder of the turns of agent programs, to be played again; none are kept without
    pictures_folder: Path | None = None  # pictures of conversations; by default in the journal, or a temporary folder

    def __post_init__(self) -> None:
        config = self.config
        # attempts of an earlier orchestrator, whose turns are on disk
        self._newest_attempts = {} if self.journal is None else newest_attempts(self.journal)
        self.writers = ThreadPoolExecutor(WRITERS, "turns")  # makes a thread when it needs one
        self.max_model_len = config.inference.model.max_model_len or config.seq_len

        self.reader = TurnReader(config.inference.model, self.tokenizer, self.pool)
        self.model = config.trainer.tokenizer.name or config.model.name
        self.pictures = self._open_pictures() if config.trainer.model.vlm is not None else None

        # warnings come once per run, as most rollouts of an environment would repeat them
        self._warned: set[tuple[str, ...]] = set()
        self._notes = ArgumentNotes()
        self._has_continued = False  # the template has continued a conversation that is trained on
        self._rewritten: set[tuple[str, int]] = set()  # environments and examples with a conversation that it rewrote

        # only a synchronous run samples each rollout with the same weights every time, so only there a seed repeats it
        self._run_seed = config.seed if config.synchronous else None
        for note in sampling_notes(config.orchestrator.sampling):
            log.warning("%s", note)

    def _open_pictures(self) -> ConversationPictures:
        """Raises: ConfigError if the model is of no kind that sees."""
        rules, folder = rules_of_model(self.config.model.name), self.pictures_folder
        if folder is None and self.journal is not None:
            folder = pictures_folder(self.journal)
        if folder is None:
            self._temporary = TemporaryDirectory(prefix="trireme-pictures-")  # removed with this object
            folder = Path(self._temporary.name)
        return ConversationPictures(rules, PictureFiles(folder), write=partial(self.wait_for_room, "a picture", folder))

    def wait_for_room(self, what: str, folder: Path, write: Callable[[], T]) -> T:
        """Write something, and wait while the disk is full. Raises: DeadlineExceeded."""
        deadline_s = self.config.disk_timeout_s
        return when_there_is_room(write, what=what, folder=folder, waits=self.waits, deadline_s=deadline_s)

    def first_attempt(self, environment: Environment, name: str, num_attempts: int) -> int:
        """Return the attempt of a rollout to begin with: the newest one of an earlier orchestrator that is known.

        Its turns are on disk, or its program has outlived that orchestrator. The attempts before it had failed.
        """
        newest = min(self._newest_attempts.get(name, 0), num_attempts - 1)
        if not environment.uses_gateway:  # it has no programs
            return newest
        # an attempt whose program still runs is continued, even if none of its turns reached the disk
        found = [attempt for attempt in range(num_attempts) if environment.has_program(f"{name}.{attempt}")]
        return max(newest, *found, 0)

    async def run(
        self, environment: Environment, spec: RolloutSpec, *, sampling: Sampling, trained: bool = True
    ) -> Rollout:
        """Run and score one rollout.

        Args:
            trained: whether it is trained on. If not, templates may always rewrite earlier turns, and engines need not
                report what only training needs.

        Raises:
            RolloutFailed: see `Environment.run`; or nothing was sampled.
            ConfigError: the chat template rewrites all earlier turns, so that no rollout could be one sample.
        """
        turns = TurnSampling(
            sampling,
            run_seed=self._run_seed,
            key=spec.name,
            attempt=spec.attempt,
            trained=trained,
            vocab_size=self.tokenizer.vocab_size or self.tokenizer.num_tokens,
        )

        # a program may outlive this process: its turns and requests are on disk before it gets an answer
        kept, requests = None, None
        if self.journal is not None and trained and environment.uses_gateway:
            file = turns_file(self.journal, spec.name, spec.attempt)
            kept, requests = await asyncio.to_thread(TurnLog, file), RequestLog(file.with_suffix(".requests"))

        # variables of the chat template: the environment's table replaces the run's, and each turn's request both
        table = {"chat_template_kwargs": environment.config.chat_template_kwargs}
        template = self.read_by_template(sampling.template_request, table)
        conversation = _Conversation(self, turns, environment, spec.example, trained, kept, template)

        task = spec.task(environment, turns.own)
        try:
            answer, restart = conversation.answer, conversation.restart
            done = await environment.run(task, answer, on_retry=restart, requests=requests)
        except RolloutFailed as failure:
            raise conversation.explain(failure) from failure.__cause__
        finally:
            conversation.close()
        try:
            # the journal names pictures by their digests, so the transcript must not hold their data
            prompt, completion = [await read_transcript(each, self.pictures) for each in (done.prompt, done.completion)]
        except ValueError as error:
            raise RolloutFailed("rollout", f"the conversation that the environment reports has {error}") from error

        done = msgspec.structs.replace(done, prompt=prompt, completion=completion)
        distorting = (environment.name, *sorted(turns.distorted))
        # once per set of arguments, as an environment sends them with each turn; `sampling_notes` covers the run's own
        if turns.distorted and distorting not in self._warned:
            self._warned.add(distorting)
            log.warning(
                "environment %s: its sampling arguments %s make the engine sample from another distribution than the "
                "trainer can compute, so importance ratios are off by it - leave them out of the environment, unless "
                "that is meant.",
                environment.name,
                ", ".join(distorting[1:]),
            )

        issued = {"env": environment.name, "example": spec.example, "attempt": spec.attempt}
        try:
            return conversation.finish(done, issued | {"temperature": sampling.temperature})
        except RolloutFailed as failure:
            raise conversation.explain(failure) from failure.__cause__
        finally:
            conversation.trajectory.release()

    def read_by_template(self, *requests: dict[str, Any]) -> dict[str, Any]:
        """Return the variables that requests give the chat template and that it reads. Raises ValueError."""
        known = self.tokenizer.template_variables
        return {name: value for name, value in merge_template_kwargs(*requests).items() if name in known}

    def note_arguments(self, environment: str, theirs: dict[str, Any], own: dict[str, Any]) -> None:
        """Log once what an environment or its programs ask for and do not get, as the run or the engine has it so."""
        # the usual case: an environment sends back the arguments that it was given
        if theirs == own:
            return
        theirs = self._notes.unnamed(environment, theirs)
        found = ignored_arguments(theirs, self.tokenizer.template_variables) | replaced_arguments(theirs, own)
        self._notes.log(environment, found)

    def note_continuation(
        self, asked: Question, environment: str, example: int, template_kwargs: dict[str, Any]
    ) -> None:
        """Count whether the chat template continued a conversation that is trained on, or rewrote it.

        Args:
            template_kwargs: those of the run and the environment's table.

        Raises: ConfigError if it rewrites always.
        """
        self._has_continued |= asked.turn is not None
        if not asked.rewritten:
            return

        # after a few examples without any continuation, or if even plain text is rewritten, each turn would be a sample
        # of its own: end the run before it trains on that
        self._rewritten.add((environment, example))
        is_refused = not self._has_continued and (
            len(self._rewritten) >= MOST_REWRITTEN or rewrites_always(self.tokenizer, template_kwargs)
        )
        if is_refused:
            with_kwargs = f", given {template_kwargs}," if template_kwargs else ""
            raise ConfigError(
                f"The chat template of {self.model}{with_kwargs} rewrites earlier turns when a conversation continues: "
                f'{asked.rewritten}. With `orchestrator.trajectory_strategy = "interleaved"` all turns of a rollout '
                "are one sample, so a template was expected that only adds to what it rendered before; those of many "
                "thinking models (Qwen3, DeepSeek-R1) drop the thinking of earlier turns. Set `trajectory_strategy = "
                '"branching"` (one sample per turn), or give the model a template that keeps them. Single-turn '
                "environments work with either."
            )

        # a template that rewrites now and then is no error, and costs some rollouts their single sample
        if ("rewritten", environment) not in self._warned:
            self._warned.add(("rewritten", environment))
            log.warning(
                "environment %s: the chat template rewrites an earlier turn of a conversation (%s), so the rollout is "
                "several samples, each with its advantage. This is logged once; `rollouts/rewritten` counts such "
                "rollouts.",
                environment,
                asked.rewritten,
            )


@dataclass(eq=False)
class _Conversation:
    """The model's side of one rollout: answers its turns and records their tokens."""

    runner: RolloutRunner
    sampling: TurnSampling
    environment: Environment
    example: int
    trained: bool
    log: TurnLog | None  # turns of an earlier, interrupted run of this attempt; new ones are added
    template: dict[str, Any]  # variables of the chat template: the run's, and those of the environment's table
    # turns still being sampled for a player that has died, keyed by their prompt's digest
    _lost: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _is_over: bool = False
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._agent, self._has_programs = self.environment.config.agent, self.environment.uses_gateway
        self.restart()

    def restart(self) -> None:
        """Forget everything: the environment begins the rollout again."""
        runner = self.runner
        strategy: Strategy = runner.config.orchestrator.trajectory_strategy
        # programs change what they send back, so their conversations are never compared to the letter
        if self._has_programs:
            strategy = "tolerant"
        self.trajectory = Trajectory(runner.tokenizer, strategy, runner.pictures, runner.max_model_len)

        self._refused: str | None = None  # why the last turn was refused as too long, if it was
        self._invalid: str | None = None  # why the first turn can never be sampled, if it cannot
        self._cut: str | None = None  # limit that cut the last turn off (tokens or context), if one did
        self._num_asked = 0
        self._recorded: dict[str, int] = {}  # turns of the trajectory, by the calls that asked for them
        if self.log is not None:
            self.log.rewind()

    async def answer(self, question: Ask) -> Reply:
        """Answer a request of the environment. A request that cannot be answered is an error of this rollout alone.

        Raises: ConfigError if the chat template rewrites all earlier turns.
        """
        runner = self.runner
        # a program's session numbers its requests, and continues to if it is resumed; all others are counted here
        number = self._num_asked + 1 if self._agent is None else int(question.call)
        try:
            # counting a prompt asks no engine and leaves the trajectory as it is
            if question.only_counts:
                given = self._template_kwargs(question)
                messages = await read_messages(question.messages, runner.pictures)
                ids = self.trajectory.prompt_ids(messages, question.tools, question.trace, given)
                return Reply(prompt_ids=ids)

            self._num_asked += 1
            runner.note_arguments(self.environment.name, question.sampling, self.sampling.own)
            arguments = self.sampling.of_turn(number, question.sampling)

            # shielded while pictures are read, as a request must take its number even if it is cancelled
            asking = self._count_and_ask(self.trajectory, question)
            asked = await (asking if runner.pictures is None else asyncio.shield(asking))
            if self.trained and self.trajectory.strategy == "interleaved":
                runner.note_continuation(asked, self.environment.name, self.example, self.template)

            # with a log, a turn that an earlier player asked for is read from disk instead of being sampled again
            tools = question.tools if question.calls_tools else None
            sample = partial(self._sample, asked, arguments, tools, number)
            turn, message = await (sample() if self.log is None else self._sample_once(self.log, asked, sample))
        except ConfigError:  # the run cannot go on; caught first, as it is a ValueError too
            raise
        except PromptTooLong as error:
            if not question.only_counts:
                self._refused, self._cut = str(error), PROMPT_TOO_LONG
                self._note_invalid(error)
            return Reply(error=str(error), error_kind="overlong_prompt")
        except jinja2.TemplateError as error:
            words = f"The chat template refuses this conversation: {type(error).__name__}: {error}"
            return Reply(error=words, error_kind="engine")
        except ValueError as error:
            if isinstance(error, NoRoomForToken) or (isinstance(error, RequestRefused) and error.status == 400):
                self._note_invalid(error)
            return Reply(error=str(error), error_kind="engine")
        except (TriremeError, AssertionError):
            raise
        except Exception as error:
            # a template, or an engine, failed on a request that it does not expect
            words = f"This request cannot be answered: {type(error).__name__}: {error}"
            return Reply(error=words, error_kind="engine")

        # only an answered turn becomes part of the trajectory
        self._refused, self._cut = None, turn.cut
        finish_reason: FinishReason = "length" if turn.finish_reason == "length" else "stop"
        self.trajectory.record(asked, turn, message)
        self._recorded[question.call] = asked.number
        return Reply(
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=list(message.tool_calls) or None,
            finish_reason="tool_calls" if message.tool_calls else finish_reason,
            prompt_ids=asked.ids,
            completion_ids=turn.ids,
            logprobs=turn.logprobs,
        )

    def _note_invalid(self, error: Exception) -> None:
        """Note that the first prompt, which another attempt would have too, cannot be answered."""
        if self._num_asked == 1:
            self._invalid = str(error)

    def explain(self, failure: RolloutFailed) -> RolloutFailed:
        """Mark the failure as final if the first prompt was the reason, as a retry would have the same one."""
        if self._invalid is not None and not self._recorded:
            failure.is_final, failure.is_overlong = True, self._refused == self._invalid
            if self._invalid not in failure.error:
                failure.error = f"{self._invalid} ({failure.error})"
        return failure

    async def _count_and_ask(self, trajectory: Trajectory, question: Ask) -> Question:
        """Build the prompt of a turn. It is counted, in the order of requests, even if it is given up meanwhile: only
        pictures take their time."""
        async with self._asking:
            try:
                given = self._template_kwargs(question)
                messages = await read_messages(question.messages, self.runner.pictures)
            except ValueError:
                trajectory.refuse()
                raise
            return trajectory.ask(messages, question.tools, question.trace, given)

    def _template_kwargs(self, question: Ask) -> dict[str, Any]:
        """Return the variables of the chat template of a turn.

        Raises: ValueError if the turn's request gives it what it cannot take.
        """
        return self.template | self.runner.read_by_template(question.sampling)

    async def _sample(
        self, asked: Question, arguments: dict[str, Any], tools: list[dict] | None, number: int
    ) -> tuple[Generation, ModelMessage]:
        # expert routes are replayed in training only, and the engine reports those that are not known yet
        routes_from = asked.routes_from if self.trained else None
        shown: dict[str, Any] = {}
        if asked.pictures and (pictures := self.runner.pictures):
            shown = {"pictures": asked.pictures, "content_parts": await pictures.content_parts(asked.pictures)}
        turn = await self.runner.pool.generate(asked.ids, arguments, routes_from=routes_from, **shown)

        keeps_stop = bool(arguments.get("include_stop_str_in_output"))
        # a program that is played again may ask in another order, and get turns with the ids of other numbers from disk
        while self.log is not None and call_id(number, 0) in self.log.call_ids:
            number += 1
        read, more = self.runner.reader.read, {"template_kwargs": asked.template_kwargs}
        return turn, await read(asked.ids, turn, tools, number=number, keeps_stop=keeps_stop, **more)

    async def _sample_once(
        self, kept: TurnLog, asked: Question, sample: Callable[[], Awaitable[tuple[Generation, ModelMessage]]]
    ) -> tuple[Generation, ModelMessage]:
        """Sample a turn, and write it to disk before it is answered; one that is there already is not sampled again."""
        prompt = prompt_digest(asked.ids, asked.pictures)

        async def sample_and_keep(life: int) -> tuple[Generation, ModelMessage]:
            turn, message = await sample()
            record = _to_record(prompt, turn, message)
            reach("turn.sampled")
            if asked.number > 0:
                reach("turn.continued")
            # in a thread, as the disk may be slow or full; the answer waits until the turn is safe
            write = partial(self.runner.wait_for_room, "a model turn", kept.path.parent, partial(kept.write, record))
            await asyncio.get_running_loop().run_in_executor(self.runner.writers, write)
            kept.add(record, life)
            reach("turn.written")
            return turn, message

        # a player that died was waiting for this very turn: let it be written, then read it from disk
        if prompt in self._lost:
            await asyncio.wait({self._lost.pop(prompt)})
        if (record := kept.replay(prompt)) is not None:
            return _read_record(record)

        # shielded: a turn is sampled to its end and written although its player dies, so that none is sampled twice
        sampling = asyncio.create_task(sample_and_keep(kept.life))
        try:
            return await asyncio.shield(sampling)
        except asyncio.CancelledError:
            if self._is_over:
                sampling.cancel()
            else:  # the worker or program that plays the rollout has died; its successor asks for this turn again
                self._lost[prompt] = sampling
            raise

    def close(self) -> None:
        self._is_over = True
        for task in self._lost.values():
            task.cancel()
        if self.log is not None:
            self.log.close()

    def finish(self, done: Done, issued: dict[str, Any]) -> Rollout:
        """Build the rollout from the recorded turns and the environment's result.

        Raises: RolloutFailed if there is nothing to train on, or rewards are for tokens that do not exist.
        """
        # if the last turn never reached the program, what cut that turn off did not end the rollout
        given_up = [call for call in self._recorded if call in done.given_up]
        if given_up and given_up[-1] == next(reversed(self._recorded)) and self._refused is None:
            self._cut = None

        # the newest first, as a turn can be removed only from the end of its sample
        for call in reversed(given_up):
            self.trajectory.take_back(self._recorded[call])

        if self._agent is not None:
            self.trajectory.keep(self._agent.train, only_with_tools=self._agent.only_with_tools)
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
        if self._has_programs:
            branches = self.trajectory.branches(has_transcript=self._agent is not None)
            played = {"branches": branches, "left_out": self._left_out()}
        return Rollout.of(
            done,
            **issued,
            **played,
            info=done.info if self._agent or not self.trained else {},
            runs=runs,
            samples=samples,
            token_rewards=token_rewards,
            num_turns=self.trajectory.num_turns,
            rewritten=self.trajectory.num_rewritten,
            num_sampled=num_sampled(samples),
            num_tokens=max((sample.length for sample in samples), default=0),
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


def _to_record(prompt: str, turn: Generation, message: ModelMessage) -> TurnRecord:
    # bytes on disk have no shape, so that of the routes is stored next to them
    shape = () if turn.routes is None else turn.routes.shape
    return TurnRecord(**msgspec.structs.asdict(turn), prompt=prompt, message=message.to_message(), routes_shape=shape)


def _read_record(record: TurnRecord) -> tuple[Generation, ModelMessage]:
    """Return a turn as it was before it was written."""
    given = record.message
    calls = [ToolCall(id=call["id"], **call["function"]) for call in given.get("tool_calls", ())]
    message = ModelMessage(given["content"], given.get("reasoning_content"), tuple(calls))
    routes = None if record.routes is None else record.routes.reshape(record.routes_shape)
    return msgspec.structs.replace(record, routes=routes), message
