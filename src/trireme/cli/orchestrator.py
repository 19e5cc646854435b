"""`orchestrator`: rolls out, scores and batches. Started by `rl`, or alone."""

from __future__ import annotations

import os

from trireme.base.log import start_logging
from trireme.base.paths import remove_partial_files
from trireme.base.processes import quick_imports
from trireme.base.token import status_key, write_key
from trireme.cli.command import open_process, run_command
from trireme.launch.folder import hold
from trireme.launch.process_tree import MARKER


def main() -> None:
    run_command("orchestrator", orchestrator)


def orchestrator(argv: list[str]) -> None:
    config, _ = open_process("orchestrator", argv)
    start_logging("orchestrator", config.log_level)

    with quick_imports():
        from trireme.orchestrator.loop import orchestrate

    # Two orchestrators in one folder would both fill the journal.
    with hold(config.paths, "orchestrator"):
        remove_partial_files(config.paths.journal)
        if MARKER not in os.environ:  # started alone; the launcher writes it for its children
            write_key(config.paths.root, status_key())
        orchestrate(config)


if __name__ == "__main__":
    main()
