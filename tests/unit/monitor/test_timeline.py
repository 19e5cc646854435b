"""What the lanes of a run did: written once and in order, shares that add up, advice, and less to draw."""

import json
import random
import re
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import msgspec
import psutil
import pytest

from trireme.base.processes import free_port
from trireme.base.timing import age_s
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.monitor.spans import ENGINE as ENGINES
from trireme.monitor.spans import ENVIRONMENTS, FEW, Span, open_spans
from trireme.monitor.timeline import OTHER, advice, idle, in_words, reasons, shares, time_lines
from trireme.tools.cluster.status import look_at
from trireme.tools.dashboard.history import Spans
from trireme.tools.dashboard.timeline import summarize, timeline_chart


def test_a_process_knows_its_age():
    assert age_s() == pytest.approx(time.time() - psutil.Process().create_time(), abs=2)  # the kernel's whole seconds


TRAINER = [
    Span("trainer", "start", 0.0, 10.0),
    Span("trainer", "wait", 10.0, 5.0, 0, "no batch yet: 8 of 8 groups missing"),
    Span("trainer", "train", 15.0, 2.0, 0),
    Span("trainer", "transfer", 17.0, 1.0, 1),
    Span("trainer", "wait", 18.0, 6.0, 1, "no batch yet: 3 of 8 groups missing"),
    Span("trainer", "train", 24.0, 1.0, 1),
]
ENGINE = [
    Span("engine a:1", "start", 0.0, 9.0),
    Span("engine a:1", "generate", 14.0, 3.0, 1),
    Span("engine a:1", "transfer", 17.0, 1.0, 1),
    Span("engine a:1", "generate", 18.0, 5.0, 1),
    Span("engine a:1", "wait", 23.0, 2.0, 2, "max_async_level 1: the trainer is at batch 1"),
]


def random_lane(seed: int, lane: str = "engine a:1", *, count: int = 400) -> list[Span]:
    rng = random.Random(seed)
    spans, now_us = [], 1_700_000_000_000_000
    for number in range(count):
        now_us += rng.choice([0, 0, 13, 250_000])
        length_us = rng.randrange(1, rng.choice([50, 5_000, 3_000_000]))
        what = rng.choice(["generate", "wait", "transfer"])
        spans.append(Span(lane, what, now_us / 1e6, length_us / 1e6, number // 20, rng.choice(["", f"a: {number}"])))
        now_us += length_us
    return spans


def test_shares_of_a_window_worked_by_hand():
    found = shares(TRAINER, "trainer", 14.0, 24.0)
    assert found == pytest.approx({"train": 0.2, "wait": 0.7, "transfer": 0.1, OTHER: 0.0}, abs=1e-8)
    assert idle(found) == pytest.approx(0.7)
    found = shares(ENGINE, "engine a:1", 9.0, 19.0)
    assert found == pytest.approx({"generate": 0.4, "transfer": 0.1, OTHER: 0.5}, abs=1e-8)
    assert shares(ENGINE, "engine b:2", 0.0, 10.0) == shares(ENGINE, "engine a:1", 5.0, 5.0) == {OTHER: 1.0}
    twice = shares([*TRAINER, *TRAINER, Span("trainer", "save", 16.0, 4.0)], "trainer", 10.0, 25.0)
    assert sum(twice.values()) == pytest.approx(1.0), "spans that overlap are counted once"
    assert twice[OTHER] == 0.0


@pytest.mark.parametrize("seed", range(2))
def test_shares_and_their_means_are_what_exact_arithmetic_says(seed):
    rng, lanes = random.Random(seed), [f"engine a:{number}" for number in range(3)]
    spans = [span for number, lane in enumerate(lanes) for span in random_lane(10 * seed + number, lane)]
    begin_s, end_s = sorted(rng.uniform(spans[0].begin_s - 5, spans[-1].end_s + 5) for _ in range(2))
    begin_us, end_us = round(begin_s * 1e6), round(end_s * 1e6)
    exact: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for span in spans:
        first, last = max(round(span.begin_s * 1e6), begin_us), min(round(span.end_s * 1e6), end_us)
        exact[span.lane, span.what] += Fraction(max(0, last - first), end_us - begin_us)
    mixed = rng.sample(spans, len(spans))
    for name, of in [*((lane, [lane]) for lane in lanes), (ENGINES, lanes)]:
        found = shares(mixed, name, begin_s, end_s)
        for what in ("generate", "wait", "transfer"):
            assert found.get(what, 0.0) == pytest.approx(float(sum(exact[lane, what] for lane in of) / len(of)))
        assert sum(found.values()) == pytest.approx(1.0)
        assert min(found.values()) >= 0.0


BUSY, IDLE = {"generate": 0.97}, {"generate": 0.4, "wait": 0.6}  # shares of engines
BOUND, HALF = {"train": 0.98, "wait": 0.02}, {"train": 0.5, "wait": 0.5}  # and of trainers


@pytest.mark.parametrize(
    ("trainer", "engines", "more", "says"),
    [
        ({"train": 0.3, "wait": 0.61, OTHER: 0.09}, BUSY | {"wait": 0.03}, {}, "waits 61%.*busy 97%"),
        ({"train": 0.96, "wait": 0.04}, BUSY | {"wait": 0.03}, {}, "balanced"),
        (HALF, {"generate": 0.5, "wait": 0.5}, {}, "wait for each other"),
        ({"train": 0.6, "transfer": 0.35, "wait": 0.05}, {"generate": 0.6, "transfer": 0.3, "wait": 0.1}, {}, "moving"),
        ({OTHER: 1.0}, BUSY, {}, "too little is known"),
        (HALF, BUSY, {"few": 0.4}, "more GPUs would not help|oversampling_factor"),
        (HALF, BUSY, {"few": 0.1}, "give more GPUs to inference"),
        (HALF, IDLE, {"environments": 0.4}, "for environments: more"),
        (HALF, IDLE, {"environments": 0.1}, "wait for each other"),
        (BOUND, IDLE, {"environments": 0.6}, "give more GPUs to the trainer"),
    ],
)
def test_advice_gives_more_gpus_to_the_side_that_is_waited_for(trainer, engines, more, says):
    assert re.search(says, advice(trainer, engines, **more))


def test_the_status_of_a_run_tells_both_sides_and_what_to_change(tmp_path):
    trainer, engines, said = time_lines([*TRAINER, *ENGINE])
    assert trainer == "trainer: wait 60% (no batch yet), train 30%, transfer 10%"
    assert engines == "engines: generate 70%, wait 20% (max_async_level 1), transfer 10%"
    assert "give more GPUs to inference" in said
    assert [time_lines(ENGINE), time_lines(TRAINER)] == [[], [trainer]]  # nothing to tell yet; supervised training
    tail = Span("engine a:1", "generate", 23.0, 6.0, 1, "few requests: less than half of the 64 that it had")
    spans = [*ENGINE[:-1], tail, Span("engine b:2", "generate", 15.0, 10.0)]
    assert dict(reasons(spans, ENGINES, 19.0, 29.0, whats=("generate",)))[FEW] == pytest.approx(0.3)
    engine = [Span("engine a:1", "generate", 15.0, 6.0), Span("engine a:1", "wait", 21.0, 8.0, 1, ENVIRONMENTS)]
    assert "most of it for environments" in time_lines([*TRAINER, *engine])[-1]
    of = {"train": 0.7, "wait": 0.25, "save": 0.001, OTHER: 0.049}
    assert in_words(of, [("", 0.1), ("no batch yet", 0.15)]) == "train 70%, wait 25% (no batch yet), other 5%"
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "orchestrator": {"server": {"port": free_port()}}})
    write_run(config, config.paths.run_config)
    with open_spans(config.paths.spans) as file:
        file.lane("trainer", what="train", ago_s=3.0)
    assert "time         trainer: train 100%" in look_at(config.paths.root).lines()


