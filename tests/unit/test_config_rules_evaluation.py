"""An evaluation that would measure wrongly, or for nothing, is refused before anything starts."""

from __future__ import annotations

import pytest

from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import problems

ENV = ("--orchestrator.env", '[{"id": "x"}]')
CPU = Devices(cores=2)


def found(*argv: str) -> list[str]:
    config, _ = load_run_config([*ENV, *argv], program="rl")
    return problems(resolve(config, CPU), CPU)


SAMPLED = ("--orchestrator.eval.sampling.temperature", "1.0")


@pytest.mark.parametrize(
    "argv",
    [
        ("--orchestrator.eval.interval", "100"),
        ("--orchestrator.eval.rollouts-per-example", "8", *SAMPLED),
        ("--orchestrator.eval.rollouts-per-example", "8", "--orchestrator.eval.pass-at", "[1, 8]", *SAMPLED),
        ("--orchestrator.eval.max-concurrent", "64"),
    ],
)
def test_what_makes_sense_is_taken(argv: tuple[str, ...]) -> None:
    assert found(*argv) == []


@pytest.mark.parametrize(
    ("argv", "names", "advice"),
    [
        (
            ("--orchestrator.eval.rollouts-per-example", "4", "--orchestrator.eval.pass-at", "[1, 8]", *SAMPLED),
            "pass@8 takes at least 8 rollouts",
            "`rollouts_per_example` to 8 or more, or leave [8] out",
        ),
        (("--orchestrator.eval.pass-at", "[1, 1]"), "names a k twice", "Remove the second"),
        (("--orchestrator.eval.pass-threshold", "nan"), "pass_threshold = nan", "Set the one"),
        (("--orchestrator.eval.rollouts-per-example", "4"), "would all be the same", "`temperature = 1.0`"),
        (
            ("--orchestrator.eval.max-concurrent", "16", "--orchestrator.max-concurrent", "16"),
            "training would get no place",
            "below 16",
        ),
    ],
)
def test_what_says_nothing_is_refused_with_what_to_set_instead(argv: tuple[str, ...], names: str, advice: str) -> None:
    (message,) = found(*argv)
    assert names in message
    assert advice in message
