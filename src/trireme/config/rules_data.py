"""Rules about what is trained on: advantages, difficulty pools, the curriculum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from trireme.base.devices import Devices
from trireme.base.functions import function_problem
from trireme.config.files import ProcessName
from trireme.config.orchestrator import Stage
from trireme.config.run import RunConfig

Rule = Callable[[RunConfig, Devices], Iterator[str]]

_COMMANDS: tuple[ProcessName | None, ...] = (None, "orchestrator")

NEEDS_SIBLINGS = {"group_mean", "group_mean_std", "leave_one_out", "max_rl", "group_batch"}
"""Advantages that compare a rollout with others of its group."""


def _stages_can_begin(config: RunConfig, _: Devices) -> Iterator[str]:
    for number, stage in enumerate(config.orchestrator.curriculum):
        given = [key for key in ("from_step", "from_reward") if getattr(stage, key) is not None]
        if number == 0 and given:
            yield (
                f"the first `[[orchestrator.curriculum]]` has `{given[0]} = {getattr(stage, given[0])}` - expected no "
                f"condition: it begins with the run. Remove `{given[0]}`."
            )
        elif number and len(given) != 1:
            found = (
                f"both `from_step = {stage.from_step}` and `from_reward = {stage.from_reward}`" if given else "neither"
            )
            yield (
                f"stage {number} of `[[orchestrator.curriculum]]` (counted from 0) has {found} - expected one of "
                "`from_step` and `from_reward`. " + ("Remove one." if given else "Say from when on it holds.")
            )


def _stages_come_in_order(config: RunConfig, _: Devices) -> Iterator[str]:
    steps = [stage.from_step for stage in config.orchestrator.curriculum if stage.from_step is not None]
    for one, other in pairwise(steps):
        if other <= one:
            yield (
                f"`[[orchestrator.curriculum]]`: a stage from step {one} is followed by one from step {other} - "
                "expected later ones to begin later. Put them in order."
            )


def _stages_draw_from_environments(config: RunConfig, _: Devices) -> Iterator[str]:
    names = {entry.name or entry.id for entry in config.orchestrator.env}
    for number, stage in enumerate(config.orchestrator.curriculum):
        yield from _check_weights(stage, f"stage {number} of `[[orchestrator.curriculum]]` (counted from 0)", names)


def _check_weights(stage: Stage, what: str, names: set[str]) -> Iterator[str]:
    if unknown := sorted(stage.weights.keys() - names):
        yield (
            f"{what} gives a weight to {', '.join(unknown)} - expected names of `[[orchestrator.env]]`: "
            f"{', '.join(sorted(names)) or 'none is configured'}. Correct the name, or add that environment."
        )
    if not any(weight > 0 for name, weight in stage.weights.items() if name in names):
        yield (
            f"{what} gives no environment any weight ({stage.weights}) - expected one above 0 at least, or there "
            "would be nothing to draw from. Give one."
        )


def _pools_leave_something(config: RunConfig, _: Devices) -> Iterator[str]:
    pools = config.orchestrator.buffer.pools
    if pools is None:
        return
    if pools.easy_threshold <= pools.hard_threshold:
        yield (
            f"orchestrator.buffer.pools: easy_threshold = {pools.easy_threshold}, hard_threshold = "
            f"{pools.hard_threshold} - expected the easy one to be higher, or an example would be both. Exchange them."
        )
    if pools.normal_weight <= 0:
        yield (
            f"orchestrator.buffer.pools.normal_weight = {pools.normal_weight} - expected more than 0: what was never "
            "seen is normal, so no example would ever come. Give it a weight; 1.0 is the default."
        )


def _advantage_has_something_to_compare(config: RunConfig, _: Devices) -> Iterator[str]:
    kind, size = config.orchestrator.advantage.type, config.orchestrator.rollouts_per_example
    if size == 1 and kind in NEEDS_SIBLINGS and config.orchestrator.teacher is None:
        yield (
            f'orchestrator.advantage.type = "{kind}" with orchestrator.rollouts_per_example = 1 - expected at least 2 '
            "rollouts to compare with one another. Raise `rollouts_per_example`, or take "
            '`advantage.type = "batch"`, "ema" or "none".'
        )


def _custom_advantage_has_its_path(config: RunConfig, _: Devices) -> Iterator[str]:
    advantage = config.orchestrator.advantage
    if advantage.type == "custom" and not advantage.path:
        yield (
            'orchestrator.advantage.type = "custom" without `path` - expected the function\'s. '
            'Add `path = "module:function"` or "file.py:function".'
        )
    elif advantage.type != "custom" and advantage.path:
        yield (
            f'orchestrator.advantage.path = "{advantage.path}" with `type = "{advantage.type}"` - expected `type = '
            '"custom"`, or the function would never be called. Write that, or remove `path`.'
        )


def _clips_are_ranges(config: RunConfig, _: Devices) -> Iterator[str]:
    clip = config.orchestrator.advantage.reward_clip
    if clip is not None and clip[0] >= clip[1]:
        yield (
            f"orchestrator.advantage.reward_clip = {list(clip)} - expected the lower end first, and room between the "
            "two. Write them the other way round."
        )


def _length_penalty_has_room(config: RunConfig, _: Devices) -> Iterator[str]:
    penalty = config.orchestrator.length_penalty
    if penalty is None or penalty.buffer is None:
        return
    longest = penalty.max_length or config.orchestrator.sampling.max_tokens or config.seq_len
    if penalty.buffer > longest:
        yield (
            f"orchestrator.length_penalty.buffer = {penalty.buffer} is more than its max_length = {longest} - expected "
            "at most as much, or even an empty answer would be punished. Lower `buffer`."
        )


def _threshold_is_used(config: RunConfig, _: Devices) -> Iterator[str]:
    buffer = config.orchestrator.buffer
    if buffer.use_difficulty_filtering and buffer.difficulty_threshold == 0:
        yield (
            "orchestrator.buffer.use_difficulty_filtering = true with difficulty_threshold = 0 - expected the least "
            "variance that a group's rewards must have. Set `difficulty_threshold` (0.01, say), or use "
            "`online_difficulty_filtering`, which only drops groups whose rewards are all equal."
        )
    if buffer.difficulty_threshold > 0 and not buffer.use_difficulty_filtering:
        yield (
            f"orchestrator.buffer.difficulty_threshold = {buffer.difficulty_threshold} without "
            "`use_difficulty_filtering` - expected both, or it has no effect. Set `use_difficulty_filtering = true`, "
            "or remove it."
        )


def _custom_advantage_exists(config: RunConfig, _: Devices) -> Iterator[str]:
    advantage = config.orchestrator.advantage
    if advantage.type == "custom" and advantage.path:
        problem = function_problem(advantage.path, key="orchestrator.advantage.path")
        yield from [problem] if problem else []


RULES: tuple[tuple[Rule, tuple[ProcessName | None, ...]], ...] = tuple(
    (rule, _COMMANDS)
    for rule in (
        _stages_can_begin,
        _stages_come_in_order,
        _stages_draw_from_environments,
        _pools_leave_something,
        _advantage_has_something_to_compare,
        _custom_advantage_has_its_path,
        _clips_are_ranges,
        _length_penalty_has_room,
        _threshold_is_used,
    )
)

LAUNCH_RULES: tuple[tuple[Rule, tuple[ProcessName | None, ...]], ...] = ((_custom_advantage_exists, _COMMANDS),)
