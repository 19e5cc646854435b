"""No wait without a name and an end."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import DISK, Wait, Waits


def begun(seconds_ago: float) -> float:
    return time.monotonic() - seconds_ago


def test_a_wait_says_who_for_whom_for_what_and_how_long() -> None:
    wait = Wait(who="trainer", peer="orchestrator", what="batch 41", deadline_s=600, since=begun(12))
    assert str(wait) == "trainer waits 12 s for batch 41 from orchestrator"
    wait.note = "3 of 8 groups missing"
    assert str(wait) == "trainer waits 12 s for batch 41 from orchestrator (3 of 8 groups missing)"


def test_a_wait_that_runs_out_says_the_same_and_where_to_look() -> None:
    wait = Wait(who="trainer", peer="engine", what="batch 41", deadline_s=10, log=Path("logs/x"), since=begun(12))
    sentence = "trainer waits 12 s for batch 41 from engine, longer than the 10 s allowed. Look at logs/x"
    with pytest.raises(DeadlineExceeded) as error:
        wait.check()
    assert str(error.value) == sentence


def test_before_its_deadline_a_wait_goes_on() -> None:
    Wait(who="trainer", peer="engine", what="batch 41", deadline_s=600).check()


def test_the_log_is_the_peers() -> None:
    with Waits("trainer", Path("run/logs")).waiting("batch 0", peer="orchestrator", deadline_s=1) as wait:
        assert wait.log == Path("run/logs/orchestrator.stdout")


def test_open_waits_are_shown_longest_first_and_vanish_when_over() -> None:
    waits = Waits("orchestrator")
    with waits.waiting("groups", peer="engines", deadline_s=9):
        with waits.waiting("version 3", peer="trainer", deadline_s=9):
            first, second = "waits 0 s for groups from engines", "waits 0 s for version 3 from trainer"
            assert str(waits) == f"orchestrator {first}; orchestrator {second}"
        assert [wait.what for wait in waits.now()] == ["groups"]
    assert waits.now() == []


def test_a_wait_that_an_error_ended_is_no_longer_shown() -> None:
    waits = Waits("trainer")
    with pytest.raises(ZeroDivisionError), waits.waiting("batch 3", peer="orchestrator", deadline_s=9):
        _ = 1 / 0
    assert waits.now() == []


def test_a_patient_wait_counts_from_the_end_of_what_its_process_or_the_peer_was_busy_with() -> None:
    waits = Waits("orchestrator")
    peer = {"busy": False}
    waits.is_peer_busy = lambda: peer["busy"]

    def runs_out() -> bool:
        with waits.waiting("version 3", peer="trainer", deadline_s=5, patient=True) as wait:
            wait.since = begun(60)
            with suppress(DeadlineExceeded):
                wait.check()
                peer["busy"] = False
                wait.check()  # begun anew a moment ago
                return False
            return True

    assert runs_out()
    with waits.busy():
        assert not runs_out()
    assert runs_out()
    with waits.waiting("room for batch 3", peer=DISK, deadline_s=9):
        assert not runs_out()
    peer["busy"] = True
    assert not runs_out()
    assert runs_out()


def test_a_wait_for_room_on_a_disk_runs_out_and_so_does_one_that_is_not_patient() -> None:
    waits = Waits("orchestrator")
    with waits.busy():
        for peer in (DISK, "inference"):
            with waits.waiting("room", peer=peer, deadline_s=5) as wait:
                wait.since = begun(60)
                with pytest.raises(DeadlineExceeded):
                    wait.check()
