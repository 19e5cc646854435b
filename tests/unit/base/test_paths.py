"""Files of a run that are whole, and those that are not."""

import pytest

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import remove_partial_files
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, State


def test_batch_in_the_journal_is_never_replaced(tmp_path):
    ours, theirs = Journal(tmp_path), Journal(tmp_path)
    ours.append(BatchRecord(0, [], [], State(next_batch=1)))
    theirs.append(BatchRecord(0, [], [], State(next_batch=1)))  # the same: it may be written again after an error
    with pytest.raises(JournalCorrupt, match="was written by another process"):
        theirs.append(BatchRecord(0, [], [], State(next_batch=1, next_group=7)))
    assert Journal(tmp_path).read(0).state.next_group == 0
    (tmp_path / ".batch_000001.msgpack.4321.partial").write_bytes(b"half")
    remove_partial_files(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["batch_000000.msgpack"]
