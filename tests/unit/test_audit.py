"""The audit finds nothing in a run that did what it should, at any moment of it; and how it says what it finds.

What it finds: see `test_audit_faults.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from planted_faults import change_lines
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.cli.audit import audit
from trireme.config.orchestrator import Advantage, Buffer
from trireme.config.run import RunConfig
from trireme.config.written import write_run
from trireme.launch.rewind import rewind
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord
from trireme.ledger.versions import Versions
from trireme.monitor.audit.audit import audit_run
from trireme.monitor.audit.report import Report
from written_run import (
    WrittenRun,
    build_config,
    build_rich_config,
    digests_of,
    rewrite_batch,
    write_whole_run,
)

DEADLINE_S = 60


def assert_holds(folder: Path) -> Report:
    report = audit_run(folder)
    assert report.holds, report.text(everything=True)
    return report


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> RunConfig:
    return write_whole_run(tmp_path_factory.mktemp("written") / "run")


@pytest.fixture
def config(written, tmp_path) -> RunConfig:
    """A run of five batches of one's own, to plant a fault in."""
    shutil.copytree(written.paths.root, tmp_path / "run")
    return written.model_copy(update={"output_dir": tmp_path / "run"})


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_it_holds_at_every_moment_of_a_run(tmp_path, level, seed):
    """Whatever was written last: a process may be killed between any two files."""
    run = WrittenRun(build_config(tmp_path, max_async_level=level, seed=seed))
    moments = [(moment, assert_holds(tmp_path)) for moment in run.write(6)]
    report = moments[-1][1]
    assert len(moments) > 30
    assert report.summary.batches == 6
    assert report.summary.trained == 36
    assert report.summary.checkpoints == [2, 4, 6]
    assert report.summary.lag == ((0, 0) if level == 0 else (0, 2)) or level
    assert len(report.summary.dropped_for) > 1


def test_it_holds_where_the_last_line_of_the_metrics_is_cut_off_anywhere(config):
    content = config.paths.metrics.read_bytes()
    newest = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(newest, len(content)):
        config.paths.metrics.write_bytes(content[:end])
        assert_holds(config.paths.root)


def test_it_holds_at_every_moment_of_going_back_and_of_the_other_way_from_there(config):
    rewound = [*_moves_of_going_back(config, version=2)]
    assert len(rewound) > 6
    for source, target in rewound:
        target.parent.mkdir(exist_ok=True)
        source.rename(target)
        assert_holds(config.paths.root)
    for _ in WrittenRun(config).go_on(2, 5):
        assert_holds(config.paths.root)
    report = assert_holds(config.paths.root)
    assert report.summary.batches == 5
    assert report.summary.set_aside
    assert "ways not taken, set aside: checkpoints/set_aside_" in report.text(everything=False)


def _moves_of_going_back(config: RunConfig, version: int) -> Iterator[tuple[Path, Path]]:
    """One file after the other, as `rewind` moves them: by kind, the newest first."""
    root, twin = config.paths.root, config.paths.root.with_name("twin")
    shutil.copytree(root, twin)
    rewind(RunPaths(twin), version)
    order = ["checkpoints/step_", "journal/version_", "weights/step_", "journal/batch_"]
    moved = [path.relative_to(twin) for path in twin.glob("*/set_aside_*/*")]
    moved.sort(key=lambda path: path.name, reverse=True)
    moved.sort(key=lambda path: [f"{path.parts[0]}/{path.name}".startswith(kind) for kind in order].index(True))
    for path in moved:
        yield root / path.parts[0] / path.name, root / path


def test_a_run_that_goes_on_with_other_settings_holds_by_those_that_each_batch_was_filled_by(config):
    rewind(config.paths, 2)
    other = build_config(config.paths.root, seed=9, max_async_level=0)
    write_run(other, other.paths.run_config)
    for _ in WrittenRun(other).go_on(2, 5):
        assert_holds(config.paths.root)


def test_a_run_that_goes_on_from_where_it_was_cut_off_after_going_back_half_way_holds(config):
    """Its versions were set aside, its batches were not: it goes on along its old way, and confirms them anew."""
    for source, target in _moves_of_going_back(config, version=2):
        if "batch" not in source.name:
            target.parent.mkdir(exist_ok=True)
            source.rename(target)
    versions = Versions(config.paths.journal)
    for version in (3, 4, 5):
        assert_holds(config.paths.root)
        versions.record(version, ["http://127.0.0.1:8000"], digests_of(version), 1e-7)
    assert_holds(config.paths.root)


def test_the_summary_counts_what_there_is(config):
    records = [Journal(config.paths.journal).read(step) for step in range(5)]
    summary = assert_holds(config.paths.root).summary
    assert summary.trained == 30
    assert summary.dropped == sum(len(record.dropped) for record in records)
    assert summary.dropped == sum(summary.dropped_for.values())
    assert summary.groups == records[-1].state.next_group
    assert summary.open_groups == len(records[-1].state.open_groups)
    samples = [sample for record in records for rollout in record.rollouts for sample in rollout.samples]
    assert summary.trained_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert summary.versions_confirmed == 6


def test_a_run_that_has_only_begun_holds(tmp_path):
    next(WrittenRun(build_config(tmp_path)).write(1))
    assert assert_holds(tmp_path).summary.batches == 0


def test_a_run_that_was_moved_holds_where_it_lies_now(config, tmp_path):
    shutil.move(config.paths.root, tmp_path / "elsewhere")
    assert_holds(tmp_path / "elsewhere")


def test_a_version_may_be_confirmed_again(config):
    Versions(config.paths.journal).record(5, ["http://127.0.0.1:8001"], digests_of(5), 0.0)
    assert_holds(config.paths.root)


