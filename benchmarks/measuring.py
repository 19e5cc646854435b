"""What benchmarks share: flags, clocks, measuring by turns, and tables that the documentation can take over."""

from __future__ import annotations

import argparse
import inspect
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, Literal, get_args, get_origin

Work = Callable[[], object]


def command(main: Callable[..., int | None]) -> None:
    """Call `main` with the flags of the command line, which are its parameters, and exit with what it returns.

    A parameter without a default is positional, a tuple takes several words, and `*flags` takes what is unknown.
    `Annotated` adds a help text, or a tuple of allowed values.

    Example:
        def main(kind: Literal["a", "b"], sizes: tuple[int, ...] = (1, 2), times: Annotated[int, "of each"] = 3) -> None
    """
    document = sys.modules[main.__module__].__doc__
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parameters = inspect.signature(main, eval_str=True).parameters.values()
    for parameter in parameters:
        if parameter.kind != parameter.VAR_POSITIONAL:
            _add_argument(parser, parameter)
    takes_unknown = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    known, unknown = parser.parse_known_args() if takes_unknown else (parser.parse_args(), [])
    sys.exit(main(*unknown, **vars(known)))


def _add_argument(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    kind, options = parameter.annotation, dict[str, Any]()
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        options |= {"help" if isinstance(note, str) else "choices": note for note in notes}
    if type(None) in get_args(kind):  # a flag without a value of its own
        (kind,) = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is tuple:
        kind, options["nargs"] = get_args(kind)[0], "+"
    if get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
        kind = type(options["choices"][0])
    options |= {"action": "store_true"} if kind is bool else {"type": kind}

    if parameter.default is parameter.empty:
        parser.add_argument(parameter.name, **options)
    else:
        flag = f"--{parameter.name.rstrip('_').replace('_', '-')}"  # `json_` is --json
        parser.add_argument(flag, dest=parameter.name, default=parameter.default, **options)


def wall_s(work: Work, device: str = "cpu") -> float:
    """Return the seconds of one call, on a GPU until it has done what it was given."""
    _wait_for(device)
    began = time.perf_counter()
    work()
    _wait_for(device)
    return time.perf_counter() - began


def _wait_for(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def cpu_s(work: Work) -> float:
    """Return the processor seconds of one call, of this process and its threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def command_s(*words: object) -> tuple[float, float]:
    """Return the wall and the processor seconds of one call of a command, of all its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL, timeout=300)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def least(work: Work, device: str = "cpu", repeats: int = 3) -> float:
    """Return the seconds of the fastest of a few calls, after one that does not count."""
    return min([wall_s(work, device) for _ in range(repeats + 1)][1:])


def by_turns(works: Mapping[str, Work], rounds: int, clock: Callable[[Work], float] = wall_s) -> dict[str, list[float]]:
    """Return what each work takes in each round, without a first round, which warms up."""
    found = [{name: clock(work) for name, work in works.items()} for _ in range(rounds + 1)]
    return {name: [each[name] for each in found[1:]] for name in works}


def spread(values: Sequence[float], style: str = ".2f") -> str:
    """Return the median of values, with the least and the most if there are several."""
    middle, low, high = (format(value, style) for value in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table, each row as soon as it is known."""
    print(markdown_row(columns), markdown_row(["---"] * len(columns)), sep="\n", flush=True)
    for row in rows:
        print(markdown_row(row), flush=True)


def markdown_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
