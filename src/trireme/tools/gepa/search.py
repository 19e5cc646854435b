"""The adapter between the library `gepa`, which searches (genetic, reflective, Pareto), and our rollouts.

Two rules are ours. The budget is never exceeded: the library checks it only between its iterations, so an iteration
begins only if all that it may cost is left. An answer of the reflection model that is empty, unchanged or known
costs no rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.core.result import GEPAResult
from gepa.core.state import GEPAState
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from trireme.base.errors import PeerRefused
from trireme.base.waiting import Waits
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import RolloutOutcome, run_rollouts
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools import progress
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.files import (
    COMPONENT,
    LOG,
    MAY_DIFFER,
    REFLECTIONS,
    ROLLOUTS,
    Example,
    PromptRollout,
    Records,
    Reflection,
    name_of,
    write_results,
)
from trireme.tools.gepa.reflection import feedback_on, reflect
from trireme.tools.policies.prompts import PromptedEnvironment
from trireme.tools.policies.selection import RolloutPolicy
from trireme.tools.progress import SHOW_EVERY_S

Batch = EvaluationBatch[PromptRollout, PromptRollout]
Value = TypeVar("Value")


class _Stopped(BaseException):
    """Ends the library with an error. The library would catch an `Exception` in a reflection, and continue."""


@dataclass
class Search:
    """One search. The library calls its methods; rollouts and reflections run in the event loop of `runner`."""

    config: GepaConfig
    folder: Path
    runner: asyncio.Runner
    environment: Environment
    policy: RolloutPolicy
    teacher: RolloutPolicy
    train: Sequence[Example]  # examples to reflect on
    validation: Sequence[Example]  # examples to choose by
    first_prompt: str
    waits: Waits

    def __post_init__(self) -> None:
        self._rollouts = Records(self.folder / ROLLOUTS, PromptRollout)
        self._reflections = Records(self.folder / REFLECTIONS, Reflection)
        settings = self.config.model_dump(mode="json", exclude=MAY_DIFFER)
        self._settings = settings | {"num_train": self.environment.num_train, "num_eval": self.environment.num_eval}
        self._found: GEPAResult[Any, Any] | None = None  # at the beginning of the current iteration
        self._summary: dict[str, Any] = {}
        self._num_calls = 0

    def run(self) -> dict[str, Any]:
        """Search until the budget is spent, and return the summary.

        Raises: the error of a model or the environment after which no other rollout could go better.
        """
        if known := len(self._rollouts.lines):
            progress.show(f"resuming: {known} rollouts are in {self.folder} already, and reused where they fit")

        perfect = self.config.perfect_score
        with open(self.folder / LOG, "a", encoding="utf-8") as file:
            try:
                gepa.optimize(
                    seed_candidate={COMPONENT: self.first_prompt},
                    trainset=list(self.train),
                    valset=list(self.validation),
                    adapter=self,  # type: ignore[arg-type]
                    reflection_minibatch_size=self.config.minibatch_size,
                    skip_perfect_score=perfect is not None,
                    perfect_score=1.0 if perfect is None else perfect,
                    stop_callbacks=self.is_over,
                    callbacks=[self],  # type: ignore[list-item]
                    logger=SimpleNamespace(log=lambda message: print(message, file=file, flush=True)),
                    track_best_outputs=False,
                    seed=self.config.seed,
                )
            except _Stopped as stopped:
                raise stopped.args[0] from None
        return self._summary

    def _wait(self, question: Coroutine[Any, Any, Value]) -> Value:
        """Run the event loop until a question of the library is answered, and show what it waits for.

        Raises: _Stopped.
        """

        async def answer() -> Value:
            showing = asyncio.create_task(self._show_waits())
            try:
                return await question
            finally:
                showing.cancel()

        try:
            return self.runner.run(answer())
        except Exception as error:
            raise _Stopped(error) from error

    async def _try_prompt(self, prompt: str, examples: Sequence[Example]) -> list[PromptRollout]:
        """Roll out a prompt once on each example, and return one line per example, in order. Recorded ones are reused.

        Raises: TriremeError if no other rollout could go better: the key is wrong, the engine is gone.
        """
        name = name_of(prompt, self._settings)

        # Repeats of a prompt on an example are numbered, so that a resumed search finds each result again.
        keys = [(name, example, self._rollouts.next_time((name, example))) for example in examples]
        missing = [
            RolloutSpec(split, index, nth, name=f"{split}-{index}-{nth}")
            for _, (split, index), nth in keys
            if (name, (split, index), nth) not in self._rollouts.lines
        ]

        # Recorded rollouts count too, so that a resumed search ends where one that was never stopped does.
        self._num_calls += len(keys) - len(missing)
        prompted = PromptedEnvironment(self.environment, prompt, columns=self.config.state_columns)
        roll_out = partial(self.policy.rollout, cast(Environment, prompted))

        async def record(outcome: RolloutOutcome) -> None:
            more: dict[str, Any] = {"split": outcome.spec.split, "prompt_name": name}
            if outcome.rollout is not None:
                more |= {"columns": outcome.rollout.columns, "state_keys": outcome.rollout.state_keys}
            self._rollouts.add(PromptRollout.of(outcome, **more))
            self._num_calls += 1

        await run_rollouts(missing, roll_out, record, scored_together=False)
        return [self._rollouts.lines[key] for key in keys]

    def _show(self, words: str) -> None:
        progress.show(f"[{self._num_calls}/{self.config.max_calls}] {words}")

    async def _show_waits(self) -> None:
        while True:
            await asyncio.sleep(SHOW_EVERY_S)
            for wait in self.waits.now()[:1]:
                self._show(str(wait))

    # what the library asks of an adapter

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Batch:
        lines = self._wait(self._try_prompt(candidate[COMPONENT], batch))

        # If no rollout with the first prompt works, the model or the environment is at fault, not the prompt.
        if self._found is None and all(line.error is not None for line in lines):
            raise PeerRefused(
                f"all {len(lines)} rollouts of the first evaluation failed; the first: {lines[0].error} - expected "
                "some that are scored. `trireme env check` with the same model shows more; a prompt cannot be improved "
                "by errors alone."
            )
        return EvaluationBatch(outputs=lines, scores=[line.score for line in lines], trajectories=lines)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Batch, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the rollouts themselves: `propose_new_texts` shortens their texts as needed."""
        return {COMPONENT: [{"rollout": line} for line in eval_batch.trajectories or []]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return a new prompt, or nothing if the reflection model gave none."""

        def render(chars: int) -> str:
            shown = [feedback_on(each["rollout"], self.config, chars=chars) for each in reflective_dataset[COMPONENT]]
            question = {"current_instruction_doc": candidate[COMPONENT], "dataset_with_feedback": shown}
            return str(InstructionProposalSignature.prompt_renderer(question))

        reflection = self._wait(reflect(self.teacher, self.config, self._reflections, render))
        prompt = InstructionProposalSignature.output_extractor(reflection.answer.strip())["new_instruction"]

        # An empty or known prompt would cost rollouts and teach nothing.
        assert self._found is not None
        if prompt and {COMPONENT: prompt} not in self._found.candidates:
            return {COMPONENT: prompt}
        problem = reflection.error or ("one that it gave before" if prompt else "an empty one")
        self._show(f"the reflection model gave no new prompt: {problem}")
        return {}

    # what the library reports

    def is_over(self, gepa_state: GEPAState[Any, Any]) -> bool:
        """Write what was found so far, and decide before each iteration whether it may begin."""
        self._found = found = GEPAResult.from_state(gepa_state)

        # An iteration is never interrupted, so all that it may cost must be left before it begins.
        perfect, cost = self.config.perfect_score, iteration_cost(self.config, self.validation)
        left, why = self.config.max_calls - self._num_calls, None
        if perfect is not None and any(min(scores.values()) >= perfect for scores in found.val_subscores):
            why = f"every validation example has the highest score, {perfect:g}"
        elif left < cost:
            why = f"{left} calls are left, and one more prompt may take {cost}"

        # The files are written before every iteration, so that a search that is killed leaves what it found.
        before, after = found.val_aggregate_scores[0], found.val_aggregate_scores[found.best_idx]
        self._summary = {
            "state": "finished" if why else "under way",
            "why": why,
            "calls": self._num_calls,
            "num_prompts": found.num_candidates,
            "best": found.best_idx,
            "validation": {"before": before, "after": after, "num_examples": len(self.validation)},
            "first_prompt": self.first_prompt,
            "policy": self.policy.name,
            "teacher": self.teacher.name,
        }
        write_results(self.folder, self.config, found, self.validation, self._summary)
        return why is not None

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        parents, score = event["parent_ids"], event["average_score"]
        if parents:
            verdict = ", the best so far" if event["is_best_program"] else ""
            self._show(f"prompt {event['candidate_idx']}, from prompt {parents[0]}: validation {score:.3f}{verdict}")
            return
        self._show(f"validation {score:.3f} with the prompt to begin with")

        # Only rollouts show which fields a state has, so a wrong name can be reported here at the earliest.
        lines = self._rollouts.lines.values()
        for name in set(self.config.state_columns) - {"tool_calls"}.union(*(line.columns for line in lines)):
            keys = ", ".join(next((line.state_keys for line in lines if line.state_keys), []))
            progress.show(f"--state-columns {name}: no rollout had one. The environment's state has: {keys}")

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        size = self.config.minibatch_size
        self._show(
            f"a new prompt was no better on the {size} examples that it was made from: "
            f"{event['old_score'] / size:.3f} -> {event['new_score'] / size:.3f}"
        )

    def on_evaluation_skipped(self, event: Mapping[str, Any]) -> None:
        self._show(f"nothing to learn from {len(event['scores'])} examples that all have the highest score")


def iteration_cost(config: GepaConfig, validation: Sequence[Example]) -> int:
    """Return how many rollouts one more prompt takes at most: two minibatches, and itself on validation."""
    return 2 * config.minibatch_size + len(validation)
