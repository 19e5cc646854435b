"""What cannot send changes alone says so before anything starts."""

from __future__ import annotations

import pytest

from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import problems
from trireme.config.run import RunConfig

CPU = Devices(cores=2)
GPUS = Devices(cores=8, gpus=("0", "1"))
ENV = ("--orchestrator.env", '[{"id": "x"}]')


def resolved(devices: Devices, *argv: str) -> RunConfig:
    return resolve(load_run_config([*ENV, "--weight-broadcast.delta", *argv], program="rl")[0], devices)


def of_the_broadcast(config: RunConfig, devices: Devices) -> list[str]:
    return [problem for problem in problems(config, devices) if "weight_broadcast.delta" in problem]


@pytest.mark.parametrize("kind", ["auto", "gloo", "filesystem"])
def test_changes_alone_can_be_sent_on_cpus(kind: str) -> None:
    config = resolved(CPU, "--weight-broadcast.type", kind)
    assert config.weight_broadcast.delta
    assert of_the_broadcast(config, CPU) == []


def test_over_nccl_changes_alone_can_be_sent() -> None:
    config = resolved(GPUS, "--weight-broadcast.type", "nccl")
    assert of_the_broadcast(config, GPUS) == []


def test_memory_handles_cannot_carry_changes_alone() -> None:
    config = resolved(GPUS, "--weight-broadcast.type", "ipc")
    (problem,) = of_the_broadcast(config, GPUS)
    assert "nothing is sent that could be less" in problem
    assert 'weight_broadcast.type = "nccl"' in problem
