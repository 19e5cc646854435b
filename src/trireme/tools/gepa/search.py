"""The adapter between the library `gepa`, which searches (genetic, reflective, Pareto), and our rollouts.

Two rules are ours. The budget is never exceeded: the library checks it only between its iterations, so an iteration
begins only where all that it may cost is left. An answer of the reflection model that is empty, unchanged or known
costs no rollout.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.core.state import GEPAState
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from trireme.base.errors import Refused
from trireme.journal.records import Rollout
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import RolloutOutcome, run_rollouts
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.prompts import PromptedEnvironment
from trireme.tools.gepa.records import PURPOSES, Drawn, Example, PromptRollout, Records, Reflection, name_of
from trireme.tools.gepa.reflection import feedback_on, reflect

COMPONENT = "system_prompt"
MAX_UNUSABLE = 5
"""Reflections in a row without a new prompt after which the search ends, with what it has."""

Batch = EvaluationBatch[PromptRollout, PromptRollout]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Candidate:
    """A prompt that was scored on all validation examples."""

    prompt: str
    parent: int | None  # number of the prompt that it was made from; None of the first
    scores: tuple[float, ...]  # by validation example

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


class _Stopped(BaseException):
    """Ends the library's thread with an error. The library would catch an `Exception` in a reflection, and continue."""


