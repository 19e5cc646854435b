"""`[eval]` of `sft`: which steps it is due at, what is refused, and where its engine runs."""

from pathlib import Path
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.config.resolve import resolve_evaluating_run, resolve_sft
from trireme.config.resume import when_of
from trireme.config.sft import SftConfig, sft_problems

CPU = Devices(cores=2)
BOTH = {"interval": 4, "env": [{"id": "a"}, {"id": "b", "interval": 3, "eval_base": False}]}


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "data.jsonl").write_text("{}\n")
    return str(tmp_path / "data.jsonl")


def configured(evaluation: dict[str, Any], **more: Any) -> SftConfig:
    return SftConfig.model_validate({"eval": evaluation} | more)


def test_each_environment_is_due_at_its_own_interval_or_the_end():
    due = {step: configured(BOTH).evaluated_at(step, last=10) for step in range(11)}
    assert {step: names for step, names in due.items() if names} == {
        **{0: ["a"], 3: ["b"], 4: ["a"], 6: ["b"], 8: ["a"], 9: ["b"], 10: ["a", "b"]}
    }
    assert configured(BOTH).evaluated_at(10, last=None) == []
    assert SftConfig().evaluated_at(10, last=10) == []


@pytest.mark.parametrize(
    ("evaluation", "more", "said"),
    [
        ({}, {}, "[[eval.env]]"),
        ({"env": [{"id": "a"}, {"id": "x/a"}]}, {}, '"a"'),
        ({"env": [{"id": "a"}]}, {"model": {"from_scratch": True}}, "eval_base = false"),
        ({"env": [{"id": "a"}], "rollouts_per_example": 2, "sampling": {"temperature": 0}}, {}, "temperature = 0"),
    ],
)
def test_what_an_evaluation_cannot_do_is_refused_in_one_line(evaluation, more, said, data):
    (found,) = sft_problems(configured(evaluation, data=data, **more))
    assert said in found


def test_an_engine_without_an_evaluation_is_refused(data):
    config = SftConfig.model_validate({"data": data, "inference": {"max_num_seqs": 8}})
    assert "add `[eval]`" in next(sft_problems(config))


def test_a_sound_evaluation_is_not_refused(data):
    assert list(sft_problems(configured(BOTH, data=data))) == []


def test_evaluations_are_greedy_unless_a_temperature_is_given():
    config = resolve_sft(configured({"env": [{"id": "x/a"}], "sampling": {"max_tokens": 9}}), CPU)
    assert config.eval is not None
    assert (config.eval.sampling.temperature, config.eval.sampling.max_tokens) == (0.0, 9)
    assert config.eval.env[0].name == "a"


@pytest.mark.parametrize(
    ("gpus", "ranks", "given", "engine", "share"),
    [
        (4, 3, {}, 3, 0.9),
        (4, 4, {"num_ranks": 4}, 3, 0.4),
        (1, 1, {}, 0, 0.4),
        (1, 1, {"inference": {"gpu_memory_utilization": 0.2}}, 0, 0.2),
    ],
)
def test_the_engine_takes_the_gpu_after_those_of_the_ranks(gpus, ranks, given, engine, share):
    devices = Devices(gpus=tuple(map(str, range(gpus))), cores=8)
    config = resolve_sft(configured(BOTH, **given), devices)
    run = resolve_evaluating_run(config, devices)
    assert (config.num_ranks, run.inference_gpu_ids) == (ranks, (engine,))
    assert run.inference.gpu_memory_utilization == share


@pytest.mark.parametrize("key", ["eval", "eval.interval", "eval.env.0.args.n", "inference.model.max_model_len"])
def test_a_resumed_run_may_change_its_evaluation(key):
    assert when_of(key, is_sft=True) == "at once"
