"""`trireme plan @ config.toml`: what a run will need and how long a step will take, before anything starts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trireme.algo.model.chips import CHIPS, GIB
from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.config.arguments import TypedFile, count, parse_arguments, positive
from trireme.config.files import read_table
from trireme.config.load import load_config, load_run_config
from trireme.config.model.folder import architecture_problems, looks_local
from trireme.config.orchestrator import Source
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, resolve_sft, updated
from trireme.config.rules.check import check, check_sft
from trireme.config.rules.engine import served_model_problems
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel
from trireme.tools.plan.advice import engine_advice, first_that_fits, savings_of
from trireme.tools.plan.estimate import Estimate, estimate_run
from trireme.tools.plan.machine import Machine, describe_machine
from trireme.tools.plan.sizes import find_config, read_sizes
from trireme.tools.plan.step_time import Lengths, lengths_of

WIDTH = 120
MOMENTS = {
    "head": "at the head",
    "first layer backward": "in the backward pass of the first layers",
    "last layer backward": "at the end of the backward pass",
    "embedding backward": "at the embedding's gradient",
    "update": "in the optimizer",
    "publish": "while weights are sent",
}
MIB = 1 << 20


def command(argv: list[str]) -> int:
    """Return 0 if the run fits, and 1 otherwise.

    Raises: ConfigError if the configuration is wrong, or the model's sizes are not known.
    """
    parser = ArgumentParser(
        prog="trireme plan",
        usage="trireme plan [@ file.toml …] [--key value …] [options]",
        description="Works out, from the configuration and the model's config.json alone: memory of trainer and engine "
        "by part, batch arithmetic, seconds of a step, the better split of GPUs; and where it will not fit, what "
        "would. Takes the files and flags of `rl`, or of `sft`. Starts nothing, loads no weights.",
        epilog="Ends with 0 where it fits, 1 where it does not, 2 where the configuration is wrong.",
        allow_abbrev=False,
    )

    add = parser.add_argument_group("the machine, where it is not this one").add_argument
    add("--gpu", metavar="NAME", help=f"one of {', '.join(CHIPS)}")
    add("--gpus", metavar="N", type=count, help="how many in all; 0 plans for the CPU")
    add("--memory-gib", metavar="GIB", type=positive, help="of each GPU; of the machine on CPU")
    add = parser.add_argument_group("the work").add_argument
    add("--prompt-tokens", metavar="N", type=positive, help="of a rollout, on average")
    add("--completion-tokens", metavar="N", type=positive, help="sampled in a rollout, on average")
    parser.add_argument("--sft", action="store_true", help="the files are those of `sft`, as their keys may show")

    # Unknown words are the run's own keys, which are loaded as `rl` or `sft` would.
    options, typed = parser.parse_known_args(argv)
    machine = describe_machine(detect_devices(), gpu=options.gpu, gpus=options.gpus, memory_gib=options.memory_gib)
    estimate = (_plan_sft if options.sft or _is_sft(typed) else _plan_run)(typed, options, machine)
    Console(width=WIDTH, highlight=False).print(show(estimate), soft_wrap=False)
    return 0 if estimate.fits else 1


def _plan_run(typed: list[str], options: Namespace, machine: Machine) -> Estimate:
    config, invocation = load_run_config(typed, program="rl")
    if not invocation.run:
        config = resolve(config, machine.devices)
    with_environment = {"orchestrator.env": config.orchestrator.env or (Source(id="any"),)}  # a plan needs none
    check(updated(config, with_environment), machine.devices)
    name = config.trainer.model.name or config.model.name
    described = _described("trainer.model", config.trainer.model, name, config.device)
    raise_together(served_model_problems(config, described if config.inference.model.name in (None, name) else None))
    model = read_sizes(name, described, vlm=config.trainer.model.vlm)
    lengths = lengths_of(config, prompt=options.prompt_tokens, sampled=options.completion_tokens)
    return estimate_run(config, model, machine, lengths)


def _plan_sft(typed: list[str], options: Namespace, machine: Machine) -> Estimate:
    config, invocation = load_config(typed, SftConfig, program="sft")
    if not invocation.run:
        config = resolve_sft(config, machine.devices)
    check_sft(config, machine.devices)
    name = str(config.model.name)
    model = read_sizes(name, _described("model", config.model, name, config.device), vlm=config.model.vlm)

    length = sum(number for number in (options.prompt_tokens, options.completion_tokens) if number)
    source = "as given" if length else "the longest that the configuration allows"
    return estimate_run(config, model, machine, Lengths(length or float(config.seq_len), 0.0, 0.0, source))


def _described(table: str, model: TrainerModel, name: str, device: str) -> dict[str, Any]:
    """Return the config.json of the model to train.

    Raises: ConfigError if the trainer would refuse it. The trainer itself chooses an attention for a model on a hub.
    """
    described = find_config(name, fetch=True)
    checked = model if looks_local(name) else updated(model, {"attn": "eager"})
    raise_together(architecture_problems(table, checked, described, device))
    return described


def _is_sft(typed: list[str]) -> bool:
    """Return whether a file has keys that only a supervised run has."""
    keys: set[str] = set()
    for argument in parse_arguments(typed):
        if isinstance(argument, TypedFile):
            try:
                keys |= read_table(Path(argument.name)).keys()
            except ConfigError:  # reported with its place when the file is loaded
                return False
    return bool(keys & (SftConfig.model_fields.keys() - RunConfig.model_fields.keys()))


# the report


def show(estimate: Estimate) -> RenderableType:
    notes = [*map(Text, _memory_notes(estimate)), Text(), *map(Text, _time_notes(estimate)), Text()]
    return Group(*_facts(estimate), Text(), _memory(estimate), *notes, *_verdict(estimate))


def _facts(estimate: Estimate) -> Iterator[Text]:
    batch, model, training = estimate.batch, estimate.training.model, estimate.training
    machine, serving = estimate.machine, estimate.serving

    # The active parameters tell something only of mixtures of experts, which use less than half at once.
    trained = f"{_count(training.trained)} trained" if training.trained != model.num_parameters else "all trained"
    active = (
        f", {_count(model.active_parameters)} active"
        if model.num_parameters - model.tower > 2 * model.active_parameters
        else ""
    )

    yield _fact("model", f"{estimate.model_name}: {_count(model.num_parameters)} parameters{active}, {trained}")
    # The whole plan rests on these sizes, so any doubt about them is shown.
    if not model.is_exact:
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
        total = 0 if estimate.is_shared else estimate.engine_gpus + estimate.trainer_gpus  # on all machines
        yield _fact("machine", f"{max(total, machine.num_gpus)} x {machine.chip.name} of {memory}: {sides}{shared}")

    what = f"{batch.rollouts} rollouts in {batch.groups} groups" if batch.groups else f"{batch.rollouts} samples"
    yield _fact(
        "batch", f"{what}, {_count(batch.tokens)} tokens ({batch.lengths.total:,.0f} each: {batch.lengths.source})"
    )
    # Ranks that share a row (`cp`) are a team.
    team = "rank" if batch.teams == estimate.ranks else f"team of {estimate.ranks // batch.teams} ranks"
    yield _fact("rows", f"{batch.rows} of {batch.row_tokens:,} tokens for each {team} per update")


def _fact(title: str, line: str) -> Text:
    return Text.assemble((f"{title:9}", "bold"), line)


def _memory(estimate: Estimate) -> Table:
    table = Table(title=f"GiB per {'rank' if estimate.machine.is_on_cpu else 'GPU'}, by part", title_justify="left")
    sides = {"trainer": estimate.trainer} | ({"engine": estimate.engine} if estimate.engine else {})
    for name in sides:
        table.add_column(name)
        table.add_column("GiB", justify="right")

    # Parts of less than about half a MiB would fill the table with zeros.
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
    yield f"The trainer's parts are those {MOMENTS[training.fullest]}, where they are most."
    host = ", ".join(f"{name} {_gib(number)}" for name, number in training.host.items())
    node = f"; of a node, in all, {_gib(estimate.host.total)} of {_gib(estimate.host.room)}"
    yield f"In its machine's own memory, for each rank: {host} GiB{'' if estimate.machine.is_on_cpu else node}."
    if serving:
        requests = f"{serving.num_requests:,.1f} requests of {serving.max_model_len:,} at once"
        state = f" Each carries a state of {serving.state_bytes / MIB:,.2f} MiB." if serving.state_bytes else ""
        yield f"The KV cache holds {serving.num_tokens:,} tokens: {requests}.{state}"


def _time_notes(estimate: Estimate) -> Iterator[str]:
    assumed = f" (assumed: the trainer reaches {estimate.trainer_mfu:.0%} of its peak)."
    split, best = estimate.configured_split, estimate.best_split
    if split is None:
        yield f"A step takes about {estimate.training_seconds(estimate.trainer_gpus):,.1f} s{assumed}"
        return
    parts = f"sampling {split.sampling_s:,.1f}, training {split.training_s:,.1f}, weights {split.update_s:,.1f}"
    yield f"A step takes about {split.step_s:,.1f} s: {parts}{assumed}"
    if not estimate.synchronous and not estimate.is_shared:
        slower, other = (
            ("the engines", "trainer") if split.sampling_s > split.training_s else ("the trainer", "engines")
        )
        idle = 1 - min(split.sampling_s, split.training_s) / split.step_s
        yield f"Bottleneck: {slower}; {other} idle {idle:.0%} of the time."

    # The times are estimates: less than 3 % is no reason to change anything.
    if best is not None and best.step_s < 0.97 * split.step_s:
        counts = f"inference_gpus = {best.engine_gpus}, trainer_gpus = {best.trainer_gpus}"
        yield f"Better: {counts} takes {best.step_s:,.1f} s."


def _verdict(estimate: Estimate) -> Iterator[Text]:
    problems = list(estimate.problems())
    for problem in problems:
        yield Text(f"Will not fit: {problem}.", "bold red")
    if not problems:
        yield Text("It fits.", "green")

    # Savings are of interest before memory is short, from 80 % on.
    fits = estimate.trainer.fits
    if not fits or estimate.trainer.total > 0.8 * estimate.trainer.room:
        for saving in savings_of(estimate):
            alone = "   (enough alone)" if saving.fits and not fits else ""
            yield Text(f"  {saving.words} saves {_gib(saving.saved)} GiB{alone}")

    if not fits and (found := first_that_fits(estimate)):
        words, then = found
        sizes = f"{_gib(then.trainer.total)} of {_gib(then.trainer.room)} GiB"
        yield Text(f"First that fits: {', '.join(words)}: {sizes}.")
    elif not fits:
        yield Text("None of this is enough, not even together: a smaller model, or larger GPUs.")
    yield from (Text(f"  {line}") for line in engine_advice(estimate))


def _gib(number: float) -> str:
    return f"{number / GIB:,.2f}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.2f}{letter}"
    return f"{number:,.0f}"
