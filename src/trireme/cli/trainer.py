"""`trainer`: takes gradient steps on the batches of an orchestrator. Started by `rl`, or alone."""

from __future__ import annotations

from trireme.base.log import start_logging
from trireme.cli.door import become_ranks, open_process, rank, run_door


def main() -> None:
    run_door("trainer", trainer, abruptly=True)


def trainer(argv: list[str]) -> None:
    opened = open_process("trainer", argv)
    if opened is None:
        return
    config = opened.config
    become_ranks(config.trainer.num_ranks or 1, "trireme.cli.trainer", opened.run_file)
    start_logging("trainer" if rank() == 0 else f"trainer.{rank()}", config.log_level)

    from trireme.trainer.loop import train

    train(config)


if __name__ == "__main__":
    main()
