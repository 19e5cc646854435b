"""A plan as a report for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trireme.algo.model.chips import GIB
from trireme.tools.plan.advice import Advice
from trireme.tools.plan.estimate import Estimate, Need
from trireme.tools.plan.step_time import Batch, Split

MOMENTS = {
    "head": "at the head",
    "first layer backward": "in the backward pass of the first layers",
    "last layer backward": "at the end of the backward pass",
    "embedding backward": "at the embedding's gradient",
    "update": "in the optimizer",
    "publish": "while weights are sent",
}
MOST_SPLITS = 8
MIB = 1 << 20


def show(estimate: Estimate, advice: Advice) -> RenderableType:
    blocks: list[RenderableType] = [*_facts(estimate), Text(), _memory(estimate), *map(Text, _memory_notes(estimate))]
    if len(estimate.splits) > 1:
        blocks += [Text(), _splits(estimate)]
    return Group(*blocks, Text(), *map(Text, _time_notes(estimate)), Text(), *_verdict(estimate, advice))


def _facts(estimate: Estimate) -> Iterator[Text]:
    batch, model, training = estimate.batch, estimate.training.model, estimate.training
    machine, serving = estimate.machine, estimate.serving
    trained = f"{_count(training.trained)} trained" if training.trained != model.num_parameters else "all trained"
    active = (
        f", {_count(model.active_parameters)} active"
        if model.num_parameters - model.tower > 2 * model.active_parameters
        else ""
    )
    yield _fact("model", f"{estimate.sized.name}: {_count(model.num_parameters)} parameters{active}, {trained}")
    if not estimate.sized.is_exact:
        yield Text(f"{'':9}its family ({model.model_type or 'unnamed'}) is not known: counted as Llama's", "yellow")
    elif model.is_counted:
        yield Text(f"{'':9}parameters are exact; the memory of its activations is an estimate", "yellow")
    memory = f"{machine.chip.memory / GIB:,.0f} GiB"
    if machine.is_on_cpu:
        yield _fact("machine", f"{machine.cores} cores, {memory}; trainer on {estimate.ranks} rank(s)")
    elif serving is None:
        yield _fact("machine", f"{estimate.trainer_gpus} x {machine.chip.name} of {memory}")
    else:
        sides = f"{estimate.engine_gpus} for engines (tp {serving.tp}), {estimate.trainer_gpus} for the trainer"
        shared = " (the same)" if estimate.is_shared else ""
        yield _fact("machine", f"{machine.num_gpus} x {machine.chip.name} of {memory}: {sides}{shared}")
    what = f"{batch.rollouts} rollouts in {batch.groups} groups" if batch.groups else f"{batch.rollouts} samples"
    yield _fact(
        "batch", f"{what}, {_count(batch.tokens)} tokens ({batch.lengths.total:,.0f} each: {batch.lengths.source})"
    )
    team = "rank" if batch.teams == estimate.ranks else f"team of {estimate.ranks // batch.teams} ranks"
    yield _fact("rows", f"{batch.rows} of {batch.row_tokens:,} tokens for each {team} per update")
    passes = "" if batch.epochs is None else f"; {batch.epochs:,.2f} passes over {batch.lengths.examples:,} examples"
    yield _fact("run", f"{batch.steps:,} steps, {batch.steps * batch.iterations:,} optimizer steps{passes}")


def _fact(title: str, line: str) -> Text:
    return Text.assemble((f"{title:9}", "bold"), line)


def _memory(estimate: Estimate) -> Table:
    table = Table(title=f"GiB per {'rank' if estimate.machine.is_on_cpu else 'GPU'}, by part", title_justify="left")
    sides = {"trainer": estimate.trainer} | ({"engine": estimate.engine} if estimate.engine else {})
    for name in sides:
        table.add_column(name)
        table.add_column("GiB", justify="right")
    columns = [
        [(name, _gib(part)) for name, part in need.parts.items() if part > 0.0005 * GIB] for need in sides.values()
    ]
    for row in zip_longest(*columns, fillvalue=("", "")):
        table.add_row(*(cell for cells in row for cell in cells))
    table.add_section()
    totals = (("of", f"{_gib(need.total)} / {_gib(need.room)}") for need in sides.values())
    table.add_row(*(cell for cells in totals for cell in cells))
    return table


def _memory_notes(estimate: Estimate) -> Iterator[str]:
    training, serving = estimate.training, estimate.serving
    totals = {moment: sum(parts.values()) for moment, parts in training.moments.items()}
    other = max((moment for moment in totals if moment != training.fullest), key=totals.__getitem__)
    yield (
        f"The trainer's parts are those {MOMENTS[training.fullest]}, where they are most; "
        f"{MOMENTS[other]} they are {_gib(totals[other])} GiB."
    )
    host = ", ".join(f"{name} {_gib(number)}" for name, number in training.host.items())
    node = f"; of a node, in all, {_gib(estimate.host.total)} of {_gib(estimate.host.room)}"
    yield f"In its machine's own memory, for each rank: {host} GiB{'' if estimate.machine.is_on_cpu else node}."
    if serving:
        requests = f"{serving.num_requests:,.1f} requests of {serving.max_model_len:,} at once"
        state = f" Each carries a state of {serving.state_bytes / MIB:,.2f} MiB." if serving.state_bytes else ""
        yield f"The KV cache holds {serving.num_tokens:,} tokens: {requests}.{state}"


def _splits(estimate: Estimate) -> Table:
    """Show the shortest steps, with the one that is configured marked."""
    how = "one after the other" if estimate.synchronous else "both at once"
    table = Table(title=f"Splits of {estimate.machine.num_gpus} GPUs ({how})", title_justify="left")
    for title in ("engines", "trainer", "sampling s", "training s", "step s", "engines idle", "trainer idle", ""):
        table.add_column(title, justify="right" if title else "left")
    shortest = sorted(estimate.splits, key=lambda split: split.step_s)[:MOST_SPLITS]
    for split in sorted(shortest, key=lambda split: split.trainer_gpus):
        marks = {
            "configured": (split.engine_gpus, split.trainer_gpus) == (estimate.engine_gpus, estimate.trainer_gpus),
            "shortest": split == estimate.best_split,
            "does not fit": not split.fits,
        }
        seconds = (f"{number:,.1f}" for number in (split.sampling_s, split.training_s, split.step_s))
        idle = (f"{split.engines_idle:.0%}", f"{split.trainer_idle:.0%}")
        words = ", ".join(word for word, holds in marks.items() if holds)
        table.add_row(str(split.engine_gpus), str(split.trainer_gpus), *seconds, *idle, words)
    return table


def _time_notes(estimate: Estimate) -> Iterator[str]:
    assumed = f"assumed: the trainer reaches {estimate.trainer_mfu:.0%} of its peak"
    rates = f" ({'with the rates given' if estimate.rates.trainer else assumed})."
    split, best = estimate.configured_split, estimate.best_split
    if split is None:
        yield f"A step takes about {estimate.training_seconds(estimate.trainer_gpus):,.1f} s{rates}"
        return
    parts = f"sampling {split.sampling_s:,.1f}, training {split.training_s:,.1f}, weights {split.update_s:,.1f}"
    yield f"A step takes about {split.step_s:,.1f} s: {parts}{rates}"
    if not estimate.synchronous and not estimate.is_shared:
        if split.bottleneck == "engines":
            yield f"Bottleneck: engines; the trainer is idle {split.trainer_idle:.0%} of the time."
        else:
            yield f"Bottleneck: the trainer; engines are idle {split.engines_idle:.0%} of the time."
    if best is not None and best.step_s < 0.97 * split.step_s:
        counts = f"inference_gpus = {best.engine_gpus}, trainer_gpus = {best.trainer_gpus}"
        yield f"Better: {counts} takes {best.step_s:,.1f} s."


def _verdict(estimate: Estimate, advice: Advice) -> Iterator[Text]:
    problems = list(estimate.problems())
    for problem in problems:
        yield Text(f"Will not fit: {problem}.", "bold red")
    if not problems:
        yield Text("It fits.", "green")
    if not estimate.trainer.fits or estimate.trainer.total > 0.8 * estimate.trainer.room:
        for saving in advice.savings:
            alone = "   (enough alone)" if saving.fits and not estimate.trainer.fits else ""
            yield Text(f"  {saving.words} saves {_gib(saving.saved)} GiB{alone}")
    if advice.then:
        sizes = f"{_gib(advice.then.trainer.total)} of {_gib(advice.then.trainer.room)} GiB"
        yield Text(f"First that fits: {', '.join(advice.together)}: {sizes}.")
    elif not estimate.trainer.fits:
        yield Text("None of this is enough, not even together: a smaller model, or larger GPUs.")
    yield from (Text(f"  {line}") for line in advice.engine)


def to_json(estimate: Estimate, advice: Advice) -> dict[str, Any]:
    """Return the plan in GiB and seconds."""
    training, serving = estimate.training, estimate.serving
    model = training.model
    split = estimate.configured_split
    return {
        "fits": estimate.fits,
        "problems": list(estimate.problems()),
        "model": {
            "name": estimate.sized.name,
            "parameters": model.num_parameters,
            "active": model.active_parameters,
            "trained": training.trained,
            "exact": estimate.sized.is_exact,
        },
        "trainer": {
            **_need_json(estimate.trainer),
            "moment": training.fullest,
            "moments_gib": _in_gib({moment: sum(parts.values()) for moment, parts in training.moments.items()}),
            "host_gib": _in_gib(training.host),
        },
        "engine": serving
        and estimate.engine
        and {
            **_need_json(estimate.engine),
            "kv_tokens": serving.num_tokens,
            "state_bytes": serving.state_bytes,
            "requests": serving.num_requests,
            "fits": estimate.engine_fits,
        },
        "host": _need_json(estimate.host),
        "batch": _batch_json(estimate.batch),
        "step": _split_json(split) if split else {"step_s": estimate.training_seconds(estimate.trainer_gpus)},
        "splits": list(map(_split_json, estimate.splits)),
        "advice": [{"change": each.words, "saves_gib": each.saved / GIB, "fits": each.fits} for each in advice.savings],
        "first_that_fits": list(advice.together),
        "engine_advice": list(advice.engine),
    }


def _need_json(need: Need) -> dict[str, Any]:
    return {
        "parts_gib": _in_gib(need.parts),
        "needs_gib": need.total / GIB,
        "room_gib": need.room / GIB,
        "fits": need.fits,
    }


def _batch_json(batch: Batch) -> dict[str, Any]:
    fields = asdict(batch)
    lengths = {name: value for name, value in fields.pop("lengths").items() if name != "samples"}
    return fields | lengths | {"length": batch.lengths.total, "tokens": batch.tokens, "epochs": batch.epochs}


def _split_json(split: Split) -> dict[str, Any]:
    idle = {"engines_idle": split.engines_idle, "trainer_idle": split.trainer_idle}
    return {**asdict(split), "bottleneck": split.bottleneck, **idle}


def _in_gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: number / GIB for name, number in parts.items()}


def _gib(number: float) -> str:
    return f"{number / GIB:,.2f}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.2f}{letter}"
    return f"{number:,.0f}"
