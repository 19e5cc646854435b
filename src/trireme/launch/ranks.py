"""Start the trainer's ranks on one machine, wait for them, and end all of them when one fails.

The ranks rendezvous through an anonymous file that only they inherit. torchrun would open a TCP store on all
interfaces, and unpickle what it receives there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from trireme.base.errors import FINAL_EXIT_CODES
from trireme.base.processes import RANK_STORE

POLL_S = 0.02
GRACE_S = 30.0  # between SIGTERM and SIGKILL: a rank may be writing a checkpoint


def run_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """Run one process per rank until all have ended. Each must tie itself to this process (`end_with_parent`).

    Returns: 0; a final exit code (2, 3) where a rank ended with it; 128 + N after signal N; 1 after any other failure.
    """
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda n, _: received.append(n))
    store = os.memfd_create("trireme-ranks")
    ranks = [_start(command, rank, num_ranks, store) for rank in range(num_ranks)]
    while None in (codes := [rank.poll() for rank in ranks]):
        if received or any(codes):
            _end(ranks)
        time.sleep(POLL_S)
    return 128 + received[0] if received else _exit_code([code for code in codes if code is not None])


def _start(command: Sequence[str], rank: int, num_ranks: int, store: int) -> subprocess.Popen[bytes]:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environment = {name: str(number) for name, number in who.items()} | {RANK_STORE: f"/proc/self/fd/{store}"}
    return subprocess.Popen(list(command), env=os.environ | environment, pass_fds=(store,))


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    give_up = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _exit_code(codes: Sequence[int]) -> int:
    if not any(codes):
        return 0
    first = {rank: code for rank, code in enumerate(codes) if code not in (0, -signal.SIGTERM)}
    named = ", ".join(f"rank {rank}: {code}" for rank, code in (first or dict(enumerate(codes))).items())
    print(f"ranks failed, the others were stopped. Exit codes: {named}", file=sys.stderr)
    return next((code for code in FINAL_EXIT_CODES if code in codes), 1)
