"""Which process of a run goes to which machine of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.base.errors import ConfigError
from trireme.launch.cluster.job import seconds_of
from trireme.launch.cluster.nodes import ClusterPlan, Wanted, plan_nodes


def spread(**asked: int) -> list[list[tuple[str, int, tuple[int, ...]]]]:
    plan = plan_nodes(Wanted(**asked))
    return [[(process.room, process.place, process.gpus) for process in node.processes] for node in plan.nodes]


ALL = tuple(range(8))


def test_two_machines_are_one_for_the_engine_and_one_for_the_trainer_with_the_orchestrator():
    assert spread(nodes=2, gpus_per_node=8) == [[("inference", 0, ALL)], [("orchestrator", 0, ()), ("trainer", 0, ALL)]]


def test_an_odd_machine_goes_to_the_engines():
    kinds = [[room for room, _, _ in processes] for processes in spread(nodes=3, gpus_per_node=8)]
    assert kinds == [["inference"], ["inference"], ["orchestrator", "trainer"]]


def test_the_engines_share_can_be_said_in_machines():
    kinds = [[room for room, _, _ in node] for node in spread(nodes=4, gpus_per_node=8, inference_nodes=1)]
    assert kinds == [["inference"], ["orchestrator", "trainer"], ["trainer"], ["trainer"]]


def test_a_machine_may_hold_both_kinds():
    assert spread(nodes=2, gpus_per_node=8, inference_gpus=12, trainer_gpus=4) == [
        [("inference", 0, ALL)],
        [("orchestrator", 0, ()), ("trainer", 0, (4, 5, 6, 7)), ("inference", 1, (0, 1, 2, 3))],
    ]


def test_a_side_that_says_nothing_takes_what_the_other_leaves():
    assert spread(nodes=4, gpus_per_node=4, trainer_gpus=8) == spread(
        nodes=4, gpus_per_node=4, inference_gpus=8, trainer_gpus=8
    )


def test_the_trainer_begins_on_a_machine_of_its_own_where_its_shares_would_differ_otherwise():
    assert spread(nodes=2, gpus_per_node=8, inference_gpus=6, trainer_gpus=8) == [
        [("inference", 0, (0, 1, 2, 3, 4, 5))],
        [("orchestrator", 0, ()), ("trainer", 0, ALL)],
    ]


def test_machines_without_gpus_are_whole():
    assert spread(nodes=2, gpus_per_node=0) == [[("inference", 0, ())], [("orchestrator", 0, ()), ("trainer", 0, ())]]


def test_one_machine_has_a_plan_of_its_own():
    plan = plan_nodes(Wanted(nodes=1, gpus_per_node=8))
    assert plan.is_single
    assert plan.by_name == {"rl": 0}
    assert plan.describe() == ["machine 0  rl on 8 GPUs"]


def test_processes_of_a_kind_are_told_apart_by_number_where_there_are_several():
    plan = plan_nodes(Wanted(nodes=3, gpus_per_node=1))
    assert plan.by_name == {"inference.0": 0, "inference.1": 1, "orchestrator": 2, "trainer": 2}
    assert plan.leader == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"nodes": 2, "gpus_per_node": 8, "inference_gpus": 8, "trainer_gpus": 12}, "at most 16 together"),
        ({"nodes": 2, "gpus_per_node": 8, "inference_gpus": 16}, "at least one each"),
        ({"nodes": 3, "gpus_per_node": 8, "inference_gpus": 8, "trainer_gpus": 8}, "Write `--nodes 2`"),
        ({"nodes": 2, "gpus_per_node": 8, "inference_gpus": 4, "trainer_gpus": 12}, "4 + 8"),
        ({"nodes": 2, "gpus_per_node": 8, "inference_gpus": 6, "trainer_gpus": 8, "tp": 4}, "machine 0 has 6 GPUs"),
        ({"nodes": 2, "gpus_per_node": 8, "inference_nodes": 2}, "at most 1"),
    ],
)
def test_gpus_that_do_not_divide_are_refused_with_a_way_out(asked, said):
    with pytest.raises(ConfigError) as refused:
        plan_nodes(Wanted(**asked))
    assert said in str(refused.value)


@given(
    nodes=st.integers(2, 8),
    per_node=st.integers(0, 8),
    engines=st.none() | st.integers(1, 64),
    trainer=st.none() | st.integers(1, 64),
)
def test_no_gpu_is_given_twice_and_none_that_is_not_there(nodes, per_node, engines, trainer):
    try:
        plan = plan_nodes(Wanted(nodes, per_node, inference_gpus=engines, trainer_gpus=trainer))
    except ConfigError:
        return
    for node in plan.nodes:
        assert node.processes
        gpus = [gpu for process in node.processes for gpu in process.gpus]
        assert len(gpus) == len(set(gpus))
        assert set(gpus) <= set(range(per_node))
    if per_node and engines and trainer:
        assert _count(plan, "inference") == engines
        assert _count(plan, "trainer") == trainer


def _count(plan: ClusterPlan, room: str) -> int:
    return sum(len(process.gpus) for node in plan.nodes for process in node.processes if process.room == room)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("12:00:00", 43200),
        ("2-12", 216000),
        ("1-00:00:05", 86405),
        ("1-6:30", 109800),
        ("4h", None),
        ("", None),
        ("-1", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(limit, seconds):
    assert seconds_of(limit) == seconds
