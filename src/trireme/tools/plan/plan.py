"""`trireme plan @ config.toml`: what a run will need and how long a step will take, before anything starts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.console import Console

from trireme.algo.model.chips import CHIPS
from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.config.arguments import TypedFile, count, parse_arguments, positive
from trireme.config.files import read_table
from trireme.config.load import load_config, load_run_config
from trireme.config.model.folder import architecture_problems, looks_local
from trireme.config.orchestrator import Environment
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, resolve_sft, updated
from trireme.config.rules import check, check_sft, served_model_problems
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel
from trireme.tools.plan.estimate import Estimate, estimate_run
from trireme.tools.plan.machine import Machine, describe_machine
from trireme.tools.plan.report import show
from trireme.tools.plan.sizes import find_config, read_sizes
from trireme.tools.plan.step_time import Lengths, lengths_of

WIDTH = 120


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
    with_environment = {"orchestrator.env": config.orchestrator.env or (Environment(id="any"),)}  # a plan needs none
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
