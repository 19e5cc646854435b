"""A word at launch, where a plan says that GPUs are too small: it is cheaper to hear now than from an allocator."""

from __future__ import annotations

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.tools.plan.advice import advise
from trireme.tools.plan.estimate import estimate_run
from trireme.tools.plan.lengths import lengths_of
from trireme.tools.plan.machine import describe_machine
from trireme.tools.plan.sizes import read_sizes


def fit_warnings(config: RunConfig, devices: Devices) -> list[str]:
    """Of a resolved run on GPUs; none where the model's sizes or the GPU's memory cannot be had. Never stops a run: the
    plan may be wrong."""
    if config.device != "cuda":
        return []
    try:
        machine = describe_machine(devices)
        sized = read_sizes(config.trainer.model.name or config.model.name)
        lengths = lengths_of(config, prompt=None, sampled=None, examples=None, run=None)
    except ConfigError:
        return []
    estimate = estimate_run(config, sized, machine, lengths)
    problems = list(estimate.problems())
    if not problems:
        return []
    changes = ", ".join(each.words for each in advise(estimate).together)
    ways = f" First that fits: {changes}." if changes else ""
    return [f"this may not fit: {'; '.join(problems)}.{ways} `trireme plan` with the same arguments shows all of it."]
