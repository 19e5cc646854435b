"""`trainer`: train on the batches of an orchestrator. Started by `rl`, or alone."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial

from trireme.base.log import start_logging
from trireme.base.processes import quick_imports
from trireme.cli.command import open_process, run_command
from trireme.cli.machines import keep_ranks, run_torchrun, torchrun_arguments
from trireme.launch.folder import hold
from trireme.launch.ranks import KEEPER, RANKS_PARENT, become_ranks, rank


def main() -> None:
    run_command("trainer", trainer, abruptly=True)


def trainer(argv: list[str]) -> int | None:
    config, run_file = open_process("trainer", argv)
    torchrun = torchrun_arguments(config)

    # On several machines a keeper on each restarts its ranks, as no launcher sees them all.
    if torchrun and not (KEEPER in os.environ or RANKS_PARENT in os.environ):
        return keep_ranks(config, run_file)

    command = ["trireme.cli.trainer", "--run", str(run_file)]
    become_ranks(config.trainer.num_ranks or 1, command, partial(run_torchrun, torchrun) if torchrun else None)
    start_logging("trainer" if rank() == 0 else f"trainer.{rank()}", config.log_level)

    with quick_imports():
        from trireme.trainer.loop import train
        from trireme.trainer.out_of_memory import explain_out_of_memory

    with ExitStack() as stack:
        # One lock for all ranks: a second trainer in the folder would write the same checkpoints.
        if rank() == 0:
            stack.enter_context(hold(config.paths, "trainer"))
        stack.enter_context(explain_out_of_memory("trainer."))
        train(config)
    return None


if __name__ == "__main__":
    main()
