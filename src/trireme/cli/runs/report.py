"""`trireme report RUN`: write one page about a run, for readers who did not follow it."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.config.arguments import count
from trireme.config.files import find_run_file


def report(argv: list[str]) -> int:
    """Return 0 when the report is on disk. What cannot be written is refused before the run is read.

    Raises: ConfigError where the folder is not a run's; OSError without room; JournalCorrupt where a file is damaged.
    """
    parser = ArgumentParser(
        prog="trireme report",
        description="Writes one page about a run, out of its folder alone: curves, where the time went, warnings, "
        "rollouts from start to end, the audit's verdict, configuration, and versions. The HTML file needs no network "
        "and no other file. The run may be live.",
        epilog="The exit code is 0 when the report is on disk, 2 where the folder is not a run's or the report cannot "
        "be written, 3 where the journal is damaged. docs/report.md lists the sections.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder")
    add("--out", "--output", metavar="FILE", type=Path, help="RUN/report.html by default")
    add("--rollouts", metavar="N", type=count, default=2, help="to show of each of 3 batches; 2")
    add("--no-audit", action="store_true", help="leave out the section that reads the whole journal")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out or arguments.run / "report.html"
    if out.suffix != ".html":
        raise ConfigError(f"{out}: a report is written as .html - expected a name that ends so. Change it.")
    find_run_file(arguments.run, "trainer")
    out.parent.mkdir(parents=True, exist_ok=True)

    from trireme.tools.report.sections import build_report
    from trireme.tools.report.writing import to_html

    built = build_report(arguments.run, num_rollouts=arguments.rollouts, audits=not arguments.no_audit)
    with atomic_write(out) as file:
        file.write(to_html(built).encode())
    print(out)
    return 0
