"""The index finds what the viewer finds, and follows batches that change, are damaged or vanish."""

import math
import shutil

import pytest

from support.runs.written_run import rewrite_batch, write_whole_run
from trireme.journal.journal import Journal
from trireme.tools.dashboard import rollout_index
from trireme.tools.dashboard.rollout_index import RolloutIndex, bring_up_to_date, fill
from trireme.tools.rollout_filters import parse_filter
from trireme.tools.rollouts import BatchFile

EVERYTHING = 10_000


@pytest.fixture(scope="module")
def rich_run(tmp_path_factory):
    config = write_whole_run(tmp_path_factory.mktemp("run"), batches=5, rich=True)
    rewrite_batch(config, 1, _say_other_things)
    return config


def _say_other_things(record):
    for number, rollout in enumerate(record.rollouts):
        rollout.completion = [{"role": "assistant", "content": f"Größe {number} 100% it's _x_"}]
        rollout.stop = "Length" if number % 2 else "done"


@pytest.fixture(scope="module")
def table(rich_run, tmp_path_factory):
    return filled(rich_run, tmp_path_factory.mktemp("cache"))


def filled(run, cache):
    index = RolloutIndex(run.paths.root, cache)
    index.create()
    list(index.update())
    return index


def found(table, line):
    rows = table.search(line, limit=EVERYTHING).rows
    return sorted((row["step"], row["number"]) for row in rows)


def found_by_the_viewer(run, line):
    chosen, kept = parse_filter(line), []
    for step in Journal(run.paths.journal).steps():
        file = BatchFile(Journal(run.paths.journal).path(step))
        file.read_more()
        kept += [(step, row.number) for row in file.rows if chosen.matches(row, file.record)]
    return sorted(kept)


@pytest.mark.parametrize(
    "line",
    [
        *("", "it", "-it", "größe", '"100% it\'s"', "_x_", "IT größe", "'; DROP TABLE rollouts; --", "%"),
        *("reward<1", "reward>=1.3", "-reward<1", "advantage>0", "-advantage>0", "tokens=4", "turns!=1", "rollout=2"),
        *("example>99999999999999999999", "example=3", "example!=3", "example~1", "example>=4", "-example=3"),
        *("reward<1e30", "env=a", "env~B", "-env=a", "step=2", "attempt>0", "step=2 group=13 -is:failed"),
        *("stop=length", "stop~en", "-stop~en", "stop!=done", "error~timeout", "-error~timeout", "flaws~trunc"),
        *("is:truncated", "-is:truncated", "is:failed", "-is:failed", "is:flawed", "-is:flawed"),
        *("reward<=1.3 rollout>1", "reward<2 env=a is:truncated", "größe -is:truncated reward>0.5"),
    ],
)
def test_a_search_finds_what_the_viewer_finds(rich_run, table, line):
    assert found(table, line) == found_by_the_viewer(rich_run, line)


def test_rollout_index_follows_changed_damaged_and_removed_batches(tmp_path):
    run = write_whole_run(tmp_path / "run", batches=4)
    before = {path: path.stat().st_mtime_ns for path in run.paths.root.rglob("*")}
    table = filled(run, tmp_path / "cache")
    assert list(table.update()) == []
    assert {path: path.stat().st_mtime_ns for path in run.paths.root.rglob("*")} == before
    rewrite_batch(run, 1, _say_other_things)
    assert list(table.update()) == [1]
    assert {step for step, _ in found(table, "größe")} == {1}
    path = Journal(run.paths.journal).path(2)
    path.write_bytes(path.read_bytes()[:-5])
    (path.parent / "batch_copy.msgpack").write_bytes(b"")  # of another program
    list(table.update())
    assert {step for step, _ in found(table, "")} == {0, 1, 3}
    ((step, trouble),) = table.ask("SELECT step, trouble FROM batches WHERE trouble != ''")
    assert (step, "checksum" in trouble) == (2, True)
    Journal(run.paths.journal).rewind(1)
    assert list(table.update()) == []
    assert {step for step, _ in found(table, "")} == {0}


@pytest.mark.parametrize("content", [b"", b"no table at all" * 1000])
def test_damaged_rollout_index_is_rebuilt(tmp_path, content):
    run = write_whole_run(tmp_path / "run", batches=2)
    file = RolloutIndex(run.paths.root, tmp_path).file
    file.write_bytes(content)
    table = filled(run, tmp_path)
    before = found(table, "")
    assert len(before) >= 12
    table.remove()
    file.write_bytes(b"not a table any more" * 1000)
    for _ in range(2):
        bring_up_to_date(table)
    assert found(table, "") == before


def test_rollout_index_starts_its_process_only_for_missing_batches(tmp_path, monkeypatch):
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(rollout_index, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(rollout_index, "QUIET_S", 0.0)
    monkeypatch.setattr(RolloutIndex, "keep_current", lambda table: started.append(table.progress()))
    run = write_whole_run(tmp_path / "run", batches=2)
    table = RolloutIndex(run.paths.root, tmp_path / "cache")
    table.create()
    assert (table.look(), started) == ((0, 2), [(0, 2)])
    fill(table)
    assert (table.look(), len(started)) == ((2, 2), 1)
    monkeypatch.setattr(rollout_index, "QUIET_S", math.inf)
    shutil.rmtree(run.paths.root)
    fill(table)
    assert (table.look(), len(started)) == ((2, 0), 1)
