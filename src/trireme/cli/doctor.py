"""`trireme doctor [@ config.toml]`: whether a run would work here and now, one question after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches

from rich.console import Console
from rich.text import Text

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.token import adopt_token, token_problem
from trireme.cli.doctor_tokenizer import tokenizer
from trireme.config.arguments import TypedFile, TypedFlag, parse_arguments
from trireme.config.load import knows, load_run_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.tools.doctor.finding import Answer, Case, Question, counted, examine
from trireme.tools.doctor.questions import AFTER, BEFORE
from trireme.tools.doctor.view import text_of
from trireme.tools.workspace.shipped import find_shipped

TOKENIZER = Question("tokenizer", "Do tokenizer and chat template work?", tokenizer)
QUESTIONS = (*BEFORE, TOKENIZER, *AFTER)
LEAST_WIDTH, MOST_WIDTH = 80, 120
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


def doctor(argv: list[str]) -> int:
    """Returns 0 where no problem was found, 1 where there was one.

    Raises: ConfigError where the configuration, or the command, cannot be read.
    """
    options, words = _parse(argv)
    case = read_case(words)
    began = time.monotonic()
    with ending_in_order(), folder_of(case) as keep, Sheet(quiet=options.json) as sheet:
        answers = []
        for answer in examine(_chosen(options.only), case, quick=options.quick, on_question=sheet.ask):
            answers.append(answer)
            sheet.tell(answer)
            if answer.finding.verdict == "problem" and answer.name == "run":
                keep()
    _conclude(answers, time.monotonic() - began, as_json=options.json)
    return 1 if any(answer.finding.verdict == "problem" for answer in answers) else 0


def read_case(words: list[str]) -> Case:
    """Raises: ConfigError for what was typed."""
    arguments = parse_arguments(words)
    is_given = any(isinstance(argument, TypedFile) or argument.path == ("run",) for argument in arguments)
    typed, invocation = load_run_config(words if is_given else [*_quickstart(), *words], program="trireme doctor")
    devices = detect_devices()
    config = typed if invocation.run else resolve(typed, devices)
    if token_problem(config.hosts.token_file) is None:  # else the configuration's rules say what is wrong with it
        adopt_token(config.hosts.token_file)
    folder = config.output_dir / f"doctor-{os.getpid()}"
    return Case(typed, config, devices, is_given, folder)


def _quickstart() -> list[str]:
    """Wherever we are."""
    shipped, name = find_shipped(), "reverse-text"
    environment = {"id": str(shipped.environments / "reverse_text"), "name": name}
    named = [word for key, value in environment.items() for word in (f"--orchestrator.env.0.{key}", value)]
    model = ["--model.name", str(shipped.models / f"{name}-tiny")]
    return ["@", str(shipped.configs / name / "rl.toml"), *model, *named]


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Whoever asks it to end is answered as Ctrl-C is: what it has started ends, and its folder is removed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def folder_of(case: Case) -> Iterator[Callable[[], None]]:
    """The doctor's own folder is gone afterwards, with the run's `output_dir` where only we needed that.

    Yields: what is to be called where it is to be kept.
    """
    kept = []
    made = [place for place in (case.config.output_dir, *case.config.output_dir.parents) if not place.exists()]
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            shutil.rmtree(case.folder, ignore_errors=True)
            with suppress(OSError):  # somebody else has put something there meanwhile
                for place in made:
                    place.rmdir()


def _chosen(names: list[str]) -> list[Question]:
    """Raises: ConfigError where one is none of ours."""
    known = [question.name for question in QUESTIONS]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else "Leave `--only` out to ask them all."
            raise ConfigError(f"--only {name}: there is no such question - expected some of {', '.join(known)}. {hint}")
    return [question for question in QUESTIONS if not names or question.name in names]


class Sheet:
    """Where answers are shown as they come; on a terminal, also what is being asked."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._status = self._console.status("") if self._console.is_terminal and not quiet else None

    def __enter__(self) -> Sheet:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def ask(self, question: Question) -> None:
        if self._status:
            self._status.update(question.words)

    def tell(self, answer: Answer) -> None:
        width = max(LEAST_WIDTH, min(self._console.width, MOST_WIDTH)) if self._console.is_terminal else MOST_WIDTH
        verdict = answer.finding.verdict
        rest = text_of(answer, width).removeprefix(verdict)
        self._console.print(Text.assemble((verdict, STYLES[verdict]), rest))
        sys.stdout.flush()


def _conclude(answers: list[Answer], seconds: float, *, as_json: bool) -> None:
    if as_json:
        holds = all(answer.finding.verdict != "problem" for answer in answers)
        said = {"holds": holds, "seconds": round(seconds, 3), "answers": [answer.as_json() for answer in answers]}
        print(json.dumps(said, indent=1, default=str))
    else:
        print(f"\n{counted(answers)}; {seconds:.0f} s")


def _parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Our own flags, and the words that `rl` would be started with.

    Raises: ConfigError where a flag is nearly one of ours.
    """
    parser = ArgumentParser(
        prog="trireme doctor",
        usage="trireme doctor [@ config.toml …] [--key value …] [--quick] [--only NAME …] [--json]",
        description="Asks of this machine, one question after the other, what a run needs: software, memory, limits, "
        "disk, clock, ports, wires, model files, environments, and in the end three steps of the run itself. Each "
        "answer has a verdict and, where it is bad, what to do. Takes the files and flags of `rl`; without a file it "
        "asks for the quickstart. Writes below the run's `output_dir`, and removes it again.",
        epilog=f"Questions: {', '.join(question.name for question in QUESTIONS)}. Ends with 0 where no problem was "
        "found, 1 where there was one, 2 where the configuration cannot be read.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="only what takes seconds: nothing loads torch or vLLM")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="these questions alone")
    parser.add_argument("--json", action="store_true", help="for machines")
    options, words = parser.parse_known_args(argv)
    options.only, files = _names_and_files(options.only)
    _refuse_typos(words)
    return options, [*files, *words]


def _names_and_files(words: list[str]) -> tuple[list[str], list[str]]:
    """`--only disk ports @ config.toml` and `--only disk,ports`: argparse takes all of it for names."""
    end = next((number for number, word in enumerate(words) if word.startswith("@")), len(words))
    return [name for word in words[:end] for name in word.split(",") if name], words[end:]


def _refuse_typos(words: list[str]) -> None:
    for argument in parse_arguments(words):
        if isinstance(argument, TypedFlag) and not knows(RunConfig, argument) and len(argument.path) == 1:
            near = get_close_matches(argument.name, ("--quick", "--only", "--json"), n=1, cutoff=0.7)
            if near:
                raise ConfigError(f"unknown flag `{argument.name}` - no such flag exists. Did you mean `{near[0]}`?")
