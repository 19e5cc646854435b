"""`spans.jsonl`: what a lane did is written down once, in order, whatever happens to its process."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import psutil
import pytest

from stage import until
from trireme.base.timing import age_s
from trireme.monitor import spans as timing


class Hand:
    """A clock that is moved by hand, in microseconds."""

    now_us = 0

    def __call__(self) -> int:
        return self.now_us


def overlaps(spans: Iterable[timing.Span]) -> list[tuple[timing.Span, timing.Span]]:
    lanes: dict[str, list[timing.Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    pairs = (pair for lane in lanes.values() for pair in pairwise(sorted(lane, key=lambda span: span.begin_s)))
    return [(first, second) for first, second in pairs if second.begin_s < first.end_s - 1e-6]


def test_one_thing_ends_where_the_next_begins_and_the_one_before_goes_on_afterwards():
    clock = Hand()
    clock.now_us = 100
    lane = timing.Lane("trainer", keeps=True, clock=clock)
    lane.enter("wait", step=3, why="no batch yet")
    clock.now_us = 150
    with lane.doing("transfer", step=3):
        clock.now_us = 170
    clock.now_us = 200
    lane.enter(None)
    clock.now_us = 300
    lane.enter("train", step=3)
    clock.now_us = 350
    assert lane.drain() == [
        timing.Piece("wait", 3, "no batch yet", 100, 150),
        timing.Piece("transfer", 3, "", 150, 170),
        timing.Piece("wait", 3, "no batch yet", 170, 200),
        timing.Piece("train", 3, "", 300, 350),
    ]


def test_sums_and_what_has_no_name_are_all_the_time_that_passed_and_nothing_else_stays_in_memory():
    clock = Hand()
    lane = timing.Lane("engine", clock=clock)
    taken: dict[str, float] = defaultdict(float)
    for number, what in enumerate(["wait", None, "generate", "wait", "transfer", None, "generate"]):
        lane.enter(what)  # type: ignore[arg-type]
        clock.now_us += 1000 * (number + 1)
        if number in (2, 4, 6):  # in the middle of things
            for name, seconds in lane.take().items():
                taken[name] += seconds
    assert taken == pytest.approx({"wait": 0.005, "other": 0.008, "generate": 0.010, "transfer": 0.005})
    assert lane.drain() == []


def test_a_process_that_goes_on_with_the_file_never_overlaps_the_one_before(tmp_path):
    """Also where the machine's clock was set back meanwhile."""
    path = tmp_path / "spans.jsonl"
    ahead = timing.Span("trainer", "train", time.time() + 3000, 600.0, 7)
    path.write_bytes(msgspec.json.encode(ahead) + b"\n")
    file = timing.SpansFile(path)
    again, other = file.lane("trainer", what="start", ago_s=100.0), file.lane("orchestrator", what="start")
    again.enter("train", step=7)
    time.sleep(0.001)
    file.close()
    assert other.now == "start"
    spans, _ = timing.read_spans(path)
    mine = [span for span in spans[1:] if span.lane == "trainer"]
    assert mine
    assert all(span.begin_s >= ahead.end_s - 1e-6 for span in mine)
    assert all(abs(span.begin_s - time.time()) < 1000 for span in spans if span.lane == "orchestrator")
    assert overlaps(spans) == []


def test_of_a_killed_process_all_that_was_written_stays_and_its_successor_adds_to_it(tmp_path):
    path = tmp_path / "spans.jsonl"
    for step in (0, 1):
        file = timing.SpansFile(path)  # it is never closed
        lane = file.lane("trainer", what="start", ago_s=0.5)
        lane.enter("train", step=step)
        file.flush()
        lane.enter("save", step=step)
        with open(path, "ab") as torn:
            torn.write(b'{"lane": "trainer", "what": "sa')
    spans, offset = timing.read_spans(path)
    assert [(span.what, span.step) for span in spans] == [("start", -1), ("train", 0), ("start", -1), ("train", 1)]
    assert overlaps(spans) == []
    assert offset < path.stat().st_size  # the torn line waits for its rest


def test_the_writer_of_its_own_writes_without_being_asked_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.monitor.spans.FLUSH_S", 0.01)
    path = tmp_path / "spans.jsonl"
    with timing.open_spans(path) as file:
        lane = file.lane("orchestrator")
        lane.enter("wait", step=4)
        until(lambda: timing.read_spans(path)[0])
        assert timing.read_spans(path)[0][0].step == 4
        lane.enter("journal", step=4)
        time.sleep(0.001)
    assert timing.read_spans(path)[0][-1].what == "journal"
    assert not [thread for thread in threading.enumerate() if thread.name == "spans"]


@pytest.mark.parametrize("seed", range(5))
def test_what_alternates_faster_than_can_be_drawn_keeps_its_sums_and_its_place(seed):
    rng = random.Random(seed)
    pieces, now_us = [], 0
    for _ in range(3000):
        now_us += rng.choice([0, 0, 50, 400])
        length_us = rng.choice([30, 100, 700, 3000] * 50 + [400_000])
        what = rng.choice(["generate", "wait"])
        pieces.append(timing.Piece(what, 4, rng.choice(["", "environments are working"]), now_us, now_us + length_us))
        now_us += length_us
    kept = list(timing.settled(pieces))
    assert len(kept) < len(pieces)
    assert all(second.begin_us >= first.end_us for first, second in pairwise(kept))
    assert _sums(kept) == _sums(pieces)
    seconds: dict[int, int] = defaultdict(int)
    for piece in kept:
        seconds[piece.begin_us // 1_000_000] += 1
    kinds, across = 4, 1
    assert max(seconds.values()) <= max(timing.MOST_A_SECOND, (kinds + across) * 1_000_000 // timing.SLOT_US) + across
    slow = [timing.Piece("generate", number, "", 30_000 * number, 30_000 * (number + 1)) for number in range(99)]
    assert list(timing.settled(slow)) == slow


def _sums(pieces: Iterable[timing.Piece]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for piece in pieces:
        sums[piece.what, piece.why] += piece.end_us - piece.begin_us
    return sums


def test_a_process_knows_its_age():
    assert age_s() == pytest.approx(time.time() - psutil.Process().create_time(), abs=2)  # the kernel's whole seconds