LANES = ("trainer", "orchestrator", "engine a:1")


def mixed(num: int) -> list[Span]:
    lanes = [random_lane(seed, lane, count=num) for seed, lane in enumerate(LANES)]
    return sorted((span for lane in lanes for span in lane), key=lambda span: span.end_s)


def stored(path: Path, spans: list[Span]) -> Spans:
    path.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
    store = Spans(path)
    store.refresh()
    return store


def everything(store: Spans) -> list[Span]:
    return [span for lane in store.processes() for span in store.within(*store.extent(), lane)]


def test_spans_read_in_pieces_are_those_of_the_file_without_damaged_lines(tmp_path):
    whole = stored(tmp_path / "whole", mixed(40))
    data = (tmp_path / "whole").read_bytes() + b'\xff\xfe\n{"lane": 3}\n{"lane": "trainer", "what": "tr'
    store = Spans(tmp_path / "growing")
    assert not store.refresh()
    assert (bool(store), summarize(store, *store.extent()).shares) == (False, {})
    for begin in range(0, len(data), 501):
        with open(tmp_path / "growing", "ab") as file:
            file.write(data[begin : begin + 501])
        store.refresh()
    assert store.extent() == whole.extent()
    assert everything(store) == everything(whole)
    pieces = [Span("trainer", "wait", 10.0 + 2 * place, 2.0, 5) for place in range(5)]
    stored(tmp_path / "growing", pieces)
    store.refresh()
    assert everything(store) == [Span("trainer", "wait", 10.0, 10.0, 5)], "another file is read from its start"


def test_a_long_run_is_drawn_with_few_blocks_inside_the_picture(tmp_path):
    spans = mixed(1000)
    store = stored(tmp_path / "spans", spans)
    begin, end = store.extent()
    view = summarize(store, begin, end, most=200)
    assert 40 < len(view.spans) <= 280
    for lane in LANES:
        assert view.shares[lane] == pytest.approx(shares(spans, lane, begin, end), abs=1e-9)
    assert all(span.begin_s >= begin - 1e-6 and span.end_s <= end + 1e-6 for span in view.spans)
    json.dumps(timeline_chart(view), allow_nan=False)
