"""What cannot be trained on is refused before anything starts: advantages, pools, stages of a curriculum."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.config.rules import launch_problems, problems
from trireme.config.rules_data import LAUNCH_RULES, RULES
from trireme.config.run import RunConfig

CPU = Devices(cores=2)


def config_of(**orchestrator: Any) -> RunConfig:
    given = {"env": [{"id": "a"}, {"id": "b"}], "batch_size": 8, "rollouts_per_example": 4}
    return RunConfig.model_validate({"device": "cpu", "orchestrator": given | orchestrator})


def refused(**orchestrator: Any) -> str:
    return "\n".join(message for rule, _ in RULES for message in rule(config_of(**orchestrator), CPU))


STAGES = [{"weights": {"a": 1.0}}, {"weights": {"a": 1.0, "b": 0.5}, "from_step": 10}]


@pytest.mark.parametrize(
    "orchestrator",
    [
        {},
        {"curriculum": STAGES},
        {"curriculum": [*STAGES, {"weights": {"b": 1.0}, "from_reward": 0.7}]},
        {"buffer": {"pools": {}}},
        {"buffer": {"pools": {"easy_weight": 0.0, "hard_weight": 0.0}}},
        {"buffer": {"use_difficulty_filtering": True, "difficulty_threshold": 0.3}},
        {"advantage": {"type": "custom", "path": "m:f"}},
        {"advantage": {"type": "batch"}, "rollouts_per_example": 1},
        {"teacher": {"base_url": "http://x"}, "rollouts_per_example": 1},
        {"length_penalty": {"max_length": 100, "buffer": 100}},
    ],
)
def test_what_makes_sense_is_not_refused(orchestrator) -> None:
    assert refused(**orchestrator) == ""


@pytest.mark.parametrize(
    ("orchestrator", "words"),
    [
        ({"curriculum": [{"weights": {"a": 1.0}, "from_step": 3}]}, "first .* has `from_step = 3` - expected no"),
        ({"curriculum": [{"weights": {"a": 1.0}, "from_reward": 0.5}]}, "has `from_reward = 0.5` - expected no"),
        ({"curriculum": [STAGES[0], {"weights": {"b": 1.0}}]}, "stage 1 .* has neither"),
        (
            {"curriculum": [STAGES[0], {"weights": {"b": 1.0}, "from_step": 2, "from_reward": 0.1}]},
            "stage 1 .* has both `from_step = 2` and `from_reward = 0.1`",
        ),
        (
            {"curriculum": [*STAGES, {"weights": {"b": 1.0}, "from_step": 10}]},
            "a stage from step 10 is followed by one from step 10",
        ),
        ({"curriculum": [{"weights": {"a": 1.0, "c": 1.0}}]}, "stage 0 .* gives a weight to c - .* a, b"),
        ({"curriculum": [{"weights": {"a": 0.0}}]}, "gives no environment any weight"),
        ({"curriculum": [{"weights": {}}]}, "gives no environment any weight"),
        ({"buffer": {"pools": {"easy_threshold": 0.1, "hard_threshold": 0.9}}}, "easy_threshold = 0.1, hard_threshold"),
        ({"buffer": {"pools": {"normal_weight": 0.0}}}, "what was never seen is normal"),
        ({"buffer": {"use_difficulty_filtering": True}}, "with difficulty_threshold = 0"),
        ({"buffer": {"difficulty_threshold": 0.3}}, "without `use_difficulty_filtering`"),
        ({"rollouts_per_example": 1}, '"group_mean" with orchestrator.rollouts_per_example = 1'),
        ({"advantage": {"type": "leave_one_out"}, "rollouts_per_example": 1}, '"leave_one_out" with'),
        ({"advantage": {"type": "custom"}}, 'type = "custom" without `path`'),
        ({"advantage": {"path": "m:f"}}, 'path = "m:f" with `type = "group_mean"`'),
        ({"advantage": {"reward_clip": [1.0, -1.0]}}, r"reward_clip = \[1.0, -1.0\]"),
        ({"length_penalty": {"max_length": 50, "buffer": 60}}, "buffer = 60 is more than its max_length = 50"),
    ],
)
def test_what_makes_none_is_refused_with_its_values_and_a_way_out(orchestrator, words) -> None:
    message = refused(**orchestrator)
    assert re.search(words, message), message
    assert " - expected" in message
    assert message.count("\n") == 0


def test_a_function_that_is_not_there_is_refused_before_the_launch(tmp_path: Path) -> None:
    config = config_of(advantage={"type": "custom", "path": f"{tmp_path}/mine.py:advantage"})
    (message,) = [message for rule, _ in LAUNCH_RULES for message in rule(config, CPU)]
    assert "mine.py does not exist" in message
    assert message in launch_problems(config, CPU)


def test_these_rules_are_among_those_that_every_run_is_checked_by() -> None:
    assert any(
        "what was never seen is normal" in message
        for message in problems(config_of(buffer={"pools": {"normal_weight": 0.0}}), CPU)
    )
