"""Turns of a rollout on disk: what was written whole is read again, whatever cut the file off."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from support.processes.limits import file_size_limit
from trireme.journal.journal import Journal
from trireme.journal.model_turn import Turn
from trireme.journal.turns import KeptRequest, RolloutLog, framed, prompt_digest, read_turns, turns_file
from trireme.orchestrator.gateway.endpoint import Endpoint
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import RunTask


def record(prompt: str, token: int, **more: object) -> Turn:
    message = {"role": "assistant", "content": f"ä{token}"}
    return Turn(prompt=prompt, ids=[token], logprobs=[0], versions=[3], finish_reason="", message=message, **more)


def keep(log: RolloutLog, turn: Turn) -> None:
    log.write(turn)
    log.add(turn, log.life)


def test_turn_log_cut_at_any_byte_keeps_its_whole_turns(tmp_path):
    log = RolloutLog(tmp_path / "turns" / "whole.turns")
    ends = []
    for token in range(3):
        keep(log, record("p", token))
        ends.append(log.path.stat().st_size)
    data = log.path.read_bytes()
    for size in range(len(data)):
        (cut := tmp_path / "cut.turns").write_bytes(data[:size])
        whole = [[token] for token, end in enumerate(ends) if end <= size]
        assert [each.ids for each in read_turns(cut)] == whole
        again = RolloutLog(cut)
        if size % 7 == 0:
            keep(again, record("q", 9))
            assert [each.ids for each in read_turns(cut)] == [*whole, [9]]
        again.close()  # also where nothing was written
    middle = len(data) // 2  # in the second turn
    cut.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    assert [each.ids for each in read_turns(cut)] == [[0]]


def test_turns_are_replayed_by_prompt_in_order_after_a_rewind(tmp_path):
    log = RolloutLog(tmp_path / "a.turns")
    routes = np.arange(6, dtype=np.uint8)
    for each in (record("p", 1), record("q", 2), record("p", 3, routes=routes, routes_shape=(1, 2, 3))):
        keep(log, each)
    for again in (RolloutLog(log.path), log):
        life = again.life
        again.rewind()
        assert [again.replay("p").ids, again.replay("q").ids] == [[1], [2]]
        last = again.replay("p")
        assert (last.ids, last.routes.reshape(last.routes_shape).tolist()) == ([3], [[[0, 1, 2], [3, 4, 5]]])
        assert again.replay("p") is None
        again.add(record("p", 4), life)  # which was asked for before the rewind
        assert [again.replay("p").ids, again.replay("p")] == [[4], None]


def test_turns_that_several_threads_write_at_once_are_all_kept(tmp_path, monkeypatch):
    log, truncate = RolloutLog(tmp_path / "a.turns"), os.ftruncate

    def truncate_late(descriptor: int, length: int) -> None:
        time.sleep(0.02)  # another thread's turn would be on disk by now, and be cut off
        truncate(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", truncate_late)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(log.write, [record("p", token) for token in range(8)]))
    assert sorted(each.ids[0] for each in read_turns(log.path)) == [*range(8)]


def test_a_full_disk_leaves_nothing_of_a_turn(tmp_path):
    log = RolloutLog(tmp_path / "a.turns")
    keep(log, record("p", 1))
    with file_size_limit(log.path.stat().st_size + 20), pytest.raises(OSError, match="too large"):
        keep(log, record("p", 2))
    keep(log, record("p", 3))
    assert [each.ids for each in read_turns(log.path)] == [[1], [3]]


def test_turn_log_of_a_rewound_run_replays_nothing(tmp_path):
    assert len({prompt_digest(ids) for ids in ([], [0], [1], [0, 0], [256], [1, 0])}) == 6
    path = turns_file(tmp_path, "../17-3", 0)
    assert path.parent == tmp_path / "turns"
    keep(RolloutLog(path), record("p", 1))
    Journal(tmp_path).rewind(0)
    assert RolloutLog(path).replay("p") is None


MESSAGES = [{"role": "user", "content": str(number)} for number in range(4)]
TOOLS = [{"name": "x"}]
ASKED = [
    KeptRequest(session="a", number=1, messages=MESSAGES[:1], tools=TOOLS),
    KeptRequest(session="a", number=2, messages=MESSAGES[:3], tools=TOOLS),
    KeptRequest(session="a", number=3, messages=[MESSAGES[0], MESSAGES[3]], trace="t"),
    KeptRequest(session="a", number=4, messages=MESSAGES, calls_tools=False),
]


def whole(requests: list[KeptRequest]) -> list[tuple]:
    return [(each.number, each.messages, each.tools, each.calls_tools, each.trace) for each in requests]


def test_agent_requests_are_read_whole_by_the_next_process(tmp_path):
    path, file = tmp_path / "turns" / "0-0.0.turns", tmp_path / "turns" / "0-0.0.requests"
    RolloutLog(path).write_request(KeptRequest(session="b", number=1, messages=MESSAGES))
    written = RolloutLog(path)
    for request in ASKED[:2]:  # of a new session
        written.write_request(request)
    assert file.read_bytes().count(b"content") == 3
    file.write_bytes(file.read_bytes() + b"cut off")
    after = RolloutLog(path)
    assert whole(after.read_requests("a")) == whole(ASKED[:2])
    for request in ASKED[2:]:
        after.write_request(request)
    assert whole(RolloutLog(path).read_requests("a")) == whole(ASKED)
    assert RolloutLog(path).read_requests("b") == []
    assert [one.continues(ASKED[0]) for one in ASKED] == [False, True, True, True]
    after.keeps_requests = True
    after.close()
    assert RolloutLog(path).read_requests("a") == []


def test_a_program_whose_requests_cannot_be_read_is_to_be_started_again(tmp_path):
    (tmp_path / "a.requests").write_bytes(framed(b"\x80"))  # as another version may have written them

    async def resume() -> bool:
        session = Session(RunTask(task="1-0.0", index=0), log=RolloutLog(tmp_path / "a.turns"))
        return await Endpoint(SimpleNamespace(url=""), session, key="key").resume()

    assert asyncio.run(resume()) is False
