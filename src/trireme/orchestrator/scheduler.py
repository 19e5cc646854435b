"""Issue groups as far ahead as the policy allows, and hand out the finished ones.

A group is under way until all its rollouts have ended. A rollout that fails is retried a few times; then its group is
dropped with the reason. A group whose first token would be too old for the batch that it could enter is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from trireme.algo.staleness import is_too_old, next_reserve, rollouts_allowed
from trireme.base.errors import AllRolloutsFail, TriremeError
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.journal.records import Dropped, OpenGroup, Rollout
from trireme.journal.targets import num_tokens
from trireme.orchestrator.buffer import Buffer
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import gather_or_cancel
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
from trireme.orchestrator.session.session import RolloutFailed, cancel_all
from trireme.orchestrator.weights.policy import Policy

log = get_logger("scheduler")

HOPELESS_FAILURES = 64  # the run ends after this many failed rollouts without a single success

FAILED_BEFORE = "rollout: it failed before the orchestrator was started again; logs/orchestrator.stdout says why"
"""Reason of an attempt that an orchestrator before this one retried: failures are on disk only with their batch."""

REFILLS_TO_WARN = 4  # warn whenever this many times the groups of a batch have been dropped while it is filled


@dataclass
class Group:
    """The rollouts of one example, under way or finished."""

    task: OpenGroup
    issued_at: int  # version that answered requests at that time: no token can be older
    rollouts: list[Rollout] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    reason: str | None = None  # why the whole group is dropped
    runner: asyncio.Task | None = None
    exhausted: set[int] = field(default_factory=set)  # places whose last attempt has failed

    def drop(self, reason: str, size: int) -> None:
        """Drop the group: record each of its `size` rollouts, finished or under way, as dropped.

        Idempotent: each rollout is recorded as dropped at most once.
        """
        if self.reason is not None:
            return
        self.reason = reason

        # Failed attempts are recorded already. What is dropped is the attempt that follows them in each place.
        attempts = dict.fromkeys(range(size), 0)
        for failed in self.dropped:
            attempts[failed.place] = failed.attempt + 1

        # These places have no attempt left that could be dropped.
        for place in self.exhausted:
            del attempts[place]
        self.dropped += [_drop(self.task, place, attempt, reason) for place, attempt in attempts.items()]
        self.rollouts = []


@dataclass(eq=False)
class Scheduler:
    """Produces finished groups. Waits for: the policy and rollouts.

    Woken by: a new version, a closed batch, a finished group.
    """

    config: RunConfig
    environments: dict[str, Environment]
    buffer: Buffer
    policy: Policy
    runner: RolloutRunner
    waits: Waits
    next_batch: int
    tokens_per_rollout: float = 0.0  # mean of the batch before; 0 if there is none, or its size is in rollouts
    num_accepted: int = 0  # rollouts in the batch that is being filled
    num_tokens: int = 0  # their tokens
    num_failures: int = 0
    _under_way: dict[int, Group] = field(default_factory=dict)
    _finished: dict[int, Group] = field(default_factory=dict)
    _issued: dict[int, OpenGroup] = field(default_factory=dict)  # in order, not yet handed out
    _num_issued: int = 0  # their rollouts
    _num_finished: int = 0  # those of finished groups among them
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _dropped: Counter[str] = field(default_factory=Counter)  # groups, while this batch is filled, by reason
    _reserve: float = 0.0  # rollouts, or tokens, that are kept under way, whatever the batches ahead need
    _any_success: bool = False
    _failed_examples: set[tuple[str, int]] = field(default_factory=set)  # (environment, example)
    _overlong_examples: set[tuple[str, int]] = field(default_factory=set)  # those whose prompts leave no room
    _hopeless: TriremeError | None = None

    def __post_init__(self) -> None:
        self._settings = {name: self.config.orchestrator.of(name) for name in self.environments}
        orchestrator = self.config.orchestrator
        self._is_in_tokens = orchestrator.token_batch_size is not None
        self._size = orchestrator.token_batch_size or orchestrator.num_rollouts(self.config.seq_len)

        # Rollouts of a reserve of n batches are trained on up to n + 1 versions later than others.
        room = orchestrator.max_off_policy_steps - self.config.max_async_level - 1
        self._most_reserve = self._size * min(orchestrator.oversampling_factor, max(0, room))

    async def run(self) -> None:
        """Issue groups until cancelled."""
        follower = asyncio.create_task(self._follow_policy())
        try:
            while True:
                # Cleared before the check, so that a change during the loop below is not lost.
                self._changed.clear()
                while self._may_issue():
                    reach("rollout.begun")
                    group = Group(task=self.buffer.take(), issued_at=self.policy.version)
                    self._under_way[group.task.id] = group
                    self._issued[group.task.id] = group.task
                    self._num_issued += self._size_of(group.task)
                    group.runner = asyncio.create_task(self._run_group(group))
                    await asyncio.sleep(0)  # one group per iteration of the event loop
                await self._changed.wait()
        finally:
            follower.cancel()
            await cancel_all([group.runner for group in self._under_way.values() if group.runner is not None])

    async def _follow_policy(self) -> None:
        while True:
            await self.policy.reached(self.policy.version + 1)
            self._cancel_stale()
            self._changed.set()

    def _size_of(self, task: OpenGroup) -> int:
        return self._settings[task.env].rollouts_per_example

    @property
    def is_filled(self) -> bool:
        """Whether the batch has its size. A synchronous one takes all groups that were begun with it, as the next batch
        would find them stale."""
        return self.num_missing == 0 and not (self.config.synchronous and self._issued)

    @property
    def num_missing(self) -> int:
        """Rollouts that the batch lacks, or tokens."""
        return max(0, self._size - (self.num_tokens if self._is_in_tokens else self.num_accepted))

    def accept(self, group: Group) -> None:
        """Count a group to the batch."""
        self.num_accepted += len(group.rollouts)
        self.num_tokens += num_tokens(group.rollouts)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a rollout of this batch; 0 if it has none yet, or its size is in rollouts."""
        return self.num_tokens / self.num_accepted if self._is_in_tokens and self.num_accepted else 0.0

    def _worth(self) -> float:
        """Return what a rollout is expected to add to a batch: one, or as many tokens as in the batch before, so far in
        this one, or at most."""
        return (self.tokens_per_rollout or self.mean_tokens or self.config.seq_len) if self._is_in_tokens else 1.0

    def _may_issue(self) -> bool:
        version = self.policy.version
        if version < 0 or self.next_batch >= self.config.max_steps:
            return False

        # Near the end of the run, fewer batches are left than the policy may lag behind.
        allowed = rollouts_allowed(
            version=version,
            next_batch=self.next_batch,
            max_async_level=min(self.config.max_async_level, self.config.max_steps - 1 - version),
            batch_size=self._size,
        )
        worth = self._worth()
        num_taken = self.num_tokens if self._is_in_tokens else self.num_accepted
        num_begun = num_taken + self._num_issued * worth
        if num_begun < allowed or self.config.synchronous:
            return num_begun < allowed

        # No reserve for batches that have finished already, nor more than the run needs.
        num_under_way = self._num_issued - self._num_finished
        rest = (self.config.max_steps - self.next_batch) * self._size
        if num_begun - num_under_way * worth >= allowed or num_begun >= rest:
            return False

        # Rollouts of a later batch are begun beside the last, slowest ones of this one.
        largest = max(own.rollouts_per_example for own in self._settings.values())
        return (num_under_way + largest) * worth <= self._reserve

    async def _run_group(self, group: Group) -> None:
        size = self._size_of(group.task)
        places = range(size)
        try:
            group.rollouts = await gather_or_cancel(self._run_rollout(group, place) for place in places)
        except _GaveUp as error:
            group.drop(f"group given up: {error}", size)
        except TriremeError as error:
            # The error is not this rollout's alone: `next_group` raises it, and the run ends.
            self._hopeless = self._hopeless or error
            group.drop(f"group given up: {error}", size)
        except Exception as error:  # our own bug: without this, the batch would wait for the group forever
            log.exception("a rollout of %s example %d failed unexpectedly", group.task.env, group.task.example)
            self._hopeless = self._hopeless or TriremeError(
                f"A rollout failed unexpectedly: {error!r} - expected a result or a `RolloutFailed`. Look at the "
                "traceback above."
            )
            group.drop(f"group given up: {error!r}", size)

        # Unless `_cancel_stale` has taken the group out meanwhile.
        if self._under_way.pop(group.task.id, None) is not None:
            self._finish(group)

    def _finish(self, group: Group) -> None:
        """Have a group that is under way no more handed out. Another one may take its place in the reserve."""
        self._finished[group.task.id] = group
        self._num_finished += self._size_of(group.task)
        self._arrived.set()
        if self._reserve:
            self._changed.set()

    async def _run_rollout(self, group: Group, place: int) -> Rollout:
        """Return one rollout of the group, after as many attempts as it takes and may take."""
        task, attempts = group.task, self.config.orchestrator.max_rollout_attempts
        environment, sampling = self.environments[task.env], self._settings[task.env].sampling
        name, last = f"{task.id}-{place}", ""

        # An orchestrator before this one may have used some of the attempts. They are not repeated.
        first = self.runner.first_attempt(environment, name, attempts)
        group.dropped += [_drop(task, place, earlier, FAILED_BEFORE) for earlier in range(first)]

        for attempt in range(first, attempts):
            spec = RolloutSpec("train", task.example, place, name, str(task.id), self._size_of(task), attempt)
            try:
                rollout = await self.runner.run(environment, spec, sampling=sampling)
            except RolloutFailed as failure:
                self._count_failure(task, failure)
                last = str(failure)
                if failure.is_final:  # its group is dropped for it
                    raise _GaveUp(f"rollout {place} failed for good, {last}") from failure
                if group.reason is None:  # otherwise it was dropped with its group
                    group.dropped.append(_drop(task, place, attempt, last))
                continue

            # The journal names a rollout by its group and its place there.
            rollout.group, rollout.place = task.id, place
            reach("rollout.finished")
            self._any_success = True
            return rollout

        # The group is dropped for this place, whose attempts are all recorded.
        group.exhausted.add(place)
        raise _GaveUp(f"rollout {place} failed {attempts} times, last {last}")

    def _count_failure(self, task: OpenGroup, failure: RolloutFailed) -> None:
        self.num_failures += 1
        self._failed_examples.add((task.env, task.example))
        if failure.is_overlong:
            self._overlong_examples.add((task.env, task.example))
        log.warning("rollout of %s example %d failed: %s", task.env, task.example, failure)

        # If nothing at all succeeds, the environment or the model is broken, and more rollouts would not help.
        if not self._any_success and self.num_failures >= HOPELESS_FAILURES:
            self._hopeless = AllRolloutsFail(
                f"All of the first {self.num_failures} rollouts failed - at least one was expected to succeed. "
                f"The last one, of {task.env} example {task.example}: {failure}\n{failure.traceback}"
                f"{self._advice(task, failure)}"
            )
            self._arrived.set()

    def _advice(self, task: OpenGroup, failure: RolloutFailed) -> str:
        if not failure.is_overlong:
            return f"Fix the environment; test it alone with `trireme env check {task.env}`."
        seq_len, longest = self.config.seq_len, self.config.inference.model.max_model_len
        is_shorter = longest is not None and longest < seq_len
        keys = f"`inference.model.max_model_len` (now {longest})" if is_shorter else f"`seq_len` (now {seq_len})"
        return (
            f"{len(self._overlong_examples)} of the {len(self._failed_examples)} examples tried have prompts that "
            f"leave no room for an answer. Raise {keys}, or choose examples with shorter prompts."
        )

    async def next_group(self) -> Group:
        """Wait for the next finished group: in the order of issue in a synchronous run, else as they finish.

        Raises: AllRolloutsFail, which says how.
        """
        with self.waits.waiting(
            f"rollouts of batch {self.next_batch}",
            peer="inference",
            deadline_s=self.config.orchestrator.trainer_timeout_s,
            patient=True,
        ) as wait:
            await asyncio.sleep(0)  # let other tasks run, even if all groups have finished already
            while True:
                # A group's tokens decide what is issued next. A synchronous run is reproducible, so all that there is
                # room for is issued before the next group is handed out, however fast groups end.
                while self._is_in_tokens and self.config.synchronous and self._may_issue():
                    await asyncio.sleep(0)
                if self._hopeless:
                    raise self._hopeless

                # A synchronous run is reproducible: it takes groups in the order of issue, however they finish.
                first = next(iter(self._issued if self.config.synchronous else self._finished), None)
                if first in self._finished:
                    group, size = self._finished.pop(first), self._size_of(self._issued.pop(first))
                    self._num_issued -= size
                    self._num_finished -= size
                    # The place of a dropped group is free for another one, and so may be that of a short one.
                    if group.reason is not None or self._is_in_tokens:
                        self._changed.set()
                    return group

                # Nothing to hand out. Without rollouts under way, it is the trainer's next version that is missing.
                wait.note = self.describe()
                wait.peer = "inference" if self._under_way else "trainer"
                self._arrived.clear()
                try:
                    # not `wait_for`: before Python 3.12 it loses a cancellation that arrives together with a group
                    async with asyncio.timeout(5.0):
                        await self._arrived.wait()
                except TimeoutError:
                    wait.check()

    def not_accepted(self, reason: str) -> None:
        """Issue another group in place of the one that was handed out last."""
        self._dropped[reason.partition(":")[0]] += 1
        total = self._dropped.total()
        shorter = self.config.seq_len / self._worth() if self._is_in_tokens else 1.0
        if total % max(1, round(REFILLS_TO_WARN * self.config.num_groups * shorter)) == 0:
            log.warning(
                "batch %d: %d groups were dropped before it is full (%s) - a few were expected. See whether examples "
                "are too easy or too hard for this model (pools thin those out: `[orchestrator.buffer.pools]`), or "
                "whether `max_off_policy_steps` or `[orchestrator.filters]` is too tight.",
                self.next_batch,
                total,
                self._drop_reasons(),
            )
        self._changed.set()

    def _drop_reasons(self) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in self._dropped.most_common())

    def batch_closed(self) -> None:
        """Begin the next batch: this one is full and in the journal."""
        # The trainer had to wait for it if the version that trains on it is live already.
        was_late = self.policy.version >= self.next_batch
        if not self.config.synchronous:
            self._reserve = next_reserve(self._reserve, was_late=was_late, most=self._most_reserve)

        self.next_batch += 1
        self.tokens_per_rollout = self.mean_tokens
        self.num_accepted = self.num_tokens = 0
        self._dropped.clear()
        self._cancel_stale()
        self._changed.set()

    def _cancel_stale(self) -> None:
        limit = self.config.orchestrator.max_off_policy_steps
        for group in list(self._under_way.values()):
            # Tokens that a teacher samples do not age.
            if group.task.env in self.runner.teachers:
                continue
            if is_too_old(self.next_batch, group.issued_at, limit) and group.runner is not None:
                group.runner.cancel()
                self._under_way.pop(group.task.id, None)
                group.drop(f"stale: begun under version {group.issued_at}", self._size_of(group.task))
                self._finish(group)

    def open_groups(self) -> list[OpenGroup]:
        """Return groups that were issued and are in no batch yet, in order."""
        return [*self._issued.values(), *self.buffer.reopened]

    def describe(self) -> str:
        version = max(0, self.next_batch - self.config.max_async_level)
        idle = f"none may start before version {version} is live" if self.policy.version < version else "none started"
        under_way = f"{len(self._under_way)} groups under way" if self._under_way else idle
        dropped = f", dropped meanwhile: {self._drop_reasons()}" if self._dropped else ""
        return f"{self.num_missing:,} of {self.config.orchestrator.batch_in_words} missing, {under_way}{dropped}"

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)


class _GaveUp(Exception):
    """A rollout has used all its attempts."""


def _drop(task: OpenGroup, place: int, attempt: int, reason: str) -> Dropped:
    return Dropped(group=task.id, place=place, attempt=attempt, env=task.env, example=task.example, reason=reason)
