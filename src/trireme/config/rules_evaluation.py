"""Rules of evaluations, in a run and outside one: what would be measured wrongly, or for nothing, is refused first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.orchestrator import Evaluation
from trireme.config.run import RunConfig


def measures(evaluation: Evaluation, above: str = "") -> Iterator[str]:
    """What is wrong with what is asked for.

    Args:
        above: the table that has its keys, with a dot, for messages.
    """
    yield from _pass_at(evaluation, above)
    yield from _threshold(evaluation, above)
    yield from _answers_differ(evaluation, above)


def _pass_at(evaluation: Evaluation, above: str) -> Iterator[str]:
    rollouts = evaluation.rollouts_per_example
    if too_large := [k for k in evaluation.pass_at if k > rollouts]:
        yield (
            f"{above}pass_at = {list(evaluation.pass_at)}, {above}rollouts_per_example = "
            f"{rollouts} - pass@{too_large[0]} takes at least {too_large[0]} rollouts of each example, better twice as "
            f"many. Set `rollouts_per_example` to {max(too_large)} or more, or leave {too_large} out of `pass_at`."
        )
    if len(set(evaluation.pass_at)) < len(evaluation.pass_at):
        yield (f"{above}pass_at = {list(evaluation.pass_at)} names a k twice - expected each once. Remove the second.")


def _threshold(evaluation: Evaluation, above: str) -> Iterator[str]:
    if not math.isfinite(evaluation.pass_threshold):
        yield (
            f"{above}pass_threshold = {evaluation.pass_threshold} - expected a finite reward, from which on "
            "an answer has passed. Set the one that a right answer gets, 1.0 mostly."
        )


def _answers_differ(evaluation: Evaluation, above: str) -> Iterator[str]:
    """Greedy decoding gives the same answer each time."""
    if evaluation.rollouts_per_example > 1 and evaluation.sampling.temperature == 0:
        yield (
            f"{above}rollouts_per_example = {evaluation.rollouts_per_example} with "
            f"{above}sampling.temperature = 0 - the rollouts of an example would all be the same, so avg@k "
            "and pass@k would say no more than one of them. Set "
            f"`[{above}sampling]` `temperature = 1.0` (the policy as it is trained), or `rollouts_per_example = 1`."
        )


def _places(evaluation: Evaluation, config: RunConfig) -> Iterator[str]:
    places, engines = evaluation.max_concurrent, config.orchestrator.max_concurrent
    if places is not None and places >= engines:
        yield (
            f"orchestrator.eval.max_concurrent = {places}, orchestrator.max_concurrent = {engines} - training would "
            "get no place at the engines while an evaluation runs. "
            f"Set `eval.max_concurrent` below {engines}, or leave it out: a quarter of that is taken."
        )


def _evaluation_says_something(config: RunConfig, _: Devices) -> Iterator[str]:
    evaluation = config.orchestrator.eval
    if evaluation is not None:
        yield from measures(evaluation, "orchestrator.eval.")
        yield from _places(evaluation, config)


_ORCHESTRATES: tuple[ProcessName | None, ...] = (None, "orchestrator")

RULES = ((_evaluation_says_something, _ORCHESTRATES),)
