"""The journal: an entry is whole or not there, and nothing that it once held is ever lost."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from trireme.base.errors import JournalCorrupt
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, Cursor, Dropped, OpenGroup, Rollout, State
from trireme.messages import build_tokens, encode

APPEND = """
import os, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2])))
from test_ledger_journal import record
from trireme.ledger.journal import Journal
journal = Journal(Path(sys.argv[1]))
"""


def record(step: int, *, size: int = 5) -> BatchRecord:
    tokens = build_tokens(
        ids=range(size), loss_mask=[1] * size, logprobs=[-0.25] * size, advantages=[0.5] * size, versions=[step] * size
    )
    rollout = Rollout(
        group=step, place=0, attempt=1, env="say", example=3, reward=0.75, samples=[tokens], temperature=0.7
    )
    dropped = Dropped(group=step, place=0, attempt=0, env="say", example=3, reason="score: ValueError: é")
    state = State(
        next_batch=step + 1,
        next_group=2 * step + 2,
        cursors={"say": Cursor(epoch=1, position=step)},
        open_groups=[OpenGroup(id=2 * step + 1, env="say", example=9)],
        counters={"trained": step + 1},
    )
    return BatchRecord(step=step, rollouts=[rollout], dropped=[dropped], state=state, metrics={"reward/mean": 0.75})


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal")
    for step in range(3):
        journal.append(record(step))
    return journal


def reopened(journal: Journal) -> Journal:
    """As another process sees it."""
    return Journal(journal.path(0).parent)


def in_a_process_of_its_own(code: str, folder, **popen) -> subprocess.CompletedProcess:
    tests = __file__.rpartition("/")[0]
    command = [sys.executable, "-c", APPEND + code, str(folder), tests]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **popen)


def test_an_entry_comes_back_as_it_was_written(journal):
    for step in range(3):
        assert encode(reopened(journal).read(step)) == encode(record(step))
    assert reopened(journal).steps() == [0, 1, 2]


def test_the_state_of_the_newest_entry_is_the_one_to_go_on_from(journal, tmp_path):
    assert reopened(journal).head_state() == record(2).state
    assert Journal(tmp_path / "new").head_state() == State()


def test_a_crash_before_the_rename_leaves_nothing_under_the_name(journal):
    code = "os.replace = lambda *_: os._exit(9)\njournal.append(record(3))"
    folder = journal.path(0).parent
    assert in_a_process_of_its_own(code, folder).returncode == 9
    again = reopened(journal)
    assert not again.has(3)
    assert again.head_state().next_batch == 3
    again.append(record(3))
    assert reopened(journal).head_state().next_batch == 4


def test_a_full_disk_is_an_error_that_leaves_nothing_behind_and_can_be_tried_again(journal):
    """A limit on the size of files stands for the full disk."""
    code = """
try:
    journal.append(record(3, size=100_000))
except OSError as error:
    print("refused", journal.steps(), journal.head_state().next_batch)
journal.append(record(3))
print("accepted", journal.steps())
"""
    folder = journal.path(0).parent
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    done = in_a_process_of_its_own(code, folder, preexec_fn=limit)
    assert done.stdout.splitlines() == ["refused [0, 1, 2] 3", "accepted [0, 1, 2, 3]"], done.stderr
    assert sorted(path.name for path in folder.iterdir()) == [f"batch_{step:06d}.msgpack" for step in range(4)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
        lambda data: data + b"\0",
        lambda data: data[:20],
        lambda data: b"",
        lambda data: b"\0" * len(data),
    ],
    ids=["cut", "one bit", "longer", "cut in its header", "empty", "zeros"],
)
def test_a_damaged_entry_is_named_and_never_read(journal, damage):
    path = journal.path(1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(JournalCorrupt, match=r"batch_000001\.msgpack.*resume-step 1 or less"):
        reopened(journal).read(1)


def test_an_entry_under_another_entrys_name_is_not_taken_for_it(journal):
    journal.path(2).write_bytes(journal.path(1).read_bytes())
    with pytest.raises(JournalCorrupt, match=r"batch_000002\.msgpack holds entry 1"):
        reopened(journal).head_state()


def test_an_entry_of_another_format_is_named_with_both_formats(journal):
    path = journal.path(2)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":99', 1))
    with pytest.raises(JournalCorrupt, match=r"batch_000002\.msgpack has format 99, this version of Trireme reads 1"):
        reopened(journal).head_state()


def test_a_missing_entry_is_named(journal):
    journal.path(1).unlink()
    with pytest.raises(JournalCorrupt, match=r"misses batch 1 of 2.*batch_000001\.msgpack"):
        reopened(journal).head_state()


def test_a_rewound_journal_goes_on_from_before_and_deletes_nothing(journal):
    written = {step: journal.path(step).read_bytes() for step in range(3)}
    journal.rewind(1)
    assert journal.steps() == [0]
    assert journal.head_state().next_batch == 1
    journal.append(record(1, size=9))
    journal.rewind(1)
    journal.rewind(5)
    assert encode(journal.read(0)) == encode(record(0))
    folder = journal.path(0).parent
    aside = [path.read_bytes() for path in sorted(folder.glob("set_aside_*/batch_*.msgpack"))]
    assert sorted(aside) == sorted([written[1], written[2], aside[-1]])
    assert len(aside) == 3
    assert len(list(folder.glob("set_aside_*"))) == 2
    assert reopened(journal).head_state().next_batch == 1


def test_what_an_environment_says_may_hold_any_number(tmp_path):
    """One that has no place in 64 bits is kept in words; all others as they are."""
    entry = record(0)
    said = {"role": "tool", "content": "ok", "ids": [2**63, 2**64 - 1, -(2**63)], "raw": {"n": [2**64, -(2**70)]}}
    entry.rollouts[0].prompt = [said]
    entry.rollouts[0].completion = [said]
    journal = Journal(tmp_path / "journal")
    journal.append(entry)
    (rollout,) = reopened(journal).read(0).rollouts
    expected = said | {"raw": {"n": [str(2**64), str(-(2**70))]}}
    assert (rollout.prompt, rollout.completion) == ([expected], [expected])
    assert rollout.reward == 0.75
