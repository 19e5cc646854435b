"""What the lanes of a run say: shares that add up, reasons, advice, and less to draw without saying anything else."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from trireme.base.processes import free_port
from trireme.config.run import RunConfig
from trireme.launch.standing import look_at
from trireme.monitor.lanes import (
    OTHER,
    advice,
    engine_reasons,
    engine_shares,
    few_requests,
    idle,
    in_words,
    joined,
    lanes_of,
    mean_shares,
    reasons,
    shares,
    steady,
    thin,
    time_lines,
)
from trireme.monitor.spans import ENVIRONMENTS, Span, SpansFile

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


def test_shares_of_a_window_worked_by_hand() -> None:
    found = shares(TRAINER, "trainer", 14.0, 24.0)
    assert found == pytest.approx({"train": 0.2, "wait": 0.7, "transfer": 0.1, OTHER: 0.0}, abs=1e-8)
    assert idle(found) == pytest.approx(0.7)
    assert shares(ENGINE, "engine a:1", 9.0, 19.0) == pytest.approx(
        {"generate": 0.4, "transfer": 0.1, OTHER: 0.5}, abs=1e-8
    )
    assert shares(ENGINE, "engine b:2", 0.0, 10.0) == {OTHER: 1.0}
    assert shares(ENGINE, "engine a:1", 5.0, 5.0) == {OTHER: 1.0}


@pytest.mark.parametrize("seed", range(8))
def test_shares_add_up_to_one_to_the_bit_and_are_what_exact_arithmetic_says(seed: int) -> None:
    spans, rng = random_lane(seed), random.Random(seed)
    begin_s, end_s = sorted(rng.uniform(spans[0].begin_s - 5, spans[-1].end_s + 5) for _ in range(2))
    found = shares(rng.sample(spans, len(spans)), "engine a:1", begin_s, end_s)
    parts = list(found.values())
    assert sum(parts) == sum(rng.sample(parts, len(parts))) == 1.0
    assert min(parts) >= 0.0
    begin_us, end_us = round(begin_s * 1e6), round(end_s * 1e6)
    exact: dict[str, Fraction] = defaultdict(Fraction)
    for span in spans:
        first, last = max(round(span.begin_s * 1e6), begin_us), min(round(span.end_s * 1e6), end_us)
        exact[span.what] += Fraction(max(0, last - first), end_us - begin_us)
    assert {what: found.get(what, 0.0) for what in exact} == pytest.approx(
        {what: float(share) for what, share in exact.items()}, abs=1e-8
    )


def test_spans_that_overlap_whatever_wrote_them_are_counted_once() -> None:
    twice = [*TRAINER, *TRAINER, Span("trainer", "save", 16.0, 4.0)]
    found = shares(twice, "trainer", 10.0, 25.0)
    assert sum(found.values()) == 1.0
    assert found[OTHER] == pytest.approx(0.0, abs=1e-8)


def test_engines_count_as_one_by_their_mean() -> None:
    other = Span("engine b:2", "wait", 15.0, 10.0, 1, "environments are working")
    found = engine_shares([*TRAINER, *ENGINE, other], 15.0, 25.0)
    assert found == pytest.approx({"generate": 0.35, "wait": 0.6, "transfer": 0.05, OTHER: 0.0}, abs=1e-8)
    assert sum(found.values()) == 1.0
    assert engine_reasons([*ENGINE, other], 15.0, 25.0) == [
        ("environments are working", pytest.approx(0.5)),
        ("max_async_level 1", pytest.approx(0.1)),
    ]
    assert engine_shares(TRAINER, 15.0, 25.0) == {OTHER: 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_a_mean_of_shares_adds_up_to_one_to_the_bit(seed: int) -> None:
    lanes = [random_lane(10 * seed + number) for number in range(3)]
    ends = min(lane[0].begin_s for lane in lanes), max(lane[-1].end_s for lane in lanes)
    assert sum(mean_shares(shares(lane, "engine a:1", *ends) for lane in lanes).values()) == 1.0


def test_reasons_leave_out_what_is_told_of_one_case_only() -> None:
    assert reasons(TRAINER, "trainer", 10.0, 25.0) == [("no batch yet", pytest.approx(11 / 15))]
    assert reasons(TRAINER, "trainer", 15.0, 17.0) == []


def test_what_is_typical_of_a_run_leaves_out_its_start_its_restarts_and_its_end() -> None:
    assert steady(TRAINER) == (15.0, 25.0)
    resumed = [
        *TRAINER,
        Span("trainer", "start", 100.0, 8.0),
        Span("trainer", "wait", 108.0, 1.0),
        Span("trainer", "train", 109.0, 2.0, 1),
        Span("trainer", "idle", 111.0, 50.0, 2, "every step is done"),
    ]
    assert steady(resumed) == (109.0, 111.0)
    assert steady(ENGINE) == (0.0, 25.0)  # nothing is trained yet
    assert steady([]) == (0.0, 0.0)


def test_pieces_of_one_thing_are_put_together() -> None:
    pieces = [Span("trainer", "train", 1.0, 1.0, 0), Span("trainer", "train", 2.0, 0.5, 0)]
    apart = [Span("trainer", "train", 3.0, 1.0, 0), Span("trainer", "train", 4.0, 1.0, 1)]
    assert joined([*apart, *reversed(pieces)]) == [Span("trainer", "train", 1.0, 1.5, 0), *apart]


@pytest.mark.parametrize("most", [30, 100, 1000])
def test_a_thinned_picture_has_few_spans_in_the_same_places_and_with_the_same_shares(most: int) -> None:
    spans = [*random_lane(1), *random_lane(2, "trainer")]
    begin_s, end_s = min(span.begin_s for span in spans), max(span.end_s for span in spans)
    drawn = thin(spans, begin_s, end_s, most)
    assert len(drawn) <= most
    for lane in ("trainer", "engine a:1"):
        mine = [span for span in drawn if span.lane == lane]
        assert all(second.begin_s >= first.end_s - 1e-5 for first, second in pairwise(mine))
        assert shares(drawn, lane, begin_s, end_s) == pytest.approx(shares(spans, lane, begin_s, end_s), abs=1e-4)
        half_s = (begin_s + end_s) / 2
        before, after = shares(spans, lane, begin_s, half_s), shares(drawn, lane, begin_s, half_s)
        one_slot = 2 * 2 * 12 / most  # of a half: what is in the middle may be on the other side of it
        assert all(abs(before.get(what, 0.0) - after.get(what, 0.0)) <= one_slot for what in before | after)
    assert thin(TRAINER, 0.0, 25.0, 100) == joined(TRAINER)
    assert [span.step for span in thin(TRAINER, 23.5, 24.5, 100)] == [1, 1]


def test_lanes_are_shown_in_the_order_of_a_step() -> None:
    names = ["engine b:2", "orchestrator", "reader", "engine a:1", "trainer"]
    spans = [Span(lane, "wait", 0.0, 1.0) for lane in names]
    assert lanes_of(spans) == ["trainer", "orchestrator", "engine a:1", "engine b:2", "reader"]


@pytest.mark.parametrize(
    ("trainer", "engines", "says"),
    [
        ({"train": 0.3, "wait": 0.61, OTHER: 0.09}, {"generate": 0.97, "wait": 0.03}, "give more GPUs to inference"),
        ({"train": 0.98, "wait": 0.02}, {"generate": 0.4, "wait": 0.6}, "give more GPUs to the trainer"),
        ({"train": 0.96, "wait": 0.04}, {"generate": 0.97, "wait": 0.03}, "balanced"),
        ({"train": 0.5, "wait": 0.5}, {"generate": 0.5, "wait": 0.5}, "wait for each other"),
        ({"train": 0.6, "transfer": 0.35, "wait": 0.05}, {"generate": 0.6, "transfer": 0.3, "wait": 0.1}, "moving"),
        ({OTHER: 1.0}, {"generate": 1.0}, "too little is known"),
    ],
)
def test_the_side_that_is_waited_for_gets_more_gpus(
    trainer: dict[str, float], engines: dict[str, float], says: str
) -> None:
    assert says in advice(trainer, engines)


def test_engines_that_only_have_the_last_requests_of_a_batch_need_no_more_gpus() -> None:
    tail = Span("engine a:1", "generate", 23.0, 6.0, 1, "few requests: less than half of the 64 that it had")
    spans = [*ENGINE[:-1], tail, Span("engine b:2", "generate", 15.0, 10.0)]
    assert few_requests(spans, 19.0, 29.0) == pytest.approx(0.3)
    assert few_requests(TRAINER, 19.0, 29.0) == 0.0
    said = advice({"train": 0.5, "wait": 0.5}, {"generate": 1.0}, few=0.4)
    assert "more GPUs would not help" in said
    assert "oversampling_factor" in said
    assert "give more GPUs to inference" in advice({"train": 0.5, "wait": 0.5}, {"generate": 1.0}, few=0.1)


def test_where_environments_are_waited_for_more_gpus_are_not_advised() -> None:
    engine = [Span("engine a:1", "generate", 15.0, 6.0), Span("engine a:1", "wait", 21.0, 8.0, 1, ENVIRONMENTS)]
    text = time_lines([*TRAINER, *engine])[-1]
    assert "most of it for environments" in text
    assert "more GPUs would not help" in text
    trainer, engines = {"train": 0.5, "wait": 0.5}, {"generate": 0.4, "wait": 0.6}
    assert "for environments" in advice(trainer, engines, environments=0.4)
    assert "for environments: more" not in advice(trainer, engines, environments=0.1)
    busy = {"train": 0.98, "wait": 0.02}
    assert "give more GPUs to the trainer" in advice(busy, engines, environments=0.6)  # it is what holds things up


def test_the_advice_names_its_figures() -> None:
    said = advice({"train": 0.3, "wait": 0.61, OTHER: 0.09}, {"generate": 0.97, "wait": 0.03})
    assert "waits 61%" in said
    assert "busy 97%" in said


def test_shares_in_words_begin_with_the_largest_and_say_what_was_waited_for() -> None:
    of = {"train": 0.7, "wait": 0.25, "save": 0.001, OTHER: 0.049}
    assert in_words(of, [("", 0.1), ("no batch yet", 0.15)]) == "train 70%, wait 25% (no batch yet), other 5%"


def test_a_status_tells_both_sides_and_what_to_change() -> None:
    trainer, engines, said = time_lines([*TRAINER, *ENGINE])
    assert trainer == "trainer: wait 60% (no batch yet), train 30%, transfer 10%"
    assert engines == "engines: generate 70%, wait 20% (max_async_level 1), transfer 10%"
    assert "give more GPUs to inference" in said
    assert time_lines(ENGINE) == []  # nothing to tell yet
    assert time_lines(TRAINER) == ["trainer: wait 60% (no batch yet), train 30%, transfer 10%"]  # supervised training


def test_the_status_of_a_run_has_them(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path), "orchestrator": {"server": {"port": free_port()}}})
    config.paths.configs.mkdir(parents=True)
    config.paths.run_config.write_text(config.model_dump_json())
    file = SpansFile(config.paths.spans)
    file.lane("trainer", what="train", ago_s=3.0).enter("wait", step=1, why="no batch yet")
    file.close()
    lines = list(look_at(config.paths.root).lines())
    assert [line for line in lines if line.startswith("time ")] == ["time         trainer: train 100%"]
