"""`vf-rl`: a run from a single file of that format, in two panes of tmux or in one terminal."""

from __future__ import annotations

from trireme.cli.door import run_door
from trireme.cli.foreign import run_foreign


def main() -> None:
    run_door("vf-rl", vf_rl)


def vf_rl(argv: list[str]) -> int:
    return run_foreign(argv, program="vf-rl", kinds=("vf-rl",), rooms=("inference",))


if __name__ == "__main__":
    main()
