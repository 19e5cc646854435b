"""Rules of `[orchestrator]`: what its tables cannot be, alone, together, or with those of a source over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from trireme.config.orchestrator import Agent, Buffer, Environment, Evaluation, OrchestratorConfig
from trireme.config.rules.sampling import environment_template_kwargs, sampling_problems, samplings, template_problems

NEEDS_SIBLINGS = {"group_mean", "group_mean_std", "leave_one_out", "max_rl", "group_batch"}
"""Advantages that compare a rollout with others of its group."""

OF_A_GROUP = {"group_mean", "group_mean_std", "leave_one_out", "max_rl", "hierarchical_grpo", "none"}
"""Advantages that a group has whatever else is in its batch."""


def orchestrator_problems(config: OrchestratorConfig, *, longest: int) -> Iterator[str]:
    """Yield what is wrong with `[orchestrator]`.

    Args:
        longest: tokens of the longest rollout, for tables that do not give their own.
    """
    if not config.env:
        yield (
            "no environment is configured, so there is nothing to learn - expected at least one. "
            'Add to the file:\n    [[orchestrator.env]]\n    id = "reverse-text"'
        )

    # Each environment writes files under its name, so no two names may give the same file.
    evaluated = config.eval.env if config.eval else ()
    by_file: dict[str, list[str]] = defaultdict(list)
    for table, environments, prefix in (("env", config.env, ""), ("eval.env", evaluated, "eval-")):
        for environment in environments:
            yield from _agent_problems(environment, f"orchestrator.{table}.agent")
            by_file[prefix + environment.file_name].append(f'"{environment.resolved_name}" of `orchestrator.{table}`')
    for file, names in by_file.items():
        if len(names) > 1:
            yield (
                f"the environments {' and '.join(names)} have files of one name, {file} (from `name`, or the last part "
                "of `id`) - expected names that differ, also where blanks and signs become `_` and files of "
                "evaluations begin with `eval-`. Give each table a `name` of its own."
            )

    yield from _group_problems(config)

    # The tables below this one, as each source has them.
    yield from _curriculum_problems(config)
    views = config.sources or {"": config}
    found: dict[str, list[str]] = defaultdict(list)
    for name, view in views.items():
        for problem in _table_problems(view, longest=view.sampling.max_tokens or longest):
            found[problem].append(name)
    for problem, names in found.items():
        of = ", ".join(f'"{name}"' for name in names)
        yield (
            problem
            if len(names) == len(views)
            else f"with the tables of its own, `[[orchestrator.env]]` {of}: {problem}"
        )

    for table, sampling in samplings(config):
        yield from sampling_problems(table, sampling)
    for table, kwargs in environment_template_kwargs(config):
        yield from template_problems(table, {"chat_template_kwargs": kwargs})
    if config.eval:
        views_of_eval = [config.eval.of(each.resolved_name) for each in config.eval.env] or [config.eval]
        yield from dict.fromkeys(
            problem for view in views_of_eval for problem in evaluation_problems(view, "orchestrator.eval.")
        )
        # Evaluation and training share the engines' slots.
        if config.eval.max_concurrent is not None and config.eval.max_concurrent >= config.max_concurrent:
            yield (
                f"orchestrator.eval.max_concurrent = {config.eval.max_concurrent}, orchestrator.max_concurrent = "
                f"{config.max_concurrent} - expected fewer, or training would get no slot while an evaluation runs. "
                f"Set `eval.max_concurrent` below {config.max_concurrent}, or leave it out for a quarter of that."
            )


def _group_problems(config: OrchestratorConfig) -> Iterator[str]:
    """Yield why whole groups cannot fill a batch."""
    batch, sizes = config.batch_size, {name: own.rollouts_per_example for name, own in config.sources.items()}
    group = next(iter(sizes.values()), config.rollouts_per_example)

    # Tokens fill a batch with whole groups of any size.
    if (batch is None) == (config.token_batch_size is None):
        yield (
            f"orchestrator.batch_size = {batch or 'none'} and token_batch_size = {config.token_batch_size or 'none'} - "
            "expected one of the two: a batch ends with so many rollouts, or with so many tokens. Remove one; over a "
            "file that has it, `--orchestrator.batch-size none`."
        )
    if batch is None:
        return

    # Groups of one size fill a batch to the rollout. Of different sizes, the last one may be more than was missing.
    if len(set(sizes.values())) > 1:
        for name, size in sizes.items():
            if size > batch:
                yield (
                    f"orchestrator.batch_size = {batch} with groups of {size} rollouts of environment {name!r} "
                    f"(`rollouts_per_example`) - expected room for one of its groups. Set `orchestrator.batch_size` to "
                    f"{size} or more, or lower its `rollouts_per_example`."
                )
    elif batch % group:
        below, above = batch // group * group, (batch // group + 1) * group
        choices = f"{below} or {above}" if below else f"{above}"
        yield (
            f"batch_size must be divisible by rollouts_per_example: {batch} % {group} = {batch % group} - expected 0. "
            f"Set `orchestrator.batch_size` to {choices}, or `orchestrator.rollouts_per_example` to one of "
            f"{', '.join(map(str, nearest_divisors(batch, group)))}."
        )


def _table_problems(config: OrchestratorConfig, *, longest: int) -> Iterator[str]:
    """Yield what is wrong with the tables that a source may have too."""
    yield from _buffer_problems(config.buffer)
    yield from _advantage_problems(config)
    teacher = config.teacher
    if teacher is not None and not (teacher.base_url or teacher.demonstration):
        yield (
            "`[orchestrator.teacher]` without `base_url` - expected the address of its vLLM server, or a "
            '`demonstration` with which the policy is its own. Add `base_url = "http://127.0.0.1:8100/v1"`, or remove '
            "the table (`weight = 0` for one source)."
        )
    shows = teacher is not None and teacher.demonstration is not None
    if teacher and shows and (teacher.base_url or teacher.samples or "{demonstration}" not in teacher.template):
        yield (
            f'orchestrator.teacher.demonstration = "{teacher.demonstration}" with base_url = {teacher.base_url}, '
            f"samples = {teacher.samples}, template = {teacher.template!r} - expected neither of the first two, as "
            "the policy itself is the teacher then, and `{demonstration}` in the template. Correct these."
        )

    penalty = config.length_penalty
    unused = {"echo": config.echo is not None, "length_penalty": penalty is not None and penalty.weight > 0}
    for name in [name for name, is_given in unused.items() if is_given and config.teacher and config.teacher.samples]:
        yield (
            f"`[orchestrator.{name}]` with `teacher.samples` - expected none, as cross-entropy trains what the teacher "
            "says, whatever its reward, and nothing else. Remove it; a source switches the run's off with weights of 0."
        )
    if config.echo and config.trajectory_strategy == "branching":
        yield (
            '`[orchestrator.echo]` with `trajectory_strategy = "branching"` - expected "interleaved": only a '
            "conversation that continues in one sample shows what is new in it. Change it, or remove the table."
        )

    # The penalty begins `buffer` tokens before the limit, which must not be below 0.
    if penalty and penalty.buffer and penalty.buffer > (longest := penalty.max_length or longest):
        yield (
            f"orchestrator.length_penalty.buffer = {penalty.buffer}, max_length = {longest} - expected no more, "
            "or even an empty answer would be punished. Lower `buffer`."
        )


OF_PROGRAMS = ("command", "env", "inherit", "workdir", "stdin", "runtime", "readable", "network", "timeout_s")
"""Keys of `[orchestrator.env.agent]` that say how a program is run."""


def _agent_problems(environment: Environment, table: str) -> Iterator[str]:
    agent, limit_s = environment.agent, environment.rollout_timeout_s
    of = f"of environment {environment.resolved_name!r}"
    if agent is None:
        return

    # A program that the orchestrator starts must be named, and must end before its rollout is dropped.
    if not agent.external and not agent.command:
        yield (
            f"{table} {of} has no `command` - expected a program that plays the rollouts. Add `command`, or "
            "`external = true` and a `port` for clients of your own harness."
        )
    if not agent.external and agent.timeout_s >= limit_s:
        yield (
            f"{table}.timeout_s = {agent.timeout_s:g} with `rollout_timeout_s = {limit_s:g}` {of} - expected less: the "
            "rollout would be dropped before the program is ended and scored. Lower the first, or raise the second."
        )

    # The user's own clients play the rollouts, so no program is started and keys about one have no effect.
    given = [name for name in OF_PROGRAMS if getattr(agent, name) != Agent.model_fields[name].default]
    if agent.external and given:
        yield (
            f"{table} {of} has `external = true` and a `{given[0]}` ({getattr(agent, given[0])!r}) - expected none, as "
            "Trireme starts no program where clients of your own play the rollouts. Remove one."
        )
    if agent.external and not agent.port:
        yield (
            f"{table} {of} has `external = true` and no `port` - expected a fixed one, as your clients must find the "
            "gateway again after a restart. Add `port = 8090`, or another that is free."
        )


def nearest_divisors(number: int, near: int) -> list[int]:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - near))[:2])


def _curriculum_problems(config: OrchestratorConfig) -> Iterator[str]:
    table, names = "`[[orchestrator.curriculum]]`", {entry.resolved_name for entry in config.env}
    for number, stage in enumerate(config.curriculum):
        what = f"stage {number} of {table} (counted from 0)"
        conditions = {"from_step": stage.from_step, "from_reward": stage.from_reward}
        given = [f"`{key} = {value}`" for key, value in conditions.items() if value is not None]

        # The first stage begins with the run; each later one has exactly one condition.
        if len(given) != min(number, 1):
            expected = "one of the two" if number else "none of the two, as the first stage begins with the run"
            yield (
                f"{what} has {' and '.join(given) or 'neither `from_step` nor `from_reward`'} - expected {expected}. "
                f"{'Remove' if given else 'Add'} one."
            )

        if unknown := sorted(stage.weights.keys() - names):
            yield (
                f"{what} gives a weight to {', '.join(unknown)} - expected names of `[[orchestrator.env]]`: "
                f"{', '.join(sorted(names)) or 'none is configured'}. Correct the name, or add that environment."
            )
        if not any(weight > 0 for name, weight in stage.weights.items() if name in names):
            yield f"{what} gives no environment any weight ({stage.weights}) - expected one above 0. Give one."

    # Stages follow one another, so a later one with an earlier step would never begin in time.
    steps = [stage.from_step for stage in config.curriculum if stage.from_step is not None]
    for one, other in pairwise(steps):
        if other <= one:
            yield (
                f"{table}: a stage from step {one} is followed by one from step {other} - expected later ones to "
                "begin later. Put them in order."
            )


def _buffer_problems(buffer: Buffer) -> Iterator[str]:
    pools = buffer.pools
    if pools and pools.easy_threshold <= pools.hard_threshold:
        yield (
            f"orchestrator.buffer.pools: easy_threshold = {pools.easy_threshold}, hard_threshold = "
            f"{pools.hard_threshold} - expected the first to be higher, or an example would be both. Exchange them."
        )
    if buffer.use_difficulty_filtering != (buffer.difficulty_threshold > 0):
        has = "with" if buffer.use_difficulty_filtering else "without"
        yield (
            f"orchestrator.buffer.difficulty_threshold = {buffer.difficulty_threshold:g} {has} "
            "`use_difficulty_filtering` - expected both, as either has no effect alone. Set the least variance that a "
            "group's rewards must have (`difficulty_threshold = 0.01`, say) and `use_difficulty_filtering = true`, or "
            "use `online_difficulty_filtering`, which only drops groups whose rewards are all equal."
        )


def _advantage_problems(config: OrchestratorConfig) -> Iterator[str]:
    advantage = config.advantage

    # A group of one has no sibling to be compared with, unless a teacher gives the advantages.
    if config.rollouts_per_example == 1 and advantage.type in NEEDS_SIBLINGS and config.teacher is None:
        yield (
            f'orchestrator.advantage.type = "{advantage.type}" with orchestrator.rollouts_per_example = 1 - expected '
            "at least 2 rollouts to compare with one another. Raise `rollouts_per_example`, or take "
            '`advantage.type = "batch"`, "ema" or "none".'
        )

    # Keys that belong to one type.
    if (advantage.type == "custom") != bool(advantage.path):
        has = f'with `path = "{advantage.path}"`' if advantage.path else "without `path`"
        yield (
            f'orchestrator.advantage.type = "{advantage.type}" {has} - expected `type = "custom"` and the path of its '
            'function, or neither. Add `path = "file.py:function"`, or remove the one that is there.'
        )
    if (advantage.type == "hierarchical_grpo") != bool(advantage.episode_agents):
        yield (
            f'orchestrator.advantage.type = "{advantage.type}" with episode_agents = '
            f'{list(advantage.episode_agents)} - expected `type = "hierarchical_grpo"` and the agents that are '
            'compared within one rollout, or neither. Add `episode_agents = ["solver"]`, or remove the line.'
        )

    # The range is applied to each group as it ends.
    if (rejected := config.buffer.advantage_range) is not None:
        if advantage.type not in OF_A_GROUP:
            yield (
                f'orchestrator.buffer.advantage_range with orchestrator.advantage.type = "{advantage.type}" - expected '
                "an advantage that is known before the batch is full. Remove the range, or take one of "
                f"{', '.join(sorted(OF_A_GROUP))}."
            )
        if not rejected[0] <= rejected[1]:
            yield f"orchestrator.buffer.advantage_range = {list(rejected)} - expected the lower end first. Swap them."

    clip = advantage.reward_clip
    if clip is not None and not clip[0] < clip[1]:  # NaN too
        yield f"orchestrator.advantage.reward_clip = {list(clip)} - expected the lower end first. Exchange them."


def evaluation_problems(evaluation: Evaluation, above: str = "") -> Iterator[str]:
    """Yield what an evaluation, in a run or outside one, would measure wrongly or for nothing.

    Args:
        above: the table that has its keys, with a dot, for messages.
    """
    rollouts, ks = evaluation.rollouts_per_example, evaluation.pass_at
    if too_large := [k for k in ks if k > rollouts]:
        yield (
            f"{above}pass_at = {list(ks)}, {above}rollouts_per_example = {rollouts} - pass@{too_large[0]} takes at "
            f"least {too_large[0]} rollouts of each example, better twice as many. Set `rollouts_per_example` to "
            f"{max(too_large)} or more, or leave {too_large} out of `pass_at`."
        )
    if len(set(ks)) < len(ks):
        yield f"{above}pass_at = {list(ks)} names a k twice - expected each once. Remove the second."

    if rollouts > 1 and evaluation.sampling.temperature == 0:
        yield (
            f"{above}rollouts_per_example = {rollouts} with {above}sampling.temperature = 0 - expected a temperature "
            "above 0: greedy rollouts of an example would all be the same. Set "
            f"`[{above}sampling]` `temperature = 1.0` (the policy as it is trained), or `rollouts_per_example = 1`."
        )
