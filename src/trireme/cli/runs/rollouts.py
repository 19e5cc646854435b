"""`trireme rollouts RUN --to trl`: write a run's rollouts as data sets that other trainers read."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from trireme.base.paths import RunPaths

KINDS = ("trl", "verl", "jsonl", "parquet")


def rollouts(argv: list[str]) -> int:
    """Return 0 when all files are complete and on disk.

    Raises: ConfigError if there is nothing to write; OSError without room; JournalCorrupt if a batch is damaged.
    """
    parser = ArgumentParser(
        prog="trireme rollouts",
        description="Writes the rollouts that a run was trained on, from its journal: `trl` and `verl` as the data "
        "sets that those trainers read, `parquet` and `jsonl` with everything. The run may still be training.",
        epilog="Exit codes: 0 all is on disk, 2 there is nothing to write or no room for it, 3 the journal is "
        "damaged. docs/leaving.md has the columns, and how to load them.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder")
    add("--to", choices=KINDS, required=True, help="the format")
    add("--output", "--out", metavar="FOLDER", type=Path, help="default: RUN/rollouts/trl and so on")
    add("--steps", metavar="A:B", type=_steps, help="steps A to B - 1; either may be left out")
    add("--no-tokens", action="store_true", help="jsonl, parquet: messages and rewards only")
    arguments = parser.parse_args(argv)
    folder = arguments.output or RunPaths(arguments.run).root / "rollouts" / arguments.to

    from trireme.tools.datasets.write import write_sets

    written = write_sets(arguments.run, arguments.to, folder, steps=arguments.steps, tokens=not arguments.no_tokens)
    for path, count in written.items():
        print(f"{count:8}  {path}")
    return 0


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not all(part.isdigit() or part == "" for part in (first, last)) or not (first or last):
        raise ArgumentTypeError(f"{text!r} is no range of steps: expected A:B such as 0:20, or one step")
    if not colon:
        return range(int(first), int(first) + 1)
    return range(int(first or 0), int(last) if last else 10**12)
