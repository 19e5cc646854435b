"""The lanes as the dashboard draws them: read as they are written, thinned for the picture, whole for the shares."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from trireme.monitor.dashboard.gantt import gantt
from trireme.monitor.dashboard.lane_view import SpanStore, advice_without_spans, look, trainer_shares
from trireme.monitor.lanes import shares
from trireme.monitor.spans import Span, read_spans

LANES = ("trainer", "orchestrator", "engine 127.0.0.1:8000", "engine 127.0.0.1:8001")
COLORS = {"train": "#111111", "other": "#222222"}


def make(num: int, *, seed: int = 0) -> list[Span]:
    """Lanes that do something most of the time, mixed as processes write them."""
    rng = random.Random(seed)
    spans = []
    for lane in LANES:
        now = 1e9
        for step in range(num):
            now += rng.choice([0.0, 0.0, rng.random()])
            seconds = 0.01 + rng.random()
            spans.append(Span(lane, rng.choice(["train", "wait", "generate"]), now, seconds, step, "why: not"))
            now += seconds
    return sorted(spans, key=lambda span: span.end_s)


def write(path: Path, spans: list[Span]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
    return path


def everything(store: SpanStore) -> list[Span]:
    return [span for lane in store.names() for span in store.within(*store.extent(), lane)]


def opened(path: Path) -> SpanStore:
    store = SpanStore(path)
    store.refresh()
    return store


def test_spans_read_in_pieces_are_those_of_the_file(tmp_path: Path) -> None:
    data = write(tmp_path / "whole", make(40)).read_bytes()
    store = SpanStore(tmp_path / "growing")
    for begin in range(0, len(data), 501):
        with open(tmp_path / "growing", "ab") as file:
            file.write(data[begin : begin + 501])
        store.refresh()
    whole = opened(tmp_path / "whole")

    assert store.extent() == whole.extent()
    assert everything(store) == everything(whole)


def test_what_was_written_in_pieces_is_one_block(tmp_path: Path) -> None:
    pieces = [Span("trainer", "wait", 10.0 + 2 * place, 2.0, 5) for place in range(5)]
    store = opened(write(tmp_path / "spans", pieces))
    assert everything(store) == [Span("trainer", "wait", 10.0, 10.0, 5)]


@pytest.mark.parametrize("stretch", [(0.0, 1.0), (0.2, 0.3), (0.7, 0.701)])
def test_shares_of_a_stretch_are_those_of_all_spans(tmp_path: Path, stretch: tuple[float, float]) -> None:
    store = opened(write(tmp_path / "spans", make(60)))
    first, last = store.extent()
    begin, end = (first + part * (last - first) for part in stretch)
    view = look(store, begin, end)
    spans, _ = read_spans(tmp_path / "spans")

    assert set(view.shares) == set(LANES)
    assert begin <= view.told[0] < view.told[1] <= end
    for lane, of_lane in view.shares.items():
        assert sum(of_lane.values()) == 1.0
        assert of_lane == pytest.approx(shares(spans, lane, *view.told), abs=1e-5)


def test_a_long_run_is_drawn_with_few_blocks_inside_the_picture(tmp_path: Path) -> None:
    store = opened(write(tmp_path / "spans", make(3000)))
    begin, end = store.extent()
    view = look(store, begin, end, most=500)
    blocks = list(view.blocks())

    assert 100 < len(blocks) <= 700
    assert all(since >= -1e-6 and since + seconds <= end - begin + 1e-6 for _, since, seconds, *_ in blocks)
    json.dumps(gantt(view, COLORS, zero_s=begin), allow_nan=False)


def test_the_start_counts_in_no_advice(tmp_path: Path) -> None:
    spans = [Span("trainer", "start", 1.0, 60.0), Span("engine e:1", "start", 1.0, 60.0)]
    for step in range(10):
        begin = 61.0 + step
        spans += [Span("trainer", "train", begin, 0.3), Span("trainer", "wait", begin + 0.3, 0.7, step, "no batch yet")]
        spans += [Span("engine e:1", "generate", begin, 1.0, step + 1)]
    store = opened(write(tmp_path / "spans", spans))
    view = look(store, *store.extent())

    assert view.told == (61.0, 71.0)
    assert view.shares["trainer"] == pytest.approx({"wait": 0.7, "train": 0.3, "other": 0.0}, abs=1e-5)
    assert "more GPUs to inference" in view.advice
    assert view.held_by["trainer"] == [("no batch yet", pytest.approx(0.7))]


def test_damaged_lines_are_passed_over_and_another_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "spans", make(20))
    with open(path, "ab") as file:
        file.write(b'\xff\xfe\n{"lane": 3}\n{"lane": "trainer", "what": "tr')
    store = opened(path)
    assert len(everything(store)) == 80
    write(path, make(1))
    store.refresh()
    assert len(everything(store)) == 4


def test_no_file_is_no_lane(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "none")
    assert not store.refresh()
    assert not store
    assert look(store, *store.extent()).lanes == []


def test_without_spans_the_trainers_own_metrics_say_what_they_can() -> None:
    rows = [
        {"time/step": 2.0, "time/wait_for_batch": 1.0, "time/forward_backward": 0.5, "time/optimizer": 0.25},
        {"time/step": 2.0, "time/wait_for_batch": 1.0, "time/publish": 0.5, "time/forward_backward": None},
        {"reward/mean": 1.0},
    ]
    found = trainer_shares(rows)
    assert found == pytest.approx({"wait": 0.5, "train": 0.1875, "transfer": 0.125, "other": 0.1875})
    assert "more GPUs for inference" in advice_without_spans(found)
    assert trainer_shares([]) == {}
