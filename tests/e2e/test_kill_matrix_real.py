"""`kill -9` of each process of a run on vLLM: the weights are those of a run that is not disturbed, to the bit.

One case per process; every point of the protocol has its turn beside a scripted engine, in `test_kill_matrix.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from real_run import SharedEngine, run_apart
from scripted_kills import REAL, KilledRun, assert_same_weights, open_run

pytestmark = pytest.mark.slow

STEPS = 9
RANKS = 2
RECOVERY_S = 300.0  # vLLM takes most of a minute to come up beside others
CASES = (
    ("engine core", "engine.receiving"),
    ("inference server", "rollout.finished"),
    ("trainer rank 0", "trainer.sending"),
    ("trainer rank 1", "trainer.stepped.rank1"),
    ("orchestrator", "version.before_record"),
    ("environment worker", "environment.asked"),
    ("launcher", "journal.appended"),
)


def test_whichever_process_is_killed_the_weights_are_the_same(engine: SharedEngine, tmp_path: Path) -> None:
    flags = ["--max-steps", str(STEPS)]
    undisturbed = run_apart(engine, tmp_path / "undisturbed", *flags, "--trainer.num-ranks", str(RANKS))
    run = KilledRun(tmp_path, flags, command=REAL, name="on vLLM", ranks=RANKS, patience_s=RECOVERY_S)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 0, "version 0")
        for victim, point in CASES:
            run.kill_at(victim, point)
        run.wait(RECOVERY_S)
    assert_same_weights(run, undisturbed, STEPS)
