"""Files that a crash, a full disk or a bad sector cut short or changed: read to the last whole record, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trireme.base.errors import JournalCorrupt
from trireme.ledger.entry import read_entry, write_entry
from trireme.ledger.journal import Journal
from trireme.ledger.manifest import MANIFEST, complete_steps, describe_file, find_damage, read_manifest
from trireme.ledger.records import BatchRecord
from trireme.ledger.versions import Version, Versions
from trireme.messages import encode
from trireme.monitor.audit.audit import audit_run
from trireme.monitor.metrics import MetricsFile, latest_by_step, read_metrics
from written_run import WrittenRun, build_config, digests_of, write_checkpoint, write_whole_run

WAYS_OUT = "Restore it."


@pytest.fixture(scope="module")
def journal(tmp_path_factory) -> Journal:
    return Journal(write_whole_run(tmp_path_factory.mktemp("run"), batches=3).paths.journal)


@pytest.fixture
def small_batch(tmp_path) -> tuple[Path, bytes]:
    """Hardly more than a header: one bit after the other can be tried."""
    path = tmp_path / "batch_000007.msgpack"
    record = BatchRecord(step=7, rollouts=[], dropped=[], state=Journal(tmp_path).head_state())
    write_entry(path, 7, record)
    return path, path.read_bytes()


@pytest.fixture
def small_version(tmp_path) -> tuple[Path, bytes]:
    Versions(tmp_path).record(7, ["http://127.0.0.1:8000"], digests_of(7), 1e-7)
    path = Versions(tmp_path).path(7)
    return path, path.read_bytes()


def refused(path: Path, kind: type = BatchRecord) -> str:
    with pytest.raises(JournalCorrupt) as caught:
        read_entry(path, 7, kind, ways_out=WAYS_OUT)
    return str(caught.value)


def assert_says_what_and_what_to_do(words: str, path: Path) -> None:
    assert str(path) in words
    assert WAYS_OUT in words or "Go on with the version that wrote it" in words


def test_a_batch_that_was_cut_off_anywhere_is_refused(small_batch):
    path, content = small_batch
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert_says_what_and_what_to_do(refused(path), path)


def test_a_version_that_was_cut_off_anywhere_is_refused(small_version):
    path, content = small_version
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert_says_what_and_what_to_do(refused(path, Version), path)


@pytest.mark.parametrize("kind", ["batch", "version"])
@pytest.mark.parametrize("bit", range(8))
def test_an_entry_with_any_one_bit_flipped_is_refused(small_batch, small_version, kind, bit):
    path, content = small_batch if kind == "batch" else small_version
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
        assert_says_what_and_what_to_do(refused(path, BatchRecord if kind == "batch" else Version), path)


@pytest.mark.parametrize("more", [b"\0", b"\n", b"\xff", b"x" * 100])
def test_an_entry_that_something_was_added_to_is_refused(small_batch, more):
    path, content = small_batch
    for place in range(len(content) + 1):
        path.write_bytes(content[:place] + more + content[place:])
        refused(path)


def test_a_hole_in_a_batch_as_a_power_cut_leaves_it_is_refused(journal, tmp_path):
    """A file of the right length whose blocks never reached the disk."""
    content = journal.path(1).read_bytes()
    path = tmp_path / journal.path(1).name
    for begin in range(0, len(content), 512):
        path.write_bytes(content[:begin] + b"\0" * len(content[begin : begin + 512]) + content[begin + 512 :])
        with pytest.raises(JournalCorrupt):
            Journal(tmp_path).read(1)


def test_a_larger_batch_that_was_cut_off_here_and_there_is_refused(journal, tmp_path):
    content = journal.path(1).read_bytes()
    path = tmp_path / journal.path(1).name
    for length in {*range(0, len(content), 37), len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(JournalCorrupt):
            Journal(tmp_path).read(1)


def test_a_run_whose_newest_batch_is_torn_says_so_and_does_not_go_on_from_the_one_before(journal, tmp_path):
    """The trainer may have had it: going on without it would train another batch under its number."""
    folder = shutil.copytree(journal.path(0).parent, tmp_path / "journal")
    torn = Journal(folder).path(2)
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(JournalCorrupt, match=r"batch_000002\.msgpack.*--trainer\.ckpt\.resume-step 2 or less"):
        Journal(folder).head_state()


def test_what_a_dying_process_left_half_written_beside_them_is_not_read(journal, tmp_path):
    folder = shutil.copytree(journal.path(0).parent, tmp_path / "journal")
    before, known = encode(Journal(folder).head_state()), Versions(folder).known()
    (folder / ".batch_000003.msgpack.123.partial").write_bytes(journal.path(1).read_bytes()[:40])
    (folder / ".version_000009.msgpack.123.partial").write_bytes(b"")
    assert encode(Journal(folder).head_state()) == before
    assert Versions(folder).known() == known


# metrics


@pytest.fixture
def metrics(tmp_path) -> Path:
    path = tmp_path / "metrics.jsonl"
    for step in range(4):
        MetricsFile(path, "orchestrator").append(step, {"reward/mean": step / 8, "tokens/total": 10 * step})
        MetricsFile(path, "trainer").append(step, {"loss": 1.0 / (step + 1)})
    return path


def test_metrics_that_were_cut_off_anywhere_are_read_to_the_last_whole_line(metrics):
    content = metrics.read_bytes()
    whole = [json.loads(line) for line in content.splitlines()]
    for length in range(len(content) + 1):
        metrics.write_bytes(content[:length])
        rows, offset = read_metrics(metrics)
        assert rows == whole[: content[:length].count(b"\n")]
        assert offset == content[:length].rfind(b"\n") + 1


def test_a_line_after_one_that_was_cut_off_anywhere_is_read_and_nothing_else_is_made_up(metrics):
    """The process that comes back writes on behind what the one before left."""
    content = metrics.read_bytes()
    whole = [json.loads(line) for line in content.splitlines()]
    last = content[:-1].rindex(b"\n") + 1
    for length in range(last, len(content)):
        metrics.write_bytes(content[:length])
        MetricsFile(metrics, "trainer").append(9, {"loss": 0.5})
        rows, _ = read_metrics(metrics)
        is_whole = length == len(content) - 1  # only its newline was cut off
        assert rows[:-1] == (whole if is_whole else whole[:-1])
        assert (rows[-1]["step"], rows[-1]["loss"]) == (9, 0.5)


def test_no_bit_that_flips_in_a_line_takes_another_line_along(metrics):
    content = metrics.read_bytes()
    begin = content.index(b"\n") + 1
    end = content.index(b"\n", begin)
    others = [json.loads(line) for number, line in enumerate(content.splitlines()) if number != 1]
    for place in range(begin, end):
        metrics.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        rows, _ = read_metrics(metrics)
        assert [row for row in rows if row in others] == others


def test_the_same_line_twice_counts_once(metrics):
    metrics.write_bytes(metrics.read_bytes() * 2)
    rows, _ = read_metrics(metrics)
    assert len(latest_by_step(rows)) == 8


# checkpoints


def test_a_checkpoint_with_any_file_cut_off_anywhere_is_not_whole(tmp_path):
    write_checkpoint(tmp_path / "step_2", 2)
    for path in sorted((tmp_path / "step_2").iterdir()):
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            assert complete_steps(tmp_path) == []
            assert find_damage(tmp_path / "step_2") is not None
        path.write_bytes(content)
    assert complete_steps(tmp_path) == [2]
    assert find_damage(tmp_path / "step_2") is None


@pytest.mark.parametrize("bit", range(8))
def test_a_checkpoint_whose_manifest_has_a_bit_flipped_is_another_one_or_none(tmp_path, bit):
    write_checkpoint(tmp_path / "step_2", 2)
    path = tmp_path / "step_2" / MANIFEST
    content = path.read_bytes()
    facts = read_manifest(tmp_path / "step_2")
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
        complete = complete_steps(tmp_path)
        if find_damage(tmp_path / "step_2") is None:  # it says when it was, by how many ranks, or of which version
            assert complete == [2]
            assert read_manifest(tmp_path / "step_2").files == facts.files


def test_a_checkpoint_with_any_one_byte_of_a_file_changed_is_damaged(tmp_path):
    write_checkpoint(tmp_path / "step_2", 2)
    path = tmp_path / "step_2" / "rank_0.safetensors"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        damage = find_damage(tmp_path / "step_2")
        assert damage is not None
        assert "rank_0.safetensors has" in damage
    path.write_bytes(content)
    assert describe_file(path).size == len(content)


# all of it


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.7, 0.99])
def test_whichever_file_of_a_run_is_cut_off_the_audit_says_so(tmp_path, cut):
    """But for exports, which it does not read, and the end of the metrics, which may be on its way."""
    config = build_config(tmp_path / "run")
    for _ in WrittenRun(config).write(3):
        pass
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    looked_at = [path for path in files if path.parent.name not in ("configs",) and "weights" not in path.parts]
    assert len(looked_at) > 9
    for path in looked_at:
        content = path.read_bytes()
        path.write_bytes(content[: int(cut * len(content))])
        is_on_its_way = path == config.paths.metrics and cut > 0.9
        assert audit_run(tmp_path / "run").holds == is_on_its_way, path
        path.write_bytes(content)
    assert audit_run(tmp_path / "run").holds
