"""Changes alone, sent by real processes: the weights are those of a run that sends all, also if processes die."""

from __future__ import annotations

from pathlib import Path

from real_run import Run
from scripted_kills import REAL, KilledRun, assert_audited, assert_same_weights, finish_undisturbed, open_run

STEPS = 24
RANKS = 2
SMALL_STEPS = ("--inference.model.dtype", "bfloat16", "--trainer.optim.lr", "1e-6")
DELTA = ("--weight-broadcast.delta", "true")
QUICKLY = ("--supervisor.backoff-s", "0.2", "--weight-broadcast.timeout-s", "60")
KILLS = (
    ("engine core", "engine.receiving"),
    ("trainer rank 1", "trainer.sending.rank1"),
    ("orchestrator", "version.before_record"),
    ("inference server", "update.paused"),
)
RECOVERY_S = 300.0  # vLLM takes most of a minute to come up beside others
REAL_STEPS = 6


def small_run(folder: Path, tiny_model: Path, *flags: str) -> KilledRun:
    """Beside a scripted engine, which samples what the digests of its weights say."""
    more = ["--max-steps", str(STEPS), "--model.name", str(tiny_model), *SMALL_STEPS, *QUICKLY, *flags]
    return KilledRun(folder, more, name="delta", ranks=RANKS)


def test_changes_alone_make_the_same_weights_whichever_process_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    whole = finish_undisturbed(small_run(tmp_path / "whole", tiny_model))
    run = small_run(tmp_path / "delta", tiny_model, *DELTA)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 1, "version 1")
        for victim, point in KILLS:
            run.kill_at(victim, point)
        run.wait()
    assert_same_weights(run, whole, STEPS)
    assert_sends_little(run.run)


def test_the_real_engine_computes_with_what_it_patched_also_after_it_was_killed(tmp_path: Path) -> None:
    """Each version is confirmed by digests of whole tensors, and by a probe of the engine's own logprobs. Of a server
    that is killed, no process is left at the end."""
    flags = ["--max-steps", str(REAL_STEPS), *SMALL_STEPS, *DELTA, *QUICKLY]
    run = KilledRun(tmp_path, flags, command=REAL, name="delta on vLLM", patience_s=RECOVERY_S)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 2, "version 2")
        run.kill_at("inference server", "update.paused")
        run.wait(RECOVERY_S)
    assert_audited(run)
    assert_sends_little(run.run)
    assert max(row["mismatch_kl"] for row in run.run.rows("trainer")) < 1e-3


def assert_sends_little(run: Run) -> None:
    """Everything to engines that had nothing, and at a twentieth of a step's bytes to the others."""
    rows = [row for row in run.rows("trainer") if "weights/changed_frac" in row]
    whole_bytes = max(row["weights/sent_bytes"] for row in rows)
    in_part = [row for row in rows if row["weights/changed_frac"] < 1]
    assert len(in_part) > len(rows) / 2
    assert all(row["weights/changed_frac"] < 0.05 for row in in_part)
    assert all(row["weights/sent_bytes"] < whole_bytes / 5 for row in in_part)
    assert any(row["weights/changed_frac"] == 1 for row in rows[1:]), "no engine was given everything again"
