"""Plans as `trireme plan` makes them, and the GPUs that they find."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from support.runs.resolved_runs import resolved
from trireme.base.devices import Devices
from trireme.tools.plan.estimate import Estimate, estimate_run
from trireme.tools.plan.machine import describe_machine
from trireme.tools.plan.sizes import read_sizes
from trireme.tools.plan.step_time import lengths_of


def estimated(file: Path, *flags: str, gpu: str | None = "h100", gpus: int = 8, **lengths: Any) -> Estimate:
    """Return the plan of the run that a file and flags describe, on a machine with such GPUs."""
    machine = describe_machine(Devices(cores=16), gpu=gpu, gpus=gpus)
    config = resolved(shlex.join(["@", str(file), *flags]), on=machine.devices)
    return estimate_run(config, read_sizes(str(config.trainer.model.name)), machine, lengths_of(config, **lengths))


def write_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program that answers like the driver in front of the one of this machine, if it has one."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