def test_an_export_that_somebody_took_away_is_worth_a_note(config):
    shutil.rmtree(config.paths.weights / "step_2")
    report = assert_holds(config.paths.root)
    assert "no export of checkpoint 2" in report.findings.notes[0]


# what it says, and how it ends


def test_the_command_ends_with_0_1_or_2(config, tmp_path, capsys):
    assert audit([str(config.paths.root)]) == 0
    assert "nothing was lost, and nothing was trained twice" in capsys.readouterr().out
    rewrite_batch(config, 2, lambda record: record.rollouts.pop(1))
    assert audit([str(config.paths.root)]) == 1
    said = capsys.readouterr().out
    assert "batch 2: group" in said
    assert "expected: one fate of each place" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty is not a run's folder - expected .*run\.json"):
        audit([str(tmp_path / "empty")])


def test_only_the_first_contradiction_is_shown_unless_all_are_asked_for(config, capsys):
    for step in (3, 1):
        rewrite_batch(config, step, lambda record: record.rollouts.pop(1))
    audit([str(config.paths.root)])
    first = capsys.readouterr().out
    assert "batch 1: group" in first
    assert "batch 3: group" not in first
    audit([str(config.paths.root), "--all"])
    assert "batch 3: group" in capsys.readouterr().out


def test_machines_get_json(config, capsys):
    rewrite_batch(config, 2, lambda record: record.rollouts.pop(1))
    assert audit([str(config.paths.root), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is False
    assert said["num_contradictions"] == len(said["contradictions"]) > 0
    assert said["contradictions"][0]["step"] == 2
    assert said["summary"]["batches"] == 5


def test_thousands_of_contradictions_are_counted_and_not_all_kept(tmp_path):
    config = write_whole_run(tmp_path, batches=12)
    change_lines(lambda rows: rows.extend({"step": 10**6 + n, "process": "trainer"} for n in range(5000)))(config)
    shutil.rmtree(config.paths.journal)
    report = audit_run(tmp_path)
    assert not report.holds
    assert len(report.text(everything=True)) < 100_000


def test_it_needs_no_torch_and_no_process(config):
    code = (
        "import sys\nfrom trireme.cli.trireme import trireme\n"
        f"code = trireme(['audit', {str(config.paths.root)!r}])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


# where a batch goes by what happened: pools, a curriculum, running means


@pytest.fixture(scope="module")
def rich_written(tmp_path_factory) -> RunConfig:
    return write_whole_run(tmp_path_factory.mktemp("rich") / "run", batches=7, rich=True)


@pytest.fixture
def rich_config(rich_written, tmp_path) -> RunConfig:
    shutil.copytree(rich_written.paths.root, tmp_path / "run")
    return rich_written.model_copy(update={"output_dir": tmp_path / "run"})


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_with_everything_to_go_by_holds_at_every_moment(tmp_path, level):
    run = WrittenRun(build_rich_config(tmp_path, max_async_level=level, seed=level))
    moments = [assert_holds(tmp_path) for _ in run.write(6)]
    assert moments[-1].summary.batches == 6


@pytest.mark.parametrize("gone", [0, 2, 5])
def test_after_a_missing_batch_the_data_order_goes_on_from_what_the_next_one_says(rich_config, gone):
    (rich_config.paths.journal / f"batch_{gone:06d}.msgpack").unlink()
    report = audit_run(rich_config.paths.root)
    assert {one.room for one in report.findings.in_order()} == {"journal"}, report.text(everything=True)


def test_a_run_that_goes_on_with_other_pools_and_stages_holds(rich_config):
    rewind(rich_config.paths, 2)
    other = build_rich_config(rich_config.paths.root, seed=5)
    fewer = other.orchestrator.model_copy(
        update={"curriculum": other.orchestrator.curriculum[:1], "buffer": Buffer(), "advantage": Advantage()}
    )
    other = other.model_copy(update={"orchestrator": fewer})
    write_run(other, other.paths.run_config)
    for _ in WrittenRun(other).go_on(2, 4):
        assert_holds(rich_config.paths.root)
    again = build_rich_config(rich_config.paths.root, seed=6)
    write_run(again, again.paths.run_config)
    for _ in WrittenRun(again).go_on(4, 6):
        assert_holds(rich_config.paths.root)


def test_a_journal_of_before_there_were_flaws_and_outcomes_holds(config):
    def as_before(record: BatchRecord) -> None:
        record.outcomes = []
        record.rules = msgspec.structs.replace(record.rules, filters=None)
        for rollout in record.rollouts:
            rollout.flaws, rollout.num_turns = [], 0
        added = [name for name in record.metrics if name.startswith(("filters/", "turns/", "data/", "env/"))]
        for name in added:
            if not name.endswith("/num_turns"):
                del record.metrics[name]

    for step in range(5):
        rewrite_batch(config, step, as_before)
    assert_holds(config.paths.root)


def test_a_function_of_the_users_that_is_no_more_is_worth_a_note(config):
    def as_custom(record: BatchRecord) -> None:
        record.rules = msgspec.structs.replace(record.rules, advantage="custom", advantage_path="gone.py:best")

    rewrite_batch(config, 2, as_custom)
    (note,) = assert_holds(config.paths.root).findings.notes
    assert "are not compared" in note
    assert "gone.py does not exist" in note


def test_masked_tokens_do_not_count_as_trained(rich_config):
    records = [Journal(rich_config.paths.journal).read(step) for step in range(7)]
    trained = [rollout for record in records for rollout in record.rollouts if rollout.masked is None]
    tokens = sum(int(sample.loss_mask.sum()) for rollout in trained for sample in rollout.samples)
    assert assert_holds(rich_config.paths.root).summary.trained_tokens == tokens
