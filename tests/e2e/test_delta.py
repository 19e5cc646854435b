"""Changes alone, sent by real processes: the weights are those of a run that sends all, whoever dies meanwhile."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from real_run import Run, SharedEngine, run_apart
from scripted_kills import REAL, KilledRun, audit, first_other_version, open_run

pytestmark = pytest.mark.e2e

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
END_S = 240.0
RECOVERY_S = 300.0  # vLLM takes most of a minute to come up beside others
REAL_STEPS = 6


def small_run(folder: Path, tiny_model: Path, *flags: str) -> KilledRun:
    """Beside a scripted engine, which samples what the digests of its weights say."""
    more = ["--max-steps", str(STEPS), "--model.name", str(tiny_model), *SMALL_STEPS, *QUICKLY, *flags]
    return KilledRun(folder, more, name="delta", ranks=RANKS)


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All is sent each time, and nobody dies."""
    run = small_run(tmp_path_factory.mktemp("whole"), tiny_model)
    with open_run(run):
        run.start()
        run.wait(END_S)
    return run.run


def test_whoever_is_killed_changes_alone_make_the_same_weights(whole: Run, tiny_model: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path, tiny_model, *DELTA)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 1, "version 1")
        for victim, point in KILLS:
            run.kill_at(victim, point)
        run.wait(END_S)
    print("\n".join(run.story))
    other = first_other_version(run.run, whole)
    assert other is None, f"{other}\n{run.tell()}"
    assert run.run.weights(STEPS).read_bytes() == whole.weights(STEPS).read_bytes()
    assert_audited(run)
    assert_sends_little_unless_it_must(run.run)


def test_the_real_engine_computes_with_what_it_patched_also_after_it_was_killed(tmp_path: Path) -> None:
    """Each version is confirmed by digests of whole tensors, and by a probe of the engine's own logprobs."""
    flags = ["--max-steps", str(REAL_STEPS), *SMALL_STEPS, *DELTA, *QUICKLY]
    run = KilledRun(tmp_path, flags, command=REAL, name="delta on vLLM", patience_s=RECOVERY_S)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 2, "version 2")
        run.kill_at("engine core", "engine.receiving")
        run.wait(RECOVERY_S)
    print("\n".join(run.story))
    assert_audited(run)
    assert_sends_little_unless_it_must(run.run)
    assert max(row["mismatch_kl"] for row in run.run.rows("trainer")) < 1e-3


def test_a_synchronous_run_has_the_same_bits(straight: Run, engine: SharedEngine, tmp_path: Path) -> None:
    """In float32, where nearly everything changes."""
    run = run_apart(engine, tmp_path / "run", *DELTA, "--max-steps", "3")
    assert run.weights(3).read_bytes() == straight.weights(3).read_bytes()
    sent = [row["weights/changed_frac"] for row in run.rows("trainer")]
    assert min(sent) > 0.9


def assert_audited(run: KilledRun) -> None:
    found = audit(run.run)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}\n{run.tell()}"


def assert_sends_little_unless_it_must(run: Run) -> None:
    """Everything to those who had nothing, and at a twentieth of a step's bytes to the others."""
    rows = [row for row in run.rows("trainer") if "weights/changed_frac" in row]
    whole_bytes = max(row["weights/sent_bytes"] for row in rows)
    in_part = [row for row in rows if row["weights/changed_frac"] < 1]
    assert len(in_part) > len(rows) / 2
    assert all(row["weights/changed_frac"] < 0.05 for row in in_part)
    assert all(row["weights/sent_bytes"] < whole_bytes / 5 for row in in_part)
    assert any(later["weights/changed_frac"] == 1 for _, later in pairwise(rows)), "nobody was given everything again"
