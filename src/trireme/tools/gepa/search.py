"""The adapter between the library `gepa`, which searches (genetic, reflective, Pareto), and our rollouts.

Two rules are ours. The budget is never exceeded: the library checks it only between its iterations, so an iteration
begins only where all that it may cost is left. An answer of the reflection model that is empty, unchanged or known
costs no rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import gepa
from gepa.core.adapter import EvaluationBatch
from gepa.core.state import GEPAState
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from trireme.base.errors import Refused
from trireme.base.waiting import Waits
from trireme.journal.records import Rollout
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import RolloutOutcome, run_rollouts
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.tools.environments.policy import RolloutPolicy
from trireme.tools.environments.progress import Progress
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.prompts import PromptedEnvironment
from trireme.tools.gepa.records import PURPOSES, Drawn, Example, PromptRollout, Records, Reflection, name_of
from trireme.tools.gepa.reflection import feedback_on, has_column, reflect
from trireme.tools.gepa.results import LOG, Candidate, best_of, write_candidates, write_metadata

COMPONENT = "system_prompt"
MAX_UNUSABLE = 5
"""Reflections in a row without a new prompt after which the search ends, with what it has."""
SHOW_EVERY_S = 10.0

Batch = EvaluationBatch[PromptRollout, PromptRollout]
Value = TypeVar("Value")


class _Stopped(BaseException):
    """Ends the library's thread with an error. The library would catch an `Exception` in a reflection, and continue."""


