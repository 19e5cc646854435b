"""`trireme audit RUN`: prove from disk, with no process alive, that nothing was lost or trained twice."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path

from trireme.tools.audit.audit import audit_run


def audit(argv: list[str]) -> int:
    """Audit a run, and return the exit code. Raises: ConfigError if the folder is not a run's."""
    parser = ArgumentParser(
        prog="trireme audit",
        description="Reads a run's journal, confirmed versions, checkpoints and metrics, and proves that every rollout "
        "has one fate, that examples came in order, and that every token that was trained on is by confirmed weights. "
        "The run may be finished, killed, or going on. Writes nothing.",
        epilog="Ends with 0 where all holds, 1 at a contradiction, 2 where the folder is not a run's.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder; it may have been moved")
    code = "call this function if the run's advantages are that custom function; no code of a run is called otherwise"
    add("--run-code", metavar="MODULE:NAME", help=code)
    add("--json", action="store_true", help="all contradictions and notes, for machines")
    arguments = parser.parse_args(argv)
    report = audit_run(arguments.run, run_code=arguments.run_code)
    print(json.dumps(report.as_json(), indent=1) if arguments.json else report.text())
    return 0 if report.holds else 1
