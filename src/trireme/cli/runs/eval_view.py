"""`trireme eval-view [FOLDER ...]`: view rewards and conversations of runs and evaluations in the terminal."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from trireme.base.errors import ConfigError

USUAL = ("outputs", "environments")


def eval_view(argv: list[str]) -> int:
    """Return 0 when the user leaves the viewer.

    Raises: ConfigError if there is no such folder, or no terminal.
    """
    parser = ArgumentParser(
        prog="trireme eval-view",
        description="Runs and evaluations with their mean rewards, their rollouts, and each one's conversation. The "
        "run may still be training. Writes nothing.",
        epilog="? shows all keys. Exit codes: 0, or 2 if there is nothing at the path.",
    )
    what = f"of a run, one with runs or evaluations below it, or a .jsonl file; by default {' and '.join(USUAL)}"
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="*", help=what)
    folders = (
        parser.parse_args(argv).folders or [Path(name) for name in USUAL if Path(name).is_dir()] or [Path(USUAL[0])]
    )

    from trireme.tools.viewer.sources import require_folders

    require_folders(folders)

    # Checked after the folders, so that a wrong path is reported in a script too.
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise ConfigError(
            "The viewer needs a terminal, and standard input or output is none. Expected both to be one. Run it in a "
            "terminal; `trireme dashboard` shows the same in a browser, and `trireme rollouts` writes files."
        )

    from trireme.tools.viewer.app import EvalView

    app = EvalView(folders)
    app.run()
    return app.return_code or 0
