"""A full disk is a pause, not an end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from limits import fill, small_disk
from trireme.base.disk import is_full, require_room, when_there_is_room
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits


def no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """Full for the first `times` attempts; says what its writer waits for meanwhile."""

    def __init__(self, times: int, waits: Waits) -> None:
        self.times = times
        self.waits = waits
        self.seen: list[str] = []

    def write(self) -> str:
        self.seen.append(str(self.waits))
        if len(self.seen) <= self.times:
            raise no_room()
        return "written"


def test_what_finds_no_room_is_written_once_there_is_some(tmp_path: Path) -> None:
    waits = Waits("trainer")
    disk = Disk(3, waits)
    found = when_there_is_room(disk.write, what="batch 41", folder=tmp_path, waits=waits, deadline_s=60, poll_s=0.01)
    assert (found, len(disk.seen)) == ("written", 4)
    assert disk.seen[0] == ""  # the first attempt is no wait
    assert disk.seen[3].startswith("trainer waits 0 s for room for batch 41 from disk (No space left on device, ")
    assert f"MiB free in {tmp_path}" in disk.seen[3]
    assert waits.now() == []


def test_a_disk_that_stays_full_is_given_up_on_by_name(tmp_path: Path) -> None:
    waits = Waits("trainer", tmp_path)
    with pytest.raises(DeadlineExceeded, match="for room for batch 41 from disk") as error:
        when_there_is_room(
            Disk(1000, waits).write, what="batch 41", folder=tmp_path, waits=waits, deadline_s=0.05, poll_s=0.01
        )
    assert "Look at" not in str(error.value)  # a disk has no log


def test_other_errors_are_not_waited_for(tmp_path: Path) -> None:
    def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        when_there_is_room(write, what="batch 41", folder=tmp_path, waits=Waits("trainer"), deadline_s=60)


def test_a_full_disk_behind_another_error_is_seen() -> None:
    outer = RuntimeError("cannot save")
    outer.__cause__ = no_room()
    assert is_full(outer)
    assert is_full(OSError(errno.EDQUOT, "x"))
    assert not is_full(RuntimeError("cannot save"))
    assert not is_full(None)


def test_every_library_that_writes_for_us_is_understood_when_the_disk_is_full(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    tensors = {"x": torch.zeros(300_000)}
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_model), AutoConfig.from_pretrained(tiny_model)
    with small_disk(tmp_path / "disk", "1m") as disk:
        fill(disk)
        for write in (
            lambda: (disk / "x").write_bytes(bytes(1000)),
            lambda: save_file(tensors, disk / "x.safetensors"),
            lambda: save_torch_state_dict(tensors, disk),
            lambda: tokenizer.save_pretrained(disk),
            lambda: config.save_pretrained(disk),
        ):
            with pytest.raises(Exception, match="No space left") as error:
                write()
            assert is_full(error.value)


def test_more_than_there_is_room_for_is_not_begun(tmp_path: Path) -> None:
    require_room(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(OSError, match=f"No space left on device for {2**40} MiB") as error:
        require_room(tmp_path, 2**60)
    assert is_full(error.value)
