"""What is refused of the optimizer and its schedule, for `rl` and `sft` alike."""

from __future__ import annotations

import pytest

from trireme.config import rules_optim
from trireme.config.rules_optim import optim_launch_problems, optim_problems
from trireme.config.trainer import Lora, Optimizer, Scheduler, TrainerModel


def refusals(
    optim: Optimizer | None = None,
    scheduler: Scheduler | None = None,
    model: TrainerModel | None = None,
    *,
    max_steps: int = 100,
) -> list[str]:
    given = optim or Optimizer(), scheduler or Scheduler(), model or TrainerModel()
    of_rl, of_sft = ([*optim_problems(prefix, *given, max_steps=max_steps)] for prefix in ("trainer.", ""))
    assert [problem.replace("trainer.", "") for problem in of_rl] == of_sft
    return of_rl


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_every_optimizer_goes_with_every_schedule(kind: str, schedule: str) -> None:
    assert refusals(Optimizer(type=kind), Scheduler(type=schedule, warmup_steps=10)) == []


def test_warm_up_and_decay_must_both_fit() -> None:
    (problem,) = refusals(scheduler=Scheduler(type="wsd", warmup_steps=50, decay_steps=60))
    assert "warmup_steps = 50 and decay_steps = 60 of max_steps = 100" in problem
    assert "they take 110" in problem
    assert refusals(scheduler=Scheduler(type="wsd", warmup_steps=40, decay_steps=60)) == []
    (problem,) = refusals(scheduler=Scheduler(type="wsd", warmup_steps=10), max_steps=10)
    assert "warmup_steps = 10 and decay_steps = 1 of" in problem


def test_a_decay_that_nothing_reads_is_refused() -> None:
    (problem,) = refusals(scheduler=Scheduler(type="cosine", decay_steps=5))
    assert 'trainer.scheduler.decay_steps = 5 with type = "cosine"' in problem


def test_a_floor_above_the_peak_or_that_is_never_reached_is_refused() -> None:
    (above,) = refusals(Optimizer(lr=1e-5), Scheduler(type="cosine", min_lr=1e-4))
    assert "min_lr = 0.0001, trainer.optim.lr = 1e-05" in above
    (unread,) = refusals(Optimizer(lr=1e-5), Scheduler(min_lr=1e-6))
    assert 'with type = "constant"' in unread


def test_decays_of_moments_are_shares() -> None:
    (problem,) = refusals(Optimizer(betas=(0.9, 1.0)))
    assert "trainer.optim.betas = [0.9, 1.0]" in problem


def test_muon_is_not_for_adapters() -> None:
    adapted = TrainerModel(lora=Lora())
    (problem,) = refusals(Optimizer(type="muon"), model=adapted)
    assert "[trainer.model.lora]" in problem
    assert refusals(Optimizer(type="adamw_8bit"), model=adapted) == []


def test_what_8_bits_need_is_looked_for_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = Optimizer(type="adamw_8bit")
    assert [*optim_launch_problems("", eight, "cpu")] == []
    monkeypatch.setattr(rules_optim.shutil, "which", lambda name: None)
    (compiler,) = optim_launch_problems("trainer.", eight, "cuda")
    assert "there is no C compiler" in compiler
    assert [*optim_launch_problems("trainer.", Optimizer(), "cuda")] == []
