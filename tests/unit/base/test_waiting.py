"""No wait without a name and an end; a full disk is a wait, not an end."""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from support.models.tiny_tokenizer import write_tokenizer
from support.processes.limits import fill, small_disk
from trireme.base.disk import is_full, require_room, when_there_is_room
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import DISK, Waits


def test_open_waits_are_listed_longest_first_until_they_end():
    waits = Waits("orchestrator", Path("run/logs"))
    with suppress(ZeroDivisionError), waits.waiting("groups", peer="engines", deadline_s=9) as wait:
        with waits.waiting("version 3", peer="trainer", deadline_s=9) as other:
            wait.since, other.note = time.monotonic() - 5, "not sent yet"
            first, second = "waits 5 s for groups from engines", "waits 0 s for version 3 from trainer (not sent yet)"
            assert str(waits) == f"orchestrator {first}; orchestrator {second}"
        assert [wait.what for wait in waits.now()] == ["groups"]
        wait.check()
        wait.deadline_s = 4
        with pytest.raises(DeadlineExceeded, match=f"{first}, longer than the 4 s .*Look at run/logs/engines.stdout"):
            wait.check()
        _ = 1 / 0
    assert waits.now() == []


def test_patient_wait_counts_from_the_end_of_a_busy_phase():
    waits = Waits("orchestrator")
    peer = {"busy": False}
    waits.is_peer_busy = lambda: peer["busy"]

    def runs_out(who: str = "trainer", patient: bool = True) -> bool:
        with waits.waiting("version 3", peer=who, deadline_s=5, patient=patient) as wait:
            wait.since = time.monotonic() - 60
            with suppress(DeadlineExceeded):
                wait.check()
                peer["busy"] = False
                wait.check()  # begun again a moment ago
                return False
            return True

    assert runs_out()
    with waits.busy():
        assert not runs_out()
        assert runs_out(patient=False)
        assert runs_out(DISK, patient=False)
    assert runs_out()
    with waits.waiting("room for batch 3", peer=DISK, deadline_s=9):
        assert not runs_out()
    peer["busy"] = True
    assert not runs_out()
    assert runs_out()


NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_to_a_disk(*errors: OSError, waits, deadline_s=60):
    """Return the waits at each attempt to write; the first ones end in the errors."""
    seen: list[str] = []

    def write() -> list[str]:
        seen.append(str(waits))
        for error in errors[len(seen) - 1 : len(seen)]:
            raise error
        return seen

    how = {"what": "batch 41", "folder": Path("/"), "poll_s": 0.01}
    return when_there_is_room(write, waits=waits, deadline_s=deadline_s, **how)


def test_what_finds_no_room_is_written_once_there_is_some():
    waits = Waits("trainer", Path("logs"))
    first, _, last = write_to_a_disk(NO_ROOM, NO_ROOM, waits=waits)
    assert first == ""  # the first attempt is no wait
    assert last.startswith("trainer waits 0 s for room for batch 41 from disk (No space left on device, ")
    assert waits.now() == []
    with pytest.raises(DeadlineExceeded, match="for room for batch 41 from disk") as error:
        write_to_a_disk(*[NO_ROOM] * 1000, waits=waits, deadline_s=0.05)
    assert "Look at" not in str(error.value)  # a disk has no log
    for before in ([], [NO_ROOM]):  # other errors are not waited for
        with pytest.raises(PermissionError):
            write_to_a_disk(*before, PermissionError(), waits=waits)


def test_full_disk_is_recognised_behind_another_error(tmp_path):
    outer = RuntimeError("cannot save")
    outer.__cause__ = NO_ROOM
    errors = (outer, OSError(errno.EDQUOT, "x"), RuntimeError("cannot save"), None)
    assert list(map(is_full, errors)) == [True, True, False, False]
    require_room(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(OSError, match=f"No space left on device for {2**40} MiB"):
        require_room(tmp_path, 2**60)


def test_full_disk_is_recognised_in_errors_of_every_writing_library(tmp_path):
    tensors = {"x": np.zeros(300_000)}
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"))
    with small_disk(tmp_path / "disk", "1m") as disk:
        fill(disk)
        for write in (
            lambda: (disk / "x").write_bytes(bytes(1000)),
            lambda: save_file(tensors, disk / "x.safetensors"),
            lambda: tokenizer.save(str(disk / "tokenizer.json")),
        ):
            with pytest.raises(Exception, match="No space left") as error:
                write()
            assert is_full(error.value)
