"""Runs with a real engine, trained again without one, from their journals."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_run import Run, SharedEngine, run_apart, started, started_apart

pytestmark = pytest.mark.e2e

STEPS = 6


def told_by_replay(run: Run, log: Path) -> list[str]:
    """By `trireme replay`, which must find nothing."""
    with started("trireme", "replay", run.root, log=log) as replay:
        assert replay.wait() == 0, replay.tail()
        assert replay.left() == []
    return [line for line in replay.output.splitlines() if "trained again" in line or line.startswith("version ")]


def bit_identical(run: Run) -> list[str]:
    count = len(run.tensors(STEPS))
    return [
        *(f"version {version}: {count} tensors, bit-identical" for version in range(STEPS + 1)),
        f"{STEPS} steps trained again from the journal: every version has the digests that the engines confirmed",
    ]


def test_what_engines_confirmed_follows_from_the_journal_to_the_bit(straight: Run, tmp_path: Path) -> None:
    assert told_by_replay(straight, tmp_path / "replay.log") == bit_identical(straight)


def test_so_it_does_where_the_run_was_killed_and_went_on(engine: SharedEngine, tmp_path: Path) -> None:
    with started_apart(engine, tmp_path / "run") as pair:
        pair.until_trained(4)
        pair.kill()
    run = run_apart(engine, tmp_path / "run", "--resume")
    assert told_by_replay(run, tmp_path / "replay.log") == bit_identical(run)