@dataclass
class Search:
    """One search. The library calls its methods in a thread; rollouts and reflections run in the event loop."""

    config: GepaConfig
    folder: Path
    environment: Environment
    policy: RolloutPolicy
    teacher: RolloutPolicy
    drawn: Drawn
    facts: dict[str, Any]  # of the environment, for `metadata.json`; with the prompt to begin with
    rollouts: Records[PromptRollout]
    reflections: Records[Reflection]
    progress: Progress
    waits: Waits
    candidates: list[Candidate] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # rollouts so far, by purpose
    _why: str = "under way"
    _num_unusable: int = 0
    _unusable: list[Reflection] = field(default_factory=list)  # since the last new prompt
    _began: float = field(default_factory=time.monotonic)
    _shown_at: float = field(default_factory=time.monotonic)
    _is_stopped: bool = False
    _pending: Future[Any] | None = None

    async def run(self) -> dict[str, Any]:
        """Search until the budget is spent, and return the summary. Where this is cancelled, the library's thread ends
        first.

        Raises: the error of a model or the environment after which no other rollout could go better.
        """
        self._loop = asyncio.get_running_loop()
        # Rollouts of an earlier test at the end are spent, but were not yet when the search before it was made: its
        # replay has the budget that it had, or it would end without a prompt that it found.
        tested = [line for line in self.rollouts.lines.values() if line.purpose == "test"]
        self._num_tested = sum(line.prompt_name != name_of(self.facts["first_prompt"]) for line in tested)
        self._num_replayed = len(self.rollouts.lines) - len(tested)
        write_metadata(self.folder, self.config, self.facts, {"state": "under way"})
        showing = asyncio.create_task(self._show_waits())
        working = self._loop.run_in_executor(None, self._optimize)
        try:
            await asyncio.shield(working)
            held_out = await self._measure_held_out() if self.drawn.test else None
        except BaseException as error:
            self._is_stopped = True
            if self._pending is not None:
                self._pending.cancel()
            await asyncio.wait([working])
            working.exception()  # marks it as retrieved
            if self.candidates:
                self._write("stopped")
            if isinstance(error, _Stopped):
                raise error.args[0] from None
            raise
        finally:
            showing.cancel()
        return self._write("finished", held_out)

    def _optimize(self) -> None:
        perfect = self.config.perfect_score
        with open(self.folder / LOG, "a", encoding="utf-8") as file:

            class Log:
                def log(self, message: str) -> None:
                    file.write(f"{message}\n")
                    file.flush()

            gepa.optimize(
                seed_candidate={COMPONENT: self.facts["first_prompt"]},
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
        self._pending = future = asyncio.run_coroutine_threadsafe(question, self._loop)
        if self._is_stopped:
            future.cancel()
        try:
            return future.result()
        except Exception as error:
            raise _Stopped(error) from error

    async def _try_prompt(self, prompt: str, examples: Sequence[Example]) -> list[PromptRollout]:
        """Roll out a prompt once on each example, and return one line per example, in order. Recorded ones are reused.

        Raises: TriremeError where no other rollout could go better: the key is wrong, the engine is gone.
        """
        name = name_of(prompt)
        keys = [(name, example, self.rollouts.next_time((name, example))) for example in examples]
        wanted: dict[RolloutSpec, tuple[Example, PromptedEnvironment]] = {}
        for _, example, nth in keys:
            if (name, example, nth) in self.rollouts.lines:
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
            self.rollouts.add(PromptRollout.of(outcome, **more))
            self.calls[example.purpose] += 1

        await run_rollouts(list(wanted), roll_out, record, scored_together=False)
        return [self.rollouts.lines[key] for key in keys]

    async def _measure_held_out(self) -> dict[str, Any]:
        """Score the first and the best prompt on the test examples. Only these figures are unbiased: no choice was
        made by them.
        """
        examples = self.drawn.test
        self._show(f"measuring on {len(examples)} examples that nothing has seen")
        means = []
        for number in sorted({0, best_of(self.candidates)}):
            scored = await self._try_prompt(self.candidates[number].prompt, examples)
            means.append(sum(line.score for line in scored) / len(scored))
        return {"before": means[0], "after": means[-1], "num_examples": len(examples)}

    def _write(self, state: str, held_out: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write what was found so far, and return the summary."""
        write_candidates(self.folder, self.config, self.candidates, self.drawn)
        best, rollouts = best_of(self.candidates), self.rollouts.lines
        before, after = self.candidates[0].mean, self.candidates[best].mean
        summary = {
            "state": state,
            "why": self._why,
            "calls": {"total": len(rollouts)} | {purpose: self.calls[purpose] for purpose in PURPOSES},
            "num_failed": sum(line.error is not None for line in rollouts.values()),
            "num_reflections": len(self.reflections.lines),
            "num_unusable_reflections": self._num_unusable,
            "unusable": [each.key for each in self._unusable],  # since the last new prompt
            "num_prompts": len(self.candidates),
            "best": best,
            "validation": {"before": before, "after": after, "num_examples": len(self.drawn.validation)},
            "held_out": held_out,
            "num_train": len(self.drawn.train),
            "seconds": round(time.monotonic() - self._began, 1),
            "policy": self.policy.name,
            "teacher": self.teacher.name,
        }
        write_metadata(self.folder, self.config, self.facts, summary)
        return summary

    def _show(self, words: str) -> None:
        self._shown_at = time.monotonic()
        self.progress.show(f"[{self.calls.total()}/{self.config.max_calls}] {words}")

    async def _show_waits(self) -> None:
        """Show what is waited for whenever nothing else was shown for a while."""
        while True:
            await asyncio.sleep(max(0.1, self._shown_at + SHOW_EVERY_S - time.monotonic()))
            if time.monotonic() - self._shown_at >= SHOW_EVERY_S:
                waits = self.waits.now()
                more = f", and {len(waits) - 1} like it" if len(waits) > 1 else ""
                self._show(f"{waits[0]}{more}" if waits else "rollouts under way")

    # what the library asks of an adapter

    def evaluate(self, batch: list[Example], candidate: dict[str, str], capture_traces: bool = False) -> Batch:
        lines = self._wait(self._try_prompt(candidate[COMPONENT], batch))
        if not self.candidates and all(line.error is not None for line in lines):
            self.rollouts.forget(lines)
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

        reflection = self._wait(reflect(self.teacher, self.reflections, render, chars=self.config.feedback_chars))
        prompt = InstructionProposalSignature.output_extractor(reflection.answer.strip())["new_instruction"]
        known = [number for number, each in enumerate(self.candidates) if each.prompt == prompt]
        problem = reflection.error or (f"prompt {known[0]} again" if known else None if prompt else "an empty one")
        if problem:
            self._num_unusable += 1
            self._unusable.append(reflection)
            self._show(f"the reflection model gave no new prompt: {problem}")
            return {}
        self._unusable.clear()
        return {COMPONENT: prompt}

    def is_over(self, gepa_state: GEPAState[Any, Any]) -> bool:
        """Decide before each iteration whether it may begin."""
        perfect, cost = self.config.perfect_score, iteration_cost(self.config, self.drawn)
        calls = self.calls.total()
        spent = calls + (self._num_tested if calls >= self._num_replayed else 0)
        left = max(0, self.config.max_calls - 2 * self.config.num_test - spent)
        if len(self._unusable) >= MAX_UNUSABLE:
            self._why = f"{MAX_UNUSABLE} reflections in a row gave no new prompt"
            if len(self.candidates) == 1:
                self.reflections.forget(self._unusable)
                error = Refused(
                    f"{self.teacher.name} gave no new prompt {MAX_UNUSABLE} times in a row (nothing, or the one that "
                    "it was shown; see gepa.log) - expected one. Name another `--reflection-model`, or give it more "
                    "room: `--reflection-sampling.max-tokens`."
                )
                raise _Stopped(error)
        elif perfect is not None and any(min(each.scores) >= perfect for each in self.candidates):
            self._why = f"every validation example has the highest score, {perfect:g}"
        elif left < cost:
            self._why = f"{left} calls are left, and one more prompt may take {cost}"
        else:
            return False
        return True

    # what the library reports

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        scores = tuple(event["scores_by_val_id"][place] for place in sorted(event["scores_by_val_id"]))
        parent = next((parent for parent in event["parent_ids"] if parent is not None), None)
        new = Candidate(event["candidate"][COMPONENT], parent, scores)
        is_first, number = not self.candidates, len(self.candidates)
        if is_first:
            self._show(f"validation {new.mean:.3f} with the prompt to begin with")
        else:
            best = self.candidates[best_of(self.candidates)].mean
            verdict = "the best so far" if new.mean > best else f"the best has {best:.3f}"
            self._show(f"prompt {number}, from prompt {parent}: validation {new.mean:.3f}, {verdict}")
        self.candidates.append(new)
        self._write("under way")
        scored = [line for line in self.rollouts.lines.values() if line.error is None]
        for name in self.config.state_columns if is_first and scored else ():
            if not any(has_column(line, name) for line in scored):
                keys = ", ".join(next((line.state_keys for line in scored if line.state_keys), []))
                self.progress.show(f"--state-columns {name}: no rollout had one. The environment's state has: {keys}")

    def on_candidate_rejected(self, event: Mapping[str, Any]) -> None:
        size = self.config.minibatch_size
        self._show(
            f"a new prompt was no better on the {size} examples that it was made from: "
            f"{event['old_score'] / size:.3f} -> {event['new_score'] / size:.3f}"
        )

    def on_evaluation_skipped(self, event: Mapping[str, Any]) -> None:
        self._show(f"nothing to learn from {len(event['scores'])} examples that all have the highest score")


def iteration_cost(config: GepaConfig, drawn: Drawn) -> int:
    """Return how many rollouts one more prompt takes at most: two minibatches, and itself on validation."""
    return 2 * config.minibatch_size + len(drawn.validation)
