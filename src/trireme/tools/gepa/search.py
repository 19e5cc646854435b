"""The search itself is the library `gepa`'s (genetic, reflective, Pareto): here it meets our rollouts.

Three things are ours: the budget, which is never passed (the library looks only between its iterations, so an iteration
begins only where all that it may cost is left); the answer of the reflection model, of which an empty, unchanged or
known prompt costs no rollout; and going on after a stop, see `journal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.core.result import GEPAResult
from gepa.core.state import GEPAState
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from trireme.base.errors import Refused
from trireme.tools.gepa.bridge import Bridge
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.examples import Drawn, Example
from trireme.tools.gepa.feedback import feedback_on
from trireme.tools.gepa.journal import Journal, Reflected, Scored, name_of
from trireme.tools.gepa.rollouts import Trials
from trireme.tools.gepa.teacher import Teacher

COMPONENT = "system_prompt"
MOST_UNUSABLE = 5
"""Reflections in a row that give no new prompt: then the search ends, with what it has."""

Batch = EvaluationBatch[Scored, Scored]


@dataclass(frozen=True)
class Candidate:
    """A prompt that was scored on all validation examples."""

    prompt: str
    parent: int | None  # the prompt that it was made of; None of the first
    scores: tuple[float, ...]  # by validation example

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class Found:
    """All prompts so far, and why there are no more."""

    candidates: tuple[Candidate, ...]
    why: str

    @property
    def best(self) -> int:
        """The first of the best."""
        means = [candidate.mean for candidate in self.candidates]
        return means.index(max(means))


Tell = Callable[[str], None]


@dataclass
class Search:
    """What `gepa` calls an adapter, with its stopper and its proposer. All but `run` is called in its thread."""

    config: GepaConfig
    drawn: Drawn
    trials: Trials
    teacher: Teacher
    journal: Journal
    tell: Tell
    on_found: Callable[[Found], None] = lambda found: None
    why: str = "under way"
    num_unusable: int = 0
    _unusable: list[Reflected] = field(default_factory=list, init=False)  # since the last new prompt
    _trouble: Exception | None = field(default=None, init=False)
    """What ended reflection. `gepa` would take it for an error that passes, and go on; `run` raises it in the end."""
    _bridge: Bridge | None = field(default=None, init=False)
    _num_spent: int = field(default=0, init=False)  # on the test of a prompt that was the best, before the budget grew
    _known: list[Candidate] = field(default_factory=list, init=False)

    async def run(self, first: str, *, log: Path) -> Found:
        """Raises: what a model or the environment raised where no other rollout could go better."""
        self._bridge = Bridge()
        tested = [line for line in self.journal.rollouts.values() if line.purpose == "test"]
        self._num_spent = sum(line.prompt_name != name_of(first) for line in tested)
        await self._bridge.run(lambda: self._optimize(first, log))
        if self._trouble is not None:
            raise self._trouble
        return self.found()

    @property
    def num_unusable_in_a_row(self) -> int:
        return len(self._unusable)

    def found(self) -> Found:
        return Found(tuple(self._known), self.why)

    def _optimize(self, first: str, log: Path) -> GEPAResult[Any, Any]:
        with open(log, "a", encoding="utf-8") as file:
            return gepa.optimize(
                seed_candidate={COMPONENT: first},
                trainset=list(self.drawn.train),
                valset=list(self.drawn.validation),
                adapter=self,  # type: ignore[arg-type]
                reflection_minibatch_size=self.config.minibatch_size,
                skip_perfect_score=self.config.perfect_score is not None,
                perfect_score=self.config.perfect_score if self.config.perfect_score is not None else 1.0,
                stop_callbacks=self.is_over,
                callbacks=[self],  # type: ignore[list-item]
                logger=_Log(file),
                track_best_outputs=False,
                seed=self.config.seed,
            )

    # what gepa asks of an adapter

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Batch:
        scored = self._ask(self.trials.run(candidate[COMPONENT], batch))
        if not self._known and all(line.error is not None for line in scored):
            self.journal.forget(scored)
            raise _all_failed(scored)
        return EvaluationBatch(outputs=scored, scores=[line.score for line in scored], trajectories=scored)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Batch, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """The rollouts themselves: `propose_new_texts` makes texts of them, as long as they may be."""
        return {COMPONENT: [{"scored": line} for line in eval_batch.trajectories or []]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """A new prompt, or nothing where the reflection model gave none."""
        lines = [record["scored"] for record in reflective_dataset[COMPONENT]]
        prompt = candidate[COMPONENT]

        def render(longest: int) -> str:
            return self._question(prompt, lines, longest)

        try:
            reflected = self._ask(self.teacher.answer(render, longest=self.config.feedback_chars))
        except Exception as error:
            self._trouble = error
            return {}
        new = InstructionProposalSignature.output_extractor(reflected.answer.strip())["new_instruction"]
        if why := reflected.error or self._why_unusable(new):
            self.num_unusable += 1
            self._unusable.append(reflected)
            self.tell(f"the reflection model gave no new prompt: {why}")
            return {}
        self._unusable.clear()
        return {COMPONENT: new}

    def _question(self, prompt: str, lines: Sequence[Scored], longest: int) -> str:
        config = self.config
        told = [
            feedback_on(line, columns=config.state_columns, perfect_score=config.perfect_score, longest=longest)
            for line in lines
        ]
        rendered = InstructionProposalSignature.prompt_renderer(
            {"current_instruction_doc": prompt, "dataset_with_feedback": told}
        )
        assert isinstance(rendered, str), rendered
        return rendered

    def _why_unusable(self, prompt: str) -> str | None:
        if not prompt:
            return "an empty one"
        same = [number for number, known in enumerate(self._known) if known.prompt == prompt]
        return f"prompt {same[0]} again" if same else None

    def _ask(self, question: Any) -> Any:
        assert self._bridge is not None
        return self._bridge.ask(question)

    # what gepa asks before each iteration

    def is_over(self, gepa_state: GEPAState[Any, Any]) -> bool:
        reasons = (self._reason_of_trouble(), self._reason_of_score(), self._reason_of_budget())
        reason = next((reason for reason in reasons if reason), None)
        self.why = reason or self.why
        return reason is not None

    def _reason_of_trouble(self) -> str | None:
        if self._trouble is not None or (self._bridge is not None and self._bridge.is_closed):
            return "interrupted"
        if len(self._unusable) < MOST_UNUSABLE:
            return None
        if len(self._known) == 1:
            self.journal.forget(self._unusable)
            self._trouble = _nothing_new(self.teacher.name)
        return f"{MOST_UNUSABLE} reflections in a row gave no new prompt"

    def _reason_of_score(self) -> str | None:
        perfect = self.config.perfect_score
        if perfect is None or not any(all(score >= perfect for score in known.scores) for known in self._known):
            return None
        return f"every validation example has the highest score, {perfect:g}"

    def _reason_of_budget(self) -> str | None:
        left = self.config.max_calls - reserve(self.config) - self.trials.calls.total() - self._num_spent
        if left >= iteration_cost(self.config, self.drawn):
            return None
        return f"{left} calls are left, and one more prompt may take {iteration_cost(self.config, self.drawn)}"

    # what gepa tells

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        scores = tuple(event["scores_by_val_id"][place] for place in sorted(event["scores_by_val_id"]))
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        candidate = Candidate(event["candidate"][COMPONENT], parents[0] if parents else None, scores)
        number, before = len(self._known), self.found() if self._known else None
        self._known.append(candidate)
        if before is None:
            self.tell(f"validation {candidate.mean:.3f} with the prompt to begin with")
        else:
            best = before.candidates[before.best].mean
            verdict = "the best so far" if candidate.mean > best else f"the best has {best:.3f}"
            self.tell(f"prompt {number}, from prompt {candidate.parent}: validation {candidate.mean:.3f}, {verdict}")
        self.on_found(self.found())

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        size = self.config.minibatch_size
        self.tell(
            f"a new prompt was no better on the {size} examples that it was made from: "
            f"{event['old_score'] / size:.3f} -> {event['new_score'] / size:.3f}"
        )

    def on_evaluation_skipped(self, event: Mapping[str, Any]) -> None:
        self.tell(f"nothing to learn from {len(event['scores'])} examples that all have the highest score")


class _Log:
    """What `gepa` says goes to a file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def log(self, message: str) -> None:
        self._file.write(f"{message}\n")
        self._file.flush()


def iteration_cost(config: GepaConfig, drawn: Drawn) -> int:
    """Rollouts that one more prompt takes at most: its parent and itself on a minibatch, then itself on validation."""
    return 2 * config.minibatch_size + len(drawn.validation)


def reserve(config: GepaConfig) -> int:
    """Rollouts that are left for the end: the first prompt and the best one on the test examples."""
    return 2 * config.num_test


def _nothing_new(teacher: str) -> Refused:
    return Refused(
        f"{teacher} gave no new prompt {MOST_UNUSABLE} times in a row (nothing, or the one that it was shown; see "
        "gepa.log) - expected one. Name another `--reflection-model`, or give it more room: "
        "`--reflection-sampling.max-tokens`."
    )


def _all_failed(scored: Sequence[Scored]) -> Refused:
    return Refused(
        f"all {len(scored)} rollouts of the first evaluation failed; the first: {scored[0].error} - expected some that "
        "are scored. `trireme env check` with the same model tells more; a prompt cannot be improved by errors alone."
    )
