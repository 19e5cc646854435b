"""Which process of a run goes to which machine of a cluster."""

import pytest

from trireme.base.errors import ConfigError
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.tools.cluster.nodes import ClusterPlan, plan_nodes

TWO = {"nodes": 2, "gpus_per_node": 8}


@pytest.mark.parametrize(
    ("flags", "keys", "expected"),
    [
        (TWO, {}, (2, 8, 1)),
        (TWO | {"nodes": 3}, {}, (3, 8, 2)),  # an odd machine is an engine's
        (TWO | {"nodes": 3, "inference_nodes": 1}, {}, (3, 8, 1)),
        (TWO | {"gpus_per_node": 0}, {}, (2, 0, 1)),
        ({}, {"device": "cpu"}, (1, 0, 0)),
        ({}, {"inference_gpus": 2, "trainer_gpus": 1}, (1, 3, 0)),
        ({}, {"inference_gpu_ids": (0, 1), "trainer_gpu_ids": (1,)}, (1, 2, 0)),
        ({}, {"inference_gpus": 8, "trainer_gpus": 16}, (3, 8, 1)),
        ({"nodes": 3}, {"inference_gpus": 4, "trainer_gpus": 2}, (3, 2, 2)),
        ({"nodes": 3, "gpus_per_node": 8}, {"trainer_gpus": 16}, (3, 8, 1)),
    ],
)
def test_machines_are_whole_and_the_first_are_the_engines(flags, keys, expected):
    assert plan_nodes(updated(RunConfig(), keys), **flags) == ClusterPlan(*expected)


def test_the_orchestrator_is_on_the_trainers_first_machine():
    plan = ClusterPlan(num_nodes=4, gpus_per_node=8, num_engines=2)
    found = {name: list(machines) for name, machines in plan.machines.items()}
    assert (found, plan.leader) == ({"inference": [0, 1], "orchestrator": [2], "trainer": [2, 3]}, 2)
    assert plan.describe()[2] == "machine 2  orchestrator, trainer on 8 GPUs"


@pytest.mark.parametrize(
    ("flags", "keys", "words"),
    [
        ({}, {}, "`--gpus-per-node 8`, or 0"),
        (TWO, {"hosts.trainer": ("a",)}, r"has a table `\[hosts\]`"),
        (TWO | {"nodes": 1}, {"inference_gpus": 8, "trainer_gpus": 8}, "Write `--nodes 2`"),
        (TWO, {"inference_gpu_ids": (0,)}, "Write `--inference-nodes`"),
        (TWO | {"inference_nodes": 2}, {}, "expected 1 to 1"),
        (TWO, {"inference_gpus": 16}, "2 of 2 machines are for engines"),
        (TWO, {"inference_gpus": 8, "trainer_gpus": 12}, "Write multiples of `--gpus-per-node`"),
        (TWO, {"inference_gpus": 4, "trainer_gpus": 12}, "inference_gpus = 4 and trainer_gpus = 12"),
        (TWO | {"nodes": 3}, {"inference_gpus": 8, "trainer_gpus": 8}, "no machine left over"),
        (TWO, {"inference.parallel.tp": 3}, "each machine has 8 GPUs"),
    ],
)
def test_gpus_that_are_not_those_of_whole_machines_are_refused_with_a_way_out(flags, keys, words):
    with pytest.raises(ConfigError, match=words):
        plan_nodes(updated(RunConfig(), keys), **flags)
