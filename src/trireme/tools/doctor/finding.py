"""What the doctor asks, and what it finds: each answer with its verdict, its figures, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trireme.base.devices import Devices
from trireme.config.run import RunConfig

Verdict = Literal["ok", "warning", "problem", "skipped"]
"""A problem keeps a run from starting or ends it; with a warning it runs, but slowly or at a risk."""


@dataclass(frozen=True)
class Finding:
    """One answer.

    Example:
        Finding("problem", "port 8000 on 127.0.0.1 is in use", fix="`lsof -i :8000` shows who has it")
    """

    verdict: Verdict
    found: str  # with its values, and what was expected where that is not what came
    fix: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # what was measured, for machines


def ok(found: str, **figures: Any) -> Finding:
    return Finding("ok", found, figures=figures)


def warning(found: str, fix: str, **figures: Any) -> Finding:
    return Finding("warning", found, fix, figures)


def problem(found: str, fix: str, **figures: Any) -> Finding:
    return Finding("problem", found, fix, figures)


def skipped(why: str) -> Finding:
    return Finding("skipped", why)


def told(message: str) -> Finding:
    """A problem in the three parts of our errors: "what happened - what was expected. What to do."."""
    what, dash, rest = message.partition(" - ")
    expected, stop, fix = rest.partition(". ")
    return problem(f"{what}{dash}{expected}", fix) if stop else problem(message, "")


@dataclass(frozen=True)
class Case:
    """What is looked at: a run as it would be started here and now."""

    typed: RunConfig  # nothing is derived yet
    config: RunConfig  # resolved
    devices: Devices
    is_given: bool  # a configuration was named; else it is the quickstart's
    folder: Path  # for what is written on the way: inside the run's `output_dir`, and gone afterwards

    @property
    def is_of_several_machines(self) -> bool:
        return len(self.config.hosts.all) > 1


Ask = Callable[[Case], Iterable[Finding]]


@dataclass(frozen=True)
class Question:
    name: str
    words: str
    ask: Ask
    is_slow: bool = False  # starts processes that load torch, vLLM or an environment: left out by `--quick`
    wants_health: bool = False  # makes no sense where a problem was found before


@dataclass(frozen=True)
class Answer:
    """A finding, with the question that it answers."""

    name: str
    question: str
    finding: Finding
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "question": self.question, "seconds": round(self.seconds, 3), **asdict(self.finding)}


def examine(
    questions: Sequence[Question], case: Case, *, quick: bool, on_question: Callable[[Question], None] = lambda _: None
) -> Iterator[Answer]:
    """Asks one after the other. A question that fails is a finding too: the others are still asked."""
    sick: list[str] = []
    for question in questions:
        on_question(question)
        began = time.monotonic()
        for finding in _findings(question, case, quick=quick, sick=sick):
            if finding.verdict == "problem" and question.name not in sick:
                sick.append(question.name)
            yield Answer(question.name, question.words, finding, time.monotonic() - began)
            began = time.monotonic()


def _findings(question: Question, case: Case, *, quick: bool, sick: list[str]) -> Iterator[Finding]:
    if quick and question.is_slow:
        yield skipped("left out by `--quick`")
    elif question.wants_health and sick:
        yield skipped(f"not with the problems above ({', '.join(sick)})")
    else:
        yield from _asked(question, case)


def _asked(question: Question, case: Case) -> Iterator[Finding]:
    try:
        yield from question.ask(case)
    except Exception as error:  # whatever a broken machine can make of a library
        words = f"the question itself failed: {type(error).__name__}: {error}"
        yield problem(words, "If this says nothing to you, report it: with `--json`, and how the machine was set up.")


def of(finding: Finding, what: str) -> Finding:
    """The same, said of one among several."""
    return replace(finding, found=f"{what}: {finding.found}")


def counted(answers: Sequence[Answer]) -> str:
    """ "17 ok, 1 warning, 2 skipped"."""
    verdicts = [answer.finding.verdict for answer in answers]
    kinds: tuple[Verdict, ...] = ("ok", "warning", "problem", "skipped")
    plural = {"warning": "warnings", "problem": "problems"}
    named = ((kind, verdicts.count(kind)) for kind in kinds)
    return ", ".join(f"{count} {plural.get(kind, kind) if count > 1 else kind}" for kind, count in named if count)