@dataclass
class Search:
    """One search. The library calls its methods in a thread; rollouts and reflections run in the event loop."""

    config: GepaConfig
    drawn: Drawn
    environment: Environment
    policy: RolloutPolicy
    teacher: RolloutPolicy
    records: Records
    log: Path
    show: Callable[[str], None]
    on_candidate: Callable[[], None]
    why: str = "under way"
    num_unusable: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    unusable: list[Reflection] = field(default_factory=list)  # since the last new prompt
    calls: Counter[str] = field(default_factory=Counter)  # rollouts so far, by purpose
    _is_stopped: bool = False
    _pending: Future[Any] | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _num_tested: int = 0

    @property
    def best(self) -> int:
        """Number of the candidate with the highest validation score; the first of several."""
        means = [candidate.mean for candidate in self.candidates]
        return means.index(max(means))

    async def run(self, first: str) -> None:
        """Search until the budget is spent. Where this is cancelled, the library's thread ends first.

        Raises: the error of a model or the environment after which no other rollout could go better.
        """
        self._loop = asyncio.get_running_loop()
        # Rollouts of an earlier test at the end, before the user raised the budget: they are spent.
        tested = [line for line in self.records.rollouts.values() if line.purpose == "test"]
        self._num_tested = sum(line.prompt_name != name_of(first) for line in tested)
        working = self._loop.run_in_executor(None, self._optimize, first)
        try:
            await asyncio.shield(working)
        except _Stopped as stopped:
            raise stopped.args[0] from None
        except asyncio.CancelledError:
            self._is_stopped = True
            if self._pending is not None:
                self._pending.cancel()
            await asyncio.wait([working])
            working.exception()  # marks it as retrieved
            raise

    def _optimize(self, first: str) -> None:
        perfect = self.config.perfect_score
        with open(self.log, "a", encoding="utf-8") as file:

            class Log:
                def log(self, message: str) -> None:
                    file.write(f"{message}\n")
                    file.flush()

            gepa.optimize(
                seed_candidate={COMPONENT: first},
                trainset=list(self.drawn.train),
                valset=list(self.drawn.validation),
                adapter=self,  # type: ignore[arg-type]
                reflection_minibatch_size=self.config.minibatch_size,
                skip_perfect_score=perfect is not None,
                perfect_score=1.0 if perfect is None else perfect,
                stop_callbacks=self.is_over,
                callbacks=[self],  # type: ignore[list-item]
                logger=Log(),
                track_best_outputs=False,
                seed=self.config.seed,
            )

    def _wait(self, question: Coroutine[Any, Any, Value]) -> Value:
        """Run a coroutine in the event loop and return its result to the library's thread.

        Raises: _Stopped.
        """
        assert self._loop is not None
        self._pending = future = asyncio.run_coroutine_threadsafe(question, self._loop)
        if self._is_stopped:
            future.cancel()
        try:
            return future.result()
        except Exception as error:
            raise _Stopped(error) from error

    async def try_prompt(self, prompt: str, examples: Sequence[Example]) -> list[PromptRollout]:
        """Roll out a prompt once on each example, and return one line per example, in order. Recorded ones are reused.

        Raises: TriremeError where no other rollout could go better: the key is wrong, the engine is gone.
        """
        name = name_of(prompt)
        keys = [(name, example, self.records.next_time((name, example))) for example in examples]
        wanted: dict[RolloutSpec, tuple[Example, PromptedEnvironment]] = {}
        for _, example, nth in keys:
            if (name, example, nth) in self.records.rollouts:
                self.calls[example.purpose] += 1
            else:
                prompted = PromptedEnvironment(self.environment, prompt, columns=self.config.state_columns)
                task = f"{example.split}-{example.index}-{nth}"
                wanted[RolloutSpec(example.split, example.index, nth, name=task)] = example, prompted

        async def roll_out(spec: RolloutSpec) -> Rollout:
            return await self.policy.rollout(cast(Environment, wanted[spec][1]), spec)

        async def record(outcome: RolloutOutcome) -> None:
            example, prompted = wanted[outcome.spec]
            more: dict[str, Any] = {"purpose": example.purpose, "split": example.split, "prompt_name": name}
            if outcome.rollout is not None:
                more |= {"columns": outcome.rollout.columns, "state_keys": outcome.rollout.state_keys}
            elif outcome.failure is not None:
                more |= {"prompt": prompted.asked, "traceback": outcome.failure.traceback}
            self.records.add(PromptRollout.of(outcome, **more))
            self.calls[example.purpose] += 1

        await run_rollouts(list(wanted), roll_out, record, scored_together=False)
        return [self.records.rollouts[key] for key in keys]

    async def measure_held_out(self) -> dict[str, Any]:
        """Score the first and the best prompt on the test examples. Only these figures are unbiased: no choice was
        made by them.
        """
        examples = self.drawn.test
        self.show(f"measuring on {len(examples)} examples that nothing has seen")
        means = []
        for number in sorted({0, self.best}):
            scored = await self.try_prompt(self.candidates[number].prompt, examples)
            means.append(sum(line.score for line in scored) / len(scored))
        return {"before": means[0], "after": means[-1], "num_examples": len(examples)}

    def summary(self, state: str, held_out: dict[str, Any] | None) -> dict[str, Any]:
        """Return what `metadata.json` holds about the search."""
        first, best = self.candidates[0], self.candidates[self.best]
        rollouts = self.records.rollouts
        return {
            "state": state,
            "why": self.why,
            "calls": {"total": len(rollouts)} | {purpose: self.calls[purpose] for purpose in PURPOSES},
            "num_failed": sum(line.error is not None for line in rollouts.values()),
            "num_reflections": len(self.records.reflections),
            "num_unusable_reflections": self.num_unusable,
            "num_unusable_in_a_row": len(self.unusable),
            "num_prompts": len(self.candidates),
            "best": self.best,
            "validation": {"before": first.mean, "after": best.mean, "num_examples": len(self.drawn.validation)},
            "held_out": held_out,
            "num_train": len(self.drawn.train),
        }

    # what the library asks of an adapter

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Batch:
        lines = self._wait(self.try_prompt(candidate[COMPONENT], batch))
        if not self.candidates and all(line.error is not None for line in lines):
            self.records.forget(lines)
            raise Refused(
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
        """Return a new prompt, or nothing where the reflection model gave none."""

        def render(chars: int) -> str:
            shown = [feedback_on(each["rollout"], self.config, chars=chars) for each in reflective_dataset[COMPONENT]]
            question = {"current_instruction_doc": candidate[COMPONENT], "dataset_with_feedback": shown}
            return str(InstructionProposalSignature.prompt_renderer(question))

        reflection = self._wait(reflect(self.teacher, self.records, render, chars=self.config.feedback_chars))
        prompt = InstructionProposalSignature.output_extractor(reflection.answer.strip())["new_instruction"]
        known = [number for number, each in enumerate(self.candidates) if each.prompt == prompt]
        problem = reflection.error or (f"prompt {known[0]} again" if known else None if prompt else "an empty one")
        if problem:
            self.num_unusable += 1
            self.unusable.append(reflection)
            self.show(f"the reflection model gave no new prompt: {problem}")
            return {}
        self.unusable.clear()
        return {COMPONENT: prompt}

    def is_over(self, gepa_state: GEPAState[Any, Any]) -> bool:
        """Decide before each iteration whether it may begin."""
        perfect, cost = self.config.perfect_score, iteration_cost(self.config, self.drawn)
        left = self.config.max_calls - reserve(self.config) - self.calls.total() - self._num_tested
        if len(self.unusable) >= MAX_UNUSABLE:
            self.why = f"{MAX_UNUSABLE} reflections in a row gave no new prompt"
            if len(self.candidates) == 1:
                self.records.forget(self.unusable)
                error = Refused(
                    f"{self.teacher.name} gave no new prompt {MAX_UNUSABLE} times in a row (nothing, or the one that "
                    "it was shown; see gepa.log) - expected one. Name another `--reflection-model`, or give it more "
                    "room: `--reflection-sampling.max-tokens`."
                )
                raise _Stopped(error)
        elif perfect is not None and any(min(each.scores) >= perfect for each in self.candidates):
            self.why = f"every validation example has the highest score, {perfect:g}"
        elif left < cost:
            self.why = f"{left} calls are left, and one more prompt may take {cost}"
        else:
            return False
        return True

    # what the library reports

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        scores = tuple(event["scores_by_val_id"][place] for place in sorted(event["scores_by_val_id"]))
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        new = Candidate(event["candidate"][COMPONENT], parents[0] if parents else None, scores)
        if not self.candidates:
            self.show(f"validation {new.mean:.3f} with the prompt to begin with")
        else:
            best = self.candidates[self.best].mean
            verdict = "the best so far" if new.mean > best else f"the best has {best:.3f}"
            number = len(self.candidates)
            self.show(f"prompt {number}, from prompt {new.parent}: validation {new.mean:.3f}, {verdict}")
        self.candidates.append(new)
        self.on_candidate()

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        size = self.config.minibatch_size
        self.show(
            f"a new prompt was no better on the {size} examples that it was made from: "
            f"{event['old_score'] / size:.3f} -> {event['new_score'] / size:.3f}"
        )

    def on_evaluation_skipped(self, event: Mapping[str, Any]) -> None:
        self.show(f"nothing to learn from {len(event['scores'])} examples that all have the highest score")


def iteration_cost(config: GepaConfig, drawn: Drawn) -> int:
    """Return how many rollouts one more prompt takes at most: two minibatches, and itself on validation."""
    return 2 * config.minibatch_size + len(drawn.validation)


def reserve(config: GepaConfig) -> int:
    """Return how many rollouts are kept for the end: the first prompt and the best one on the test examples."""
    return 2 * config.num_test
