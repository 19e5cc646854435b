"""`trireme diff RUN RUN`: name the first difference of two runs, and what usually leads to it."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

from trireme.tools.diff.compare import compare_runs
from trireme.tools.diff.report import as_json, as_text


def diff(argv: list[str]) -> int:
    """Compare two runs, and return the exit code.

    Raises: ConfigError if a folder is not a run's; JournalCorrupt if an entry is not what was written.
    """
    parser = ArgumentParser(
        prog="trireme diff",
        description="Compares two runs from their folders alone, to the bit: configuration, versions of weights, and "
        "of each batch examples, tokens, logprobs, rewards and advantages, then loss and norm of the gradient. Says "
        "which difference came first and what usually leads to it. The runs may be going on. Writes nothing.",
        epilog="Ends with 0 where nothing differs as far as both go (ports, paths and the like do not count), 1 where "
        "something does, 2 where a folder is not a run's, 3 where a journal is damaged. docs/diff.md has examples.",
    )
    parser.add_argument("a", metavar="RUN", type=Path, help="the folder of a run, called A")
    parser.add_argument("b", metavar="RUN", type=Path, help="the folder of another one, called B")
    parser.add_argument("--json", action="store_true", help="for machines")
    arguments = parser.parse_args(argv)
    comparison = compare_runs(arguments.a, arguments.b)
    print(json.dumps(as_json(comparison), indent=1) if arguments.json else as_text(comparison))
    return 0 if comparison.same else 1
