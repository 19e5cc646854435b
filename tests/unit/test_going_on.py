"""`--resume`: what cannot be gone on with is refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stage import write_checkpoint
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.trainer import Optimizer, TrainerModel
from trireme.config.written import write_run
from trireme.launch.going_on import check_goes_on, is_trained
from written_run import build_config


@pytest.fixture
def earlier(tmp_path: Path) -> RunConfig:
    """It has trained three steps of four."""
    config = build_config(tmp_path / "run").model_copy(update={"max_steps": 4})
    write_run(config, config.paths.run_config)
    config.paths.metrics.touch()
    for step in (2, 3):
        write_checkpoint(config.paths, step)
    return config


def again(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"resume": True} | changes)


def named(config: RunConfig, model: str) -> Any:
    return config.model.model_copy(update={"name": model})


def test_a_run_goes_on_as_it_was_and_further(earlier: RunConfig) -> None:
    for max_steps in (3, 4, 100):
        check_goes_on(again(earlier, max_steps=max_steps))
    assert is_trained(again(earlier, max_steps=3))
    assert not is_trained(earlier)


def test_fewer_steps_than_are_trained_are_refused_with_both_numbers(earlier: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint of step 3, and `max_steps` is 2 - expected 3 or more"):
        check_goes_on(again(earlier, max_steps=2))


def test_another_model_is_refused_with_both_names(earlier: RunConfig) -> None:
    with pytest.raises(ConfigError, match=f"of the model {earlier.model.name!r}, and `model.name` is 'models/other'"):
        check_goes_on(again(earlier, model=named(earlier, "models/other")))


def test_a_model_that_was_moved_is_the_same(earlier: RunConfig) -> None:
    check_goes_on(again(earlier, model=named(earlier, f"/moved/{Path(earlier.model.name).name}")))


def test_a_run_that_starts_afresh_may_be_anything(earlier: RunConfig) -> None:
    check_goes_on(earlier.model_copy(update={"model": named(earlier, "models/other"), "max_steps": 1}))


def trained_by(config: RunConfig, optimizer: str) -> RunConfig:
    trainer = config.trainer
    optim = trainer.optim.model_copy(update={"type": optimizer})
    return again(config, trainer=trainer.model_copy(update={"optim": optim}))


def test_another_optimizer_is_refused_with_both_names_and_adamw_in_8_bits_is_none(earlier: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"trained by 'adamw', and `trainer.optim.type` is 'muon'"):
        check_goes_on(trained_by(earlier, "muon"))
    check_goes_on(trained_by(earlier, "adamw_8bit"))
    anew = trained_by(earlier, "muon")
    ckpt = anew.trainer.ckpt.model_copy(update={"resume_step": 0})
    check_goes_on(anew.model_copy(update={"trainer": anew.trainer.model_copy(update={"ckpt": ckpt})}))


@pytest.fixture
def fine_tuned(tmp_path: Path) -> SftConfig:
    """Three steps of supervised training."""
    config = SftConfig(output_dir=tmp_path / "sft", data="x.jsonl", max_steps=3, model=TrainerModel(name="models/a"))
    write_run(config, config.paths.run_config)
    config.paths.metrics.touch()
    write_checkpoint(config.paths, 3)
    return config.model_copy(update={"resume": True})


def test_supervised_training_is_gone_on_with_in_the_same_way(fine_tuned: SftConfig) -> None:
    check_goes_on(fine_tuned)
    assert is_trained(fine_tuned)
    assert not is_trained(fine_tuned.model_copy(update={"max_steps": 4}))
    with pytest.raises(ConfigError, match=r"step 3, and `max_steps` is 2 .*`--ckpt.resume-step N`"):
        check_goes_on(fine_tuned.model_copy(update={"max_steps": 2}))
    with pytest.raises(ConfigError, match=r"of the model 'models/a', and `model.name` is 'models/b'"):
        check_goes_on(fine_tuned.model_copy(update={"model": TrainerModel(name="models/b")}))
    with pytest.raises(ConfigError, match=r"trained by 'adamw', and `optim.type` is 'sgd'"):
        check_goes_on(fine_tuned.model_copy(update={"optim": Optimizer(type="sgd")}))


def test_epochs_say_nothing_of_steps(fine_tuned: SftConfig) -> None:
    by_epochs = fine_tuned.model_copy(update={"num_epochs": 2.0, "max_steps": 1})
    check_goes_on(by_epochs)
    assert not is_trained(by_epochs)


def test_before_there_is_a_checkpoint_any_optimizer_will_do(tmp_path: Path) -> None:
    config = build_config(tmp_path / "run").model_copy(update={"max_steps": 4})
    write_run(config, config.paths.run_config)
    config.paths.metrics.touch()
    check_goes_on(trained_by(config, "muon"))
