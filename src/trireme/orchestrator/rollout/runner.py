"""One rollout from its task to its tokens and reward: joins an environment, the engines and a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from trireme.base.disk import when_there_is_room
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.rules.sampling import sampling_notes
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling
from trireme.journal.pictures import PictureFiles, pictures_folder, rules_of_model
from trireme.journal.records import Rollout
from trireme.journal.turns import RolloutLog, newest_attempts, turns_file
from trireme.orchestrator.engines.pool import InferencePool
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.continuation import rewrites_always
from trireme.orchestrator.rollout.pictures import ConversationPictures
from trireme.orchestrator.rollout.sampled_session import SampledSession
from trireme.orchestrator.rollout.sampling import (
    ArgumentNotes,
    ignored_arguments,
    merge_template_kwargs,
    replaced_arguments,
)
from trireme.orchestrator.rollout.trajectory import Prompt
from trireme.orchestrator.rollout.turn_reader import TurnReader
from trireme.orchestrator.session.session import RolloutFailed
from trireme.orchestrator.session.wire import RunTask, Split

log = get_logger("rollouts")

if TYPE_CHECKING:
    from trireme.orchestrator.teacher import Teacher

T = TypeVar("T")

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
    teachers: Mapping[str, Teacher] = field(default_factory=dict)  # those that sample, by their environment
    pictures_folder: Path | None = None  # pictures of conversations; by default in the journal, or a temporary folder

    def __post_init__(self) -> None:
        config = self.config
        # attempts of an earlier orchestrator, whose turns are on disk
        self._newest_attempts = {} if self.journal is None else newest_attempts(self.journal)
        self.writers = ThreadPoolExecutor(WRITERS, "turns")  # makes a thread when it needs one
        self.max_model_len = config.inference.model.max_model_len or config.seq_len
        self.of_source = lru_cache(config.orchestrator.of)  # the settings of a source, by its name
        self.num_top_logprobs = config.num_top_logprobs  # likeliest tokens per position, for the loss

        self.reader = TurnReader(config.inference.model, self.tokenizer, self.pool)
        self.model = config.trainer.tokenizer.name or config.model.name
        self.pictures = self._open_pictures() if config.trainer.model.vlm is not None else None

        # warnings come once per run, as most rollouts of an environment would repeat them
        self._warned: set[tuple[str, ...]] = set()
        self._notes = ArgumentNotes()
        self._has_continued = False  # the template has continued a conversation that is trained on
        self._rewritten: set[tuple[str, int]] = set()  # environments and examples with a conversation that it rewrote

        # only a synchronous run samples each rollout with the same weights every time, so only there a seed repeats it
        self.run_seed = config.seed if config.synchronous else None
        for note in sampling_notes(config.orchestrator):
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
        # a program may outlive this process: its turns and requests are on disk before it gets an answer
        kept = None
        if self.journal is not None and trained and environment.uses_gateway:
            kept = await asyncio.to_thread(RolloutLog, turns_file(self.journal, spec.name, spec.attempt))

        session = SampledSession(self, environment, spec, sampling, trained=trained, log=kept)
        try:
            done = await environment.run(session)
            self.note_distortion(environment.name, session.sampling.distorted)
            return await session.finish(done)
        except RolloutFailed as failure:
            session.explain(failure)
            raise
        finally:
            session.close()

    def note_distortion(self, environment: str, arguments: set[str]) -> None:
        """Warn once per set of arguments, as an environment sends them with each turn. `sampling_notes` covers the
        run's own."""
        distorting = (environment, *sorted(arguments))
        if not arguments or distorting in self._warned:
            return
        self._warned.add(distorting)
        log.warning(
            "environment %s: its sampling arguments %s make the engine sample from another distribution than the "
            "trainer can compute, so importance ratios are off by it - leave them out of the environment, unless "
            "that is meant.",
            environment,
            ", ".join(distorting[1:]),
        )

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

    def note_continuation(self, asked: Prompt, environment: str, example: int, template_kwargs: dict[str, Any]) -> None:
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
