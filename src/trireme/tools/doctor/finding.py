"""A finding of the doctor: a verdict, figures, and what to do. And the case that its checks look at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trireme.base.devices import Devices
from trireme.config.run import RunConfig

Verdict = Literal["ok", "warning", "problem", "skipped"]
"""A problem keeps a run from starting or ends it; with a warning it runs, but slowly or at a risk."""


@dataclass(frozen=True)
class Finding:
    """An observation of a check, with its verdict.

    Example:
        Finding("problem", "port 8000 on 127.0.0.1 is in use", fix="`lsof -i :8000` shows the process")
    """

    verdict: Verdict
    found: str  # with its values, and what was expected if that differs
    fix: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # measurements, for machines
    name: str = ""  # name of the check that reported it
    seconds: float = 0.0  # seconds that the check took for it


def ok(found: str, **figures: Any) -> Finding:
    return Finding("ok", found, figures=figures)


def warning(found: str, fix: str, **figures: Any) -> Finding:
    return Finding("warning", found, fix, figures)


def problem(found: str, fix: str, **figures: Any) -> Finding:
    return Finding("problem", found, fix, figures)


def skipped(why: str) -> Finding:
    return Finding("skipped", why)


def from_error(message: str) -> Finding:
    """Return a problem from the three parts of our errors: "what happened - what was expected. What to do."."""
    what, dash, rest = message.partition(" - ")
    expected, stop, fix = rest.partition(". ")
    return problem(f"{what}{dash}{expected}", fix) if stop else problem(message, "")


def about(what: str, finding: Finding) -> Finding:
    """Return a finding that says which one of several things it is about."""
    return replace(finding, found=f"{what}: {finding.found}")


@dataclass(frozen=True)
class Case:
    """A run as it would be started here and now."""

    typed: RunConfig  # nothing is derived yet
    config: RunConfig  # resolved
    devices: Devices
    is_given: bool  # a configuration was named; else it is the quickstart's
    folder: Path  # for files of the checks: inside the run's `output_dir`, and removed afterwards
