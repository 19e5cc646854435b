"""`inference`: vLLM holds the policy and generates. Started by `rl`, or alone."""

from __future__ import annotations

from trireme.base.log import start_logging
from trireme.cli.door import open_process, run_door


def main() -> None:
    run_door("inference", inference)


def inference(argv: list[str]) -> None:
    opened = open_process("inference", argv)
    if opened is None:
        return
    config = opened.config
    start_logging("inference", config.log_level)

    from trireme.inference.server import serve

    serve(config)


if __name__ == "__main__":
    main()
