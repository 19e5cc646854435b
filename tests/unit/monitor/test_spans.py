"""The lanes of a process: spans in order without overlap, whose sums are the time that passed."""

import random
import threading
import time
from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from support.processes.stage import until
from trireme.monitor import spans as timing
from trireme.monitor.spans import Lane, Piece, Span, SpansFile, open_spans, read_spans, settled


def overlaps(spans, lane):
    ordered = sorted((span for span in spans if span.lane == lane), key=lambda span: span.begin_s)
    return [(first, second) for first, second in pairwise(ordered) if second.begin_s < first.end_s - 1e-6]


def test_interrupted_lane_activity_resumes_afterwards():
    times_us = iter([100, 100, 150, 170, 200, 300, 350])
    lane = Lane("trainer", clock=lambda: next(times_us))
    lane.enter("wait", step=3, why="no batch yet")
    with lane.doing("transfer", step=3):
        pass
    lane.enter(None)
    lane.enter("train", step=3)
    assert lane.drain() == [
        Piece("wait", 3, "no batch yet", 100, 150),
        Piece("transfer", 3, "", 150, 170),
        Piece("wait", 3, "no batch yet", 170, 200),
        Piece("train", 3, "", 300, 350),
    ]


def test_sums_and_what_has_no_name_are_all_the_time_that_passed():
    now_us = 0
    lane = Lane("engine", clock=lambda: now_us)
    taken: Counter[str] = Counter()
    for number, what in enumerate(["wait", None, "generate", "wait", "transfer", None, "generate"]):
        lane.enter(what)  # type: ignore[arg-type]
        now_us += 1000 * (number + 1)
        if number in (2, 4, 6):  # in the middle of things
            taken.update(lane.take())
    assert taken == pytest.approx({"wait": 0.005, "other": 0.008, "generate": 0.010, "transfer": 0.005})


def test_lane_of_a_resumed_process_never_overlaps_the_earlier_one(tmp_path):
    """Also where the machine's clock was set back meanwhile."""
    path = tmp_path / "spans.jsonl"
    ahead = Span("trainer", "train", time.time() + 3000, 600.0, 7)
    path.write_bytes(msgspec.json.encode(ahead) + b"\n")
    file = SpansFile(path)
    again, other = file.lane("trainer", what="start", ago_s=100.0), file.lane("orchestrator", what="start")
    again.enter("train", step=7)
    time.sleep(0.001)
    file.close()
    assert other.now == "start"
    (first, *spans), _ = read_spans(path)
    assert first == ahead
    assert {span.lane for span in spans} == {"trainer", "orchestrator"}
    assert all(abs(span.begin_s - time.time()) < 1000 for span in spans if span.lane == "orchestrator")
    assert overlaps([ahead, *spans], "trainer") == []


def test_lane_of_a_killed_process_keeps_all_written_spans(tmp_path):
    path = tmp_path / "spans.jsonl"
    for step in (0, 1):
        file = SpansFile(path)  # it is never closed
        lane = file.lane("trainer", what="start", ago_s=0.5)
        lane.enter("train", step=step)
        file.flush()
        lane.enter("save", step=step)
        with open(path, "ab") as torn:
            torn.write(b'{"lane": "trainer", "what": "sa')
    spans, offset = read_spans(path)
    assert [(span.what, span.step) for span in spans] == [("start", -1), ("train", 0), ("start", -1), ("train", 1)]
    assert overlaps(spans, "trainer") == []
    assert offset < path.stat().st_size  # the torn line waits for its rest


def test_the_writer_of_its_own_writes_without_being_asked_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.monitor.spans.FLUSH_S", 0.01)
    path = tmp_path / "spans.jsonl"
    with open_spans(path) as file:
        lane = file.lane("orchestrator")
        lane.enter("wait", step=4)
        until(lambda: read_spans(path)[0])
        assert read_spans(path)[0][0].step == 4
        lane.enter("journal", step=4)
        time.sleep(0.001)
    assert read_spans(path)[0][-1].what == "journal"
    assert not [thread for thread in threading.enumerate() if thread.name == "spans"]


def sums(pieces):
    found: Counter[tuple[str, str]] = Counter()
    for piece in pieces:
        found[piece.what, piece.why] += piece.end_us - piece.begin_us
    return found


@pytest.mark.parametrize("seed", range(3))
def test_fast_alternating_spans_are_merged_without_changing_sums(seed):
    rng = random.Random(seed)
    pieces, now_us = [], 0
    for _ in range(3000):
        now_us += rng.choice([0, 0, 50, 400])
        length_us = rng.choice([30, 100, 700, 3000] * 50 + [400_000])
        what = rng.choice(["generate", "wait"])
        pieces.append(Piece(what, 4, rng.choice(["", "environments are working"]), now_us, now_us + length_us))
        now_us += length_us
    kept = list(settled(pieces))
    assert all(second.begin_us >= first.end_us for first, second in pairwise(kept))
    assert sums(kept) == sums(pieces)
    seconds = Counter(piece.begin_us // 1_000_000 for piece in kept)
    kinds, across = 4, 1
    most = max(timing.MOST_A_SECOND, (kinds + across) * 1_000_000 // timing.SLOT_US)
    assert max(seconds.values()) <= most + across
    slow = [Piece("generate", number, "", 30_000 * number, 30_000 * (number + 1)) for number in range(99)]
    assert list(settled(slow)) == slow
