"""Which process of a run goes to which machine of a cluster."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.base.errors import ConfigError
from trireme.tools.cluster.job import seconds_of
from trireme.tools.cluster.nodes import Placed, plan_nodes

ALL = tuple(range(8))
TWO = {"nodes": 2, "gpus_per_node": 8}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (TWO, [("inference", 0, 0, ALL), ("orchestrator", 0, 1), ("trainer", 0, 1, ALL)]),
        (
            TWO | {"inference_gpus": 12, "trainer_gpus": 4},  # a machine may hold both kinds
            [
                *(("inference", 0, 0, ALL), ("orchestrator", 0, 1), ("trainer", 0, 1, ALL[4:])),
                ("inference", 1, 1, ALL[:4]),
            ],
        ),
        # the trainer begins on a machine of its own where its shares would differ otherwise
        (
            TWO | {"inference_gpus": 6, "trainer_gpus": 8},
            [("inference", 0, 0, ALL[:6]), ("orchestrator", 0, 1), ("trainer", 0, 1, ALL)],
        ),
        (TWO | {"gpus_per_node": 0}, [("inference", 0, 0), ("orchestrator", 0, 1), ("trainer", 0, 1)]),
    ],
)
def test_gpus_are_dealt_out_engines_first_in_equal_shares_of_the_trainer(asked, expected):
    assert plan_nodes(**asked).processes == tuple(Placed(*each) for each in expected)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"nodes": 3}, {"inference.0": 0, "inference.1": 1, "orchestrator": 2, "trainer": 2}),
        ({"nodes": 3, "inference_nodes": 1}, {"inference": 0, "orchestrator": 1, "trainer.0": 1, "trainer.1": 2}),
        ({"nodes": 1}, {"rl": 0}),
    ],
)
def test_an_odd_machine_is_an_engines_and_processes_of_a_kind_are_numbered(asked, expected):
    plan = plan_nodes(gpus_per_node=8, **asked)
    assert (plan.by_name, plan.leader) == (expected, expected.get("orchestrator", 0))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (TWO | {"inference_gpus": 8, "trainer_gpus": 12}, "at most 16 together"),
        (TWO | {"inference_gpus": 16}, "at least one each"),
        (TWO | {"inference_nodes": 2}, "at most 1"),
        (TWO | {"nodes": 3, "inference_gpus": 8, "trainer_gpus": 8}, "Write `--nodes 2`"),
        (TWO | {"inference_gpus": 4, "trainer_gpus": 12}, r"4 \+ 8"),
        (TWO | {"inference_gpus": 6, "trainer_gpus": 8, "tp": 4}, "machine 0 has 6 GPUs"),
    ],
)
def test_gpus_that_do_not_divide_are_refused_with_a_way_out(asked, said):
    with pytest.raises(ConfigError, match=said):
        plan_nodes(**asked)


@given(st.integers(2, 8), st.integers(0, 8), st.none() | st.integers(1, 64), st.none() | st.integers(1, 64))
def test_no_gpu_is_given_twice_and_none_that_is_not_there(nodes, per_node, engines, trainer):
    try:
        plan = plan_nodes(nodes, per_node, inference_gpus=engines, trainer_gpus=trainer)
    except ConfigError:
        return
    assert {process.machine for process in plan.processes} == set(range(nodes))
    placed = [(each.kind, each.machine, gpu) for each in plan.processes for gpu in each.gpus]
    assert len({(machine, gpu) for _, machine, gpu in placed}) == len(placed)
    assert {gpu for *_, gpu in placed} <= set(range(per_node))
    if per_node and engines and trainer:
        assert Counter(kind for kind, *_ in placed) == {"inference": engines, "trainer": trainer}


def test_a_time_limit_is_read_as_slurm_reads_it():
    read = {"90": 5400, "1:30": 90, "12:00:00": 43200, "2-12": 216000, "1-00:00:05": 86405, "1-6:30": 109800}
    assert {limit: seconds_of(limit) for limit in read} == read
    assert [seconds_of(limit) for limit in ("4h", "", "-1")] == [None] * 3
