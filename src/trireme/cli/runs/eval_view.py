"""`trireme eval-view [FOLDER ...]`: view rewards and conversations of runs and evaluations in the terminal."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from trireme.base.errors import ConfigError

USUAL = ("outputs", "environments")
SIZE = (120, 36)


def eval_view(argv: list[str]) -> int:
    """Return 0 when the user leaves the viewer, or when the picture is written.

    Raises: ConfigError if there is no such folder, or no terminal.
    """
    parser = ArgumentParser(
        prog="trireme eval-view",
        description="Runs and evaluations with their mean rewards, their rollouts, and each one's conversation; of "
        "training also tokens with logprobs, advantages and versions. The run may still be training. Writes nothing.",
        epilog="? shows all keys. Exit codes: 0, or 2 if there is nothing at the path.",
    )
    add = parser.add_argument
    what = f"of a run, one with runs or evaluations below it, or a .jsonl file; by default {' and '.join(USUAL)}"
    add("folders", metavar="FOLDER", type=Path, nargs="*", help=what)
    add("--capture", metavar="FILE", type=Path, help="write the screen to FILE.svg or FILE.txt instead")
    add("--press", metavar="KEYS", default="", help="keys before the capture, as `down,enter,t`")
    add("--size", metavar="WxH", type=_size, default=SIZE, help="of the capture; 120x36 by default")
    arguments = parser.parse_args(argv)
    folders = arguments.folders or [Path(name) for name in USUAL if Path(name).is_dir()] or [Path(USUAL[0])]

    from trireme.tools.viewer.sources import require_folders

    require_folders(folders)
    if not (arguments.capture or (sys.stdout.isatty() and sys.stdin.isatty())):
        raise ConfigError(
            "The viewer needs a terminal, and standard input or output is none. "
            "Run it in a terminal, or let `--capture screen.txt` write what it would show."
        )

    from trireme.tools.viewer.app import EvalView

    app = EvalView(folders)
    if arguments.capture:
        from trireme.tools.viewer.capture import capture

        keys = [key for key in arguments.press.split(",") if key]
        capture(app, arguments.capture, keys=keys, size=arguments.size)
    else:
        app.run()
    return app.return_code or 0


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) >= 20 and int(height) >= 5):
        raise ArgumentTypeError(f"{text!r} is no size of a terminal: expected WIDTHxHEIGHT, 20x5 or more, as 80x24")
    return int(width), int(height)
