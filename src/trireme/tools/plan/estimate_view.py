"""A plan for people, and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trireme.tools.plan.advice import Advice
from trireme.tools.plan.estimate import Estimate
from trireme.tools.plan.memory import GIB
from trireme.tools.plan.pace import Split, better_split

MOMENTS = {
    "head": "at the head",
    "first layer backward": "in the backward pass of the first layers",
    "last layer backward": "at the end of the backward pass",
    "embedding backward": "at the embedding's gradient",
    "update": "in the optimizer",
    "publish": "while weights are sent",
}


def show(estimate: Estimate, advice: Advice) -> RenderableType:
    blocks: list[RenderableType] = [*_facts(estimate), Text(), _memory(estimate)]
    blocks += [Text(line) for line in _memory_notes(estimate)]
    if len(splits := _interesting(estimate)) > 1:
        blocks += [Text(), _splits(estimate, splits)]
    blocks += [Text(), *(Text(line) for line in _pace_lines(estimate)), Text(), *_verdict(estimate, advice)]
    return Group(*blocks)


def _facts(estimate: Estimate) -> Iterator[Text]:
    batch, model = estimate.batch, estimate.training.model
    for title, line in (
        ("model", _model_line(estimate)),
        ("machine", _machine_line(estimate)),
        ("batch", _batch_line(estimate)),
        ("rows", _rows_line(estimate)),
        ("run", _run_line(estimate)),
    ):
        yield Text.assemble((f"{title:9}", "bold"), line)
    if not estimate.sized.is_exact:
        yield Text(f"{'':9}its family ({model.model_type or 'unnamed'}) is not known: counted as Llama's", "yellow")
    assert batch.rows >= 1


def _model_line(estimate: Estimate) -> str:
    model, training = estimate.training.model, estimate.training
    active = "" if model.num_parameters < 2 * model.active_parameters else f", {_count(model.active_parameters)} active"
    trained = "all trained" if not training.frozen else f"{_count(training.trained)} trained"
    return f"{estimate.sized.name}: {_count(model.num_parameters)} parameters{active}, {trained}"


def _machine_line(estimate: Estimate) -> str:
    machine = estimate.machine
    memory = f"{machine.memory / GIB:,.0f} GiB"
    if machine.is_on_cpu:
        return f"{machine.cores} cores, {memory}; trainer on {estimate.ranks} rank(s)"
    if estimate.serving is None:
        return f"{estimate.trainer_gpus} x {machine.chip.name} of {memory}"
    shared = " (the same)" if estimate.is_shared else ""
    return (
        f"{machine.num_gpus} x {machine.chip.name} of {memory}: {estimate.engine_gpus} for engines (tp "
        f"{estimate.serving.tp}), {estimate.trainer_gpus} for the trainer{shared}"
    )


def _batch_line(estimate: Estimate) -> str:
    batch = estimate.batch
    what = f"{batch.rollouts} rollouts in {batch.groups} groups" if batch.groups else f"{batch.rollouts} samples"
    return f"{what}, {_count(batch.tokens)} tokens ({batch.length:,.0f} each: {batch.source})"


def _rows_line(estimate: Estimate) -> str:
    batch = estimate.batch
    who = "rank" if batch.teams == estimate.ranks else f"team of {estimate.ranks // batch.teams} ranks"
    return f"{batch.rows} of {batch.row_tokens:,} tokens for each {who} per update"


def _run_line(estimate: Estimate) -> str:
    batch = estimate.batch
    updates = f"{batch.steps:,} steps, {batch.steps * batch.iterations:,} optimizer steps"
    if batch.epochs is None:
        return updates
    return f"{updates}; {batch.epochs:,.2f} passes over {batch.examples:,} examples"


# memory


def _memory(estimate: Estimate) -> Table:
    on_cpu = estimate.machine.is_on_cpu
    table = Table(title=f"GiB {'per rank' if on_cpu else 'per GPU'}, by part", title_justify="left")
    table.add_column("trainer")
    table.add_column("GiB", justify="right")
    if estimate.serving:
        table.add_column("engine")
        table.add_column("GiB", justify="right")
    for row in _side_by_side(_trainer_rows(estimate), _engine_rows(estimate) if estimate.serving else None):
        table.add_row(*row)
    table.add_section()
    table.add_row(*_totals(estimate))
    return table


def _trainer_rows(estimate: Estimate) -> list[tuple[str, float]]:
    parts = [(name, number) for name, number in estimate.training.memory.parts.items() if number > 0.0005 * GIB]
    return [*parts, ("allocator", estimate.scattered), ("process", estimate.beside)]


def _engine_rows(estimate: Estimate) -> list[tuple[str, float]]:
    assert estimate.serving is not None
    return [*estimate.serving.parts.items(), ("KV cache", max(0.0, estimate.serving.room))]


def _side_by_side(left: list[tuple[str, float]], right: list[tuple[str, float]] | None) -> Iterator[tuple[str, ...]]:
    for number in range(max(len(left), len(right or ()))):
        yield (*_cells(left, number), *(_cells(right, number) if right is not None else ()))


def _cells(rows: list[tuple[str, float]], number: int) -> tuple[str, str]:
    return (rows[number][0], _two(rows[number][1])) if number < len(rows) else ("", "")


def _totals(estimate: Estimate) -> tuple[str, ...]:
    trainer = ("of", f"{_two(estimate.trainer_bytes)} / {_two(estimate.trainer_room)}")
    if estimate.serving is None:
        return trainer
    return (*trainer, "of", f"{_two(estimate.engine_bytes)} / {_two(estimate.machine.memory)}")


def _memory_notes(estimate: Estimate) -> Iterator[str]:
    memory = estimate.training.memory
    others = sorted((sum(parts.values()), name) for name, parts in memory.moments.items() if name != memory.fullest)
    total, name = others[-1]
    yield (
        f"The trainer's parts are those {MOMENTS[memory.fullest]}, where they are most; "
        f"{MOMENTS[name]} they are {_two(total)} GiB."
    )
    if memory.host:
        host = ", ".join(f"{name} {_two(number)}" for name, number in memory.host.items())
        yield f"In its machine's own memory, of each rank: {host} GiB" + _node(estimate)
    if estimate.serving:
        yield (
            f"The KV cache holds {estimate.serving.num_tokens:,} tokens: {estimate.serving.num_requests:,.1f} requests "
            f"of {estimate.serving.max_model_len:,} at once."
        )


def _node(estimate: Estimate) -> str:
    if estimate.machine.is_on_cpu:
        return "."
    return f"; of a node, all told, {_two(estimate.host_bytes)} of {_two(estimate.machine.host_memory)}."


# time


def _interesting(estimate: Estimate) -> list[Split]:
    return sorted(estimate.splits, key=lambda split: split.step_s)[:8]


def _splits(estimate: Estimate, splits: list[Split]) -> Table:
    """The shortest steps first; the one that is configured is marked."""
    how = "one after the other" if estimate.synchronous else "both at once"
    table = Table(title=f"Splits of {estimate.machine.num_gpus} GPUs ({how})", title_justify="left")
    for title in ("engines", "trainer", "sampling s", "training s", "step s", "engines idle", "trainer idle", ""):
        table.add_column(title, justify="right" if title else "left")
    for split in sorted(splits, key=lambda split: split.trainer_gpus):
        table.add_row(*_split_cells(estimate, split))
    return table


def _split_cells(estimate: Estimate, split: Split) -> tuple[str, ...]:
    words = []
    if split.trainer_gpus == estimate.trainer_gpus and split.engine_gpus == estimate.engine_gpus:
        words.append("configured")
    if split == better_split(estimate.splits):
        words.append("shortest")
    if not split.fits:
        words.append("does not fit")
    numbers = (split.sampling_s, split.training_s, split.step_s)
    idle = (f"{split.engines_idle:.0%}", f"{split.trainer_idle:.0%}")
    counts = (str(split.engine_gpus), str(split.trainer_gpus))
    return (*counts, *(f"{number:,.1f}" for number in numbers), *idle, ", ".join(words))


def _pace_lines(estimate: Estimate) -> Iterator[str]:
    split = estimate.split
    if split is None:
        yield f"A step takes about {estimate.training_s:,.1f} s{_assumed(estimate)}."
        return
    yield (
        f"A step takes about {split.step_s:,.1f} s: sampling {split.sampling_s:,.1f}, "
        f"training {split.training_s:,.1f}, weights {split.update_s:,.1f}{_assumed(estimate)}."
    )
    idle = split.trainer_idle if split.bottleneck == "engines" else split.engines_idle
    if not estimate.synchronous and not estimate.is_shared:
        waits = "the trainer" if split.bottleneck == "engines" else "engines"
        yield f"Bottleneck: {'the ' * (split.bottleneck == 'trainer')}{split.bottleneck}; {waits} idle {idle:.0%}."
    better = better_split(estimate.splits)
    if better is not None and better.step_s < 0.97 * split.step_s:
        yield (
            f"Better: inference_gpus = {better.engine_gpus}, trainer_gpus = {better.trainer_gpus} takes "
            f"{better.step_s:,.1f} s."
        )


def _assumed(estimate: Estimate) -> str:
    if estimate.rates.trainer:
        return " (with the rates given)"
    share = estimate.trainer_pace.share(estimate.work) if estimate.work else estimate.trainer_pace.mfu
    return f" (assumed: the trainer reaches {share:.0%} of its peak)" if share else " (assumed rates)"


# verdict


def _verdict(estimate: Estimate, advice: Advice) -> Iterator[Text]:
    problems = list(estimate.problems())
    if not problems:
        yield Text("It fits.", "green")
    for problem in problems:
        yield Text(f"Will not fit: {problem}.", "bold red")
    yield from map(Text, _advice_lines(estimate, advice))


def _advice_lines(estimate: Estimate, advice: Advice) -> Iterator[str]:
    if not estimate.trainer_fits or estimate.trainer_bytes > 0.8 * estimate.trainer_room:
        for saving in advice.savings:
            alone = "   (enough alone)" if saving.fits and not estimate.trainer_fits else ""
            yield f"  {saving.alternative.words} saves {_two(saving.saved)} GiB{alone}"
    if advice.together and advice.then:
        words = ", ".join(each.words for each in advice.together)
        yield f"First that fits: {words}: {_two(advice.then.trainer_bytes)} of {_two(advice.then.trainer_room)} GiB."
    elif not estimate.trainer_fits:
        yield "Nothing of this is enough, not even together: a smaller model, or larger GPUs."
    yield from (f"  {line}" for line in advice.engine)


def to_json(estimate: Estimate, advice: Advice) -> dict[str, Any]:
    """In GiB and seconds."""
    memory, serving = estimate.training.memory, estimate.serving
    trainer = {
        "parts_gib": _gib({**memory.parts, "allocator": estimate.scattered, "process": estimate.beside}),
        "moment": memory.fullest,
        "moments_gib": _gib({name: sum(parts.values()) for name, parts in memory.moments.items()}),
        "needs_gib": estimate.trainer_bytes / GIB,
        "room_gib": estimate.trainer_room / GIB,
        "host_gib": _gib(memory.host),
        "fits": estimate.trainer_fits,
    }
    return {
        "fits": estimate.fits,
        "problems": list(estimate.problems()),
        "model": _model_json(estimate),
        "trainer": trainer,
        "engine": None if serving is None else _engine_json(estimate),
        "host": {"needs_gib": estimate.host_bytes / GIB, "fits": estimate.host_fits},
        "batch": estimate.batch.__dict__ | {"tokens": estimate.batch.tokens, "epochs": estimate.batch.epochs},
        "step": _step_json(estimate),
        "splits": [_split_json(split) for split in estimate.splits],
        "advice": [
            {"change": saving.alternative.words, "saves_gib": saving.saved / GIB, "fits": saving.fits}
            for saving in advice.savings
        ],
        "first_that_fits": [each.words for each in advice.together],
        "engine_advice": list(advice.engine),
    }


def _model_json(estimate: Estimate) -> dict[str, Any]:
    model, training = estimate.training.model, estimate.training
    return {
        "name": estimate.sized.name,
        "parameters": model.num_parameters,
        "active": model.active_parameters,
        "trained": training.trained,
        "exact": estimate.sized.is_exact,
    }


def _engine_json(estimate: Estimate) -> dict[str, Any]:
    serving = estimate.serving
    assert serving is not None
    return {
        "parts_gib": _gib({**serving.parts, "KV cache": max(0.0, serving.room)}),
        "needs_gib": estimate.engine_bytes / GIB,
        "kv_tokens": serving.num_tokens,
        "requests": serving.num_requests,
        "fits": estimate.engine_fits,
    }


def _step_json(estimate: Estimate) -> dict[str, Any]:
    if estimate.split is not None:
        return _split_json(estimate.split)
    return {"step_s": estimate.training_s}


def _split_json(split: Split) -> dict[str, Any]:
    idle = {"engines_idle": split.engines_idle, "trainer_idle": split.trainer_idle}
    return {**split.__dict__, "bottleneck": split.bottleneck, **idle}


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: number / GIB for name, number in parts.items()}


def _two(number: float) -> str:
    return f"{number / GIB:,.2f}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.2f}{letter}"
    return f"{number:,.0f}"
