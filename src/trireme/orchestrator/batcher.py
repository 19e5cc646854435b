"""Fill a batch from finished groups: drop stale, flawed and uninformative ones, then compute advantages."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme.algo.advantage import Baselines
from trireme.algo.data.difficulty import Outcome
from trireme.algo.filters import ZERO_ADVANTAGE, flaw_with
from trireme.algo.rules import rules_of
from trireme.algo.staleness import is_too_old
from trireme.base.background import with_pauses
from trireme.base.log import get_logger
from trireme.config.orchestrator import Filters
from trireme.config.run import RunConfig
from trireme.journal.records import Dropped, Rollout, State
from trireme.journal.targets import (
    by_group,
    estimates_of,
    estimators_of,
    filters_of,
    flaws_of,
    is_zero,
    outcome_of,
    scores_of,
    token_advantages,
    why_not_worth_it,
    with_advantages,
)
from trireme.orchestrator.scheduler import Group, Scheduler
from trireme.orchestrator.self_distillation import SelfTeacher
from trireme.orchestrator.teacher import Teacher

log = get_logger("batcher")


@dataclass
class Filled:
    """A batch and the fates that were decided while it was filled."""

    rollouts: list[Rollout] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    baselines: Baselines = field(default_factory=dict)  # after the batch


@dataclass(eq=False)
class Batcher:
    """Fills one batch at a time from the scheduler's groups.

    Raises: ConfigError if there is no such function as `orchestrator.advantage.path`.
    """

    config: RunConfig
    scheduler: Scheduler
    state: State  # to resume from
    teachers: dict[str, Teacher | SelfTeacher] = field(default_factory=dict)  # those that judge, by environment

    def __post_init__(self) -> None:
        self._rules = rules_of(self.config)
        self._custom = estimators_of(self._rules)
        self._baselines = dict(self.state.baselines)

    async def fill(self, step: int) -> Filled:
        """Return a batch with its advantages, and all that was dropped on the way.

        It has exactly `batch_size` rollouts, or with groups of different sizes as many as whole groups give that reach
        it: less than the last group more. So has a batch of `token_batch_size`, unless the run is synchronous: then it
        has all groups that were begun with it.

        Raises:
            ConfigError: a function of the user returned no advantages.
            PeerDied: the teacher does not answer.
        """
        filled = Filled()
        groups: list[Group] = []
        while not self.scheduler.is_filled:
            # Filtering may leave fewer groups than were issued, so this asks for more until the batch is full.
            group = await self.scheduler.next_group()

            # A group that the scheduler has dropped already keeps its reason.
            size = self._rules.of(group.task.env).group_size
            if group.reason is None and (reason := self._why_drop(group, step, filled.outcomes)) is not None:
                group.drop(reason, size)
            filled.dropped += group.dropped
            if group.reason is None:
                groups.append(group)
                self.scheduler.accept(group)
            else:
                self.scheduler.not_accepted(group.reason)

        # Groups arrive as they finish, which no replay could repeat. The batch is in their order of issue.
        groups.sort(key=lambda group: group.task.id)
        filled.outcomes.sort(key=lambda outcome: outcome.group)
        filled.rollouts = [rollout for group in groups for rollout in group.rollouts]

        # In this order, as advantages need the teacher's logprobs, and masks need the flaw that advantages show.
        for name, teacher in self.teachers.items():
            if own := [rollout for rollout in filled.rollouts if rollout.env == name]:
                await teacher.score(own)
        await self._give_advantages(filled)
        self._mask(filled.rollouts, step)
        return filled

    def _why_drop(self, group: Group, step: int, outcomes: list[Outcome]) -> str | None:
        """Return why a group may not enter this batch. Note its outcome if it ended in time."""
        # What another model sampled never becomes stale.
        versions = (rollout.oldest_version for rollout in group.rollouts)
        oldest = min((version for version in versions if version is not None), default=step)
        if is_too_old(step, oldest, self._rules.max_lag):
            return f"stale: a part of it is of version {oldest}"

        # The group ended in time, so it counts for difficulty and the curriculum even if a filter drops it below.
        outcomes.append(outcome_of(group.rollouts))
        for rollout in group.rollouts:
            rollout.flaws = flaws_of(rollout, self._rules)
            if (flaw := flaw_with("drop", rollout.flaws, self._filters_of(rollout))) is not None:
                return f"{flaw}: rollout {rollout.place} of its group"
        return why_not_worth_it(group.rollouts, self._rules)

    def _filters_of(self, rollout: Rollout) -> Filters:
        return filters_of(self._rules.of(rollout.env))

    async def _give_advantages(self, filled: Filled) -> None:
        groups = list(by_group(filled.rollouts).values())
        # A batch has thousands of rollouts. The pauses let the event loop answer requests in between.
        scored = [scores_of(group, self._rules) async for group in with_pauses(groups)]
        estimated, self._baselines = estimates_of(scored, self._rules, self._baselines, custom=self._custom)
        filled.baselines = self._baselines
        async for group, of_agent in with_pauses(zip(groups, estimated, strict=True)):
            for rollout, per_sample in zip(group, token_advantages(group, of_agent, self._rules), strict=True):
                rollout.samples = [with_advantages(*both) for both in zip(rollout.samples, per_sample, strict=True)]
                if is_zero(per_sample) and not rollout.model:
                    rollout.flaws = [*rollout.flaws, ZERO_ADVANTAGE]

    def _mask(self, rollouts: list[Rollout], step: int) -> None:
        for rollout in rollouts:
            rollout.masked = flaw_with("mask", rollout.flaws, self._filters_of(rollout))
        if all(rollout.masked is not None for rollout in rollouts):
            why = sorted({str(rollout.masked) for rollout in rollouts})
            log.warning(
                "batch %d: all %d rollouts are masked (%s) - some were expected to be trained on, so this step learns "
                "nothing: its loss is 0. See whether `sampling.max_tokens` is too small or the examples too easy or "
                "too hard, or count such rollouts instead of masking them (`[orchestrator.filters]`).",
                step,
                len(rollouts),
                ", ".join(why),
            )
