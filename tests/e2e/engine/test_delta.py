"""Changes alone, sent to vLLM: it serves the trainer's weights, also after it was killed. See `test_kill_matrix.py`."""

from pathlib import Path

import pytest

from scripted_kills import REAL, KilledRun, assert_audited, open_run

FLAGS = ["--max-steps", "6", "--inference.model.dtype", "bfloat16", "--trainer.optim.lr", "1e-6"]
FLAGS += ["--weight-broadcast.delta", "true", "--supervisor.backoff-s", "0.2", "--weight-broadcast.timeout-s", "60"]
RECOVERY_S = 300.0  # vLLM takes most of a minute to come up beside others


@pytest.mark.slow  # the quick tier sends changes to vLLM in test_synchronous_run.py, and kills beside a scripted engine
def test_the_real_engine_computes_with_what_it_patched_also_after_it_was_killed(tmp_path: Path) -> None:
    """Each version is confirmed by digests of whole tensors, and by a probe of the engine's own logprobs. Of a server
    that is killed, no process is left at the end."""
    run = KilledRun(tmp_path, FLAGS, command=REAL, name="delta on vLLM", patience_s=RECOVERY_S)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 2, "version 2")
        run.kill_at("inference server", "update.paused")
        run.wait(RECOVERY_S)
    assert_audited(run)
    assert max(row["mismatch_kl"] for row in run.run.rows("trainer")) < 1e-3
    # Everything goes to engines that have nothing, and a twentieth of all values to the others.
    rows = [row for row in run.run.rows("trainer") if "weights/changed_frac" in row]
    whole_bytes = max(row["weights/sent_bytes"] for row in rows)
    in_part = [row for row in rows if row["weights/changed_frac"] < 1]
    assert len(in_part) > len(rows) / 2
    assert all(row["weights/changed_frac"] < 0.05 for row in in_part)
    assert all(row["weights/sent_bytes"] < whole_bytes / 5 for row in in_part)
    assert any(row["weights/changed_frac"] == 1 for row in rows[1:]), "no engine was given everything again"
