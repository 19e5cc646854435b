"""The ranks of a trainer: a process starts one per rank on its machine, waits for them, and ends all when one fails.

The ranks rendezvous through an anonymous file that only they inherit. torchrun would open a TCP store on all
interfaces, and unpickle what it receives there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from trireme.base.errors import FINAL_EXIT_CODES
from trireme.base.processes import RANK_STORE, catch_signals, die_with_parent
from trireme.launch.process_tree import MARKER

RANKS_PARENT = "TRIREME_RANKS_PARENT"  # pid of the process that starts the ranks, for the ranks below it
KEEPER = "TRIREME_KEEPER"  # pid of the process that starts this machine's ranks again
POLL_S = 0.02
GRACE_S = 30.0  # between SIGTERM and SIGKILL: a rank may be writing a checkpoint


def become_ranks(num_ranks: int, command: Sequence[str], start: Callable[[Sequence[str]], int] | None = None) -> None:
    """Return in each rank. With several, the process that was started starts them, and ends with them.

    The ranks are tied to that process as it is to its parent.

    Args:
        num_ranks: on all machines together.
        command: module and arguments of a rank, which calls this again.
        start: run the ranks until they have ended; `run_ranks` if they are all on this machine.
    """
    if RANKS_PARENT in os.environ:
        return
    if num_ranks == 1:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        return

    # From here on only the parent of the ranks runs.
    os.environ[RANKS_PARENT] = str(os.getpid())
    sys.stdout.flush()
    sys.exit(start(command) if start else run_ranks(num_ranks, [sys.executable, "-m", *command]))


def end_with_parent() -> None:
    parent = os.environ.get(RANKS_PARENT) or os.environ.get(KEEPER) or os.environ.get(MARKER)
    if parent:
        die_with_parent(int(parent))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def run_ranks(num_ranks: int, command: Sequence[str], look: Callable[[], None] = lambda: None) -> int:
    """Run one process per rank until all have ended. Each must tie itself to this process (`end_with_parent`).

    Args:
        look: called again and again meanwhile, in this thread.

    Returns: 0; a final exit code (2, 3) if a rank ended with it; 128 + N after signal N; 1 after any other failure.
    """
    with catch_signals() as received:
        # A file in memory without a name: only processes that inherit the descriptor can open it.
        store = os.memfd_create("trireme-ranks")
        ranks = []
        for rank in range(num_ranks):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            environment = os.environ | {name: str(number) for name, number in numbers.items()}
            environment[RANK_STORE] = f"/proc/self/fd/{store}"
            ranks.append(subprocess.Popen(list(command), env=environment, pass_fds=(store,)))

        # One rank cannot train without the others: if one fails, or at a signal, end all of them.
        while None in (codes := [rank.poll() for rank in ranks]):
            if received or any(codes):
                for each in ranks:
                    each.terminate()

                # One deadline for all ranks, which save their shares of a checkpoint at the same time.
                give_up = time.monotonic() + GRACE_S
                for each in ranks:
                    try:
                        each.wait(max(0.0, give_up - time.monotonic()))
                    except subprocess.TimeoutExpired:
                        each.kill()
                        each.wait()

            look()
            time.sleep(POLL_S)
    if received:
        return 128 + received[0]
    return report_failed(dict(enumerate(codes))) if any(codes) else 0


def report_failed(codes: Mapping[int, int | None]) -> int:
    """Print the exit codes of ranks, without those that were stopped because of others. Return the one to end with: a
    final one (2, 3) if a rank ended with it, else 1."""
    failed = {rank: code for rank, code in codes.items() if code not in (0, -signal.SIGTERM)} or codes
    named = ", ".join(f"rank {rank}: {code}" for rank, code in failed.items())
    print(f"ranks failed, the others were stopped. Exit codes: {named}", file=sys.stderr)
    return next((code for code in FINAL_EXIT_CODES if code in codes.values()), 1)
