"""`prime-rl`: a run from a flat file, a file of hosted training or one of `rl`, in three panes or in one terminal."""

from __future__ import annotations

from trireme.cli.door import run_door
from trireme.cli.foreign import run_foreign


def main() -> None:
    run_door("prime-rl", prime_rl)


def prime_rl(argv: list[str]) -> int:
    return run_foreign(argv, program="prime-rl", kinds=("flat", "hosted", "run"), rooms=("inference", "orchestrator"))


if __name__ == "__main__":
    main()
