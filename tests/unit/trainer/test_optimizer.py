"""The optimizers: each against an independent calculation, what a checkpoint brings back of it, and learning rates."""

from copy import deepcopy
from functools import cache
from math import inf, nan, sqrt
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, SequentialLR

from support.models import tiny
from trireme.base.errors import ConfigError, NotFinite
from trireme.config.trainer import Optimizer, Scheduler, TrainerModel
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.model import load_model
from trireme.trainer.optim import state_offload
from trireme.trainer.optim.muon import orthogonal, rate_of
from trireme.trainer.optim.optimizer import build_optimizer, lr_factor, set_lr
from trireme.trainer.parallel.shards import local_part
from trireme.trainer.step import optimizer_step

Tensors = dict[str, torch.Tensor]
Saved = tuple[Path, Tensors, Tensors]


def state_with(folder, world, kind):
    model = load_model(TrainerModel(), str(folder), world)
    return TrainerState(model=model, optimizer=build_optimizer(model, Optimizer(type=kind, lr=1e-2, weight_decay=0.1)))


@pytest.fixture(scope="module")
def saved_by(tiny_model, world, tmp_path_factory):
    """The folder of a checkpoint after two steps, what it holds, and what one more step makes of that."""

    @cache
    def saved(kind: str) -> Saved:
        state, folder = state_with(tiny_model, world, kind), tmp_path_factory.mktemp(kind)
        for seed in range(2):
            tiny.train_step(state, tiny.random_samples([12, 20], seed=seed), world)
        tiny.save(folder, state, world)
        return folder, tiny.content_of(state), next_content(state, world)

    return saved


def next_content(state, world):
    tiny.train_step(state, tiny.random_samples([30], seed=2), world)
    return tiny.content_of(state)


def resumed(kind, folder, tiny_model, world):
    state = state_with(tiny_model, world, kind)
    tiny.open_store(folder, world).resume(state, resume=True)
    return state


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon", "sgd", "sign_sgd"])
def test_what_is_resumed_goes_on_to_the_same_bits(kind, saved_by, tiny_model, world):
    folder, content, content_after = saved_by(kind)
    state = resumed(kind, folder, tiny_model, world)
    assert tiny.are_equal(tiny.content_of(state), content)
    assert tiny.are_equal(next_content(state, world), content_after)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon", "sgd"])
def test_state_in_cpu_memory_gives_the_same_bits(kind, saved_by, tiny_model, world, monkeypatch, tmp_path):
    monkeypatch.setattr(state_offload, "STATE_CHUNK", 20_000)  # bytes: several chunks, and parameters that are larger
    folder, content, content_after = saved_by(kind)
    state = state_with(tiny_model, world, kind)
    num_groups = len(state.optimizer.param_groups)
    offloaded = state_offload.with_offload(state.optimizer)
    assert len(offloaded.param_groups) > num_groups

    tiny.open_store(folder, world).resume(state, resume=True)
    put_away = addresses(state)
    assert tiny.are_equal(tiny.content_of(state), content)
    assert tiny.are_equal(next_content(state, world), content_after)
    assert addresses(state) == put_away, "between steps, the state is where it was put away"

    # What is saved is what a run without offloading resumes from.
    tiny.save(tmp_path, state, world)
    assert tiny.are_equal(tiny.content_of(resumed(kind, tmp_path, tiny_model, world)), content_after)


def addresses(state: TrainerState) -> dict[tuple[int, str], int]:
    held = state.optimizer.state
    return {
        (id(parameter), key): local_part(tensor).data_ptr()
        for parameter, of_parameter in held.items()
        for key, tensor in of_parameter.items()
        if isinstance(tensor, torch.Tensor) and tensor.ndim
    }


def test_on_a_cpu_offloading_state_changes_nothing(tiny_model, world, caplog):
    model = load_model(TrainerModel(), str(tiny_model), world)
    optimizer = build_optimizer(model, Optimizer(cpu_offload=True))
    assert not isinstance(optimizer, state_offload.OffloadsState)
    assert "cpu_offload has no effect here" in caplog.text


@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_moments_in_8_bits_and_in_32_go_on_from_each_other(before, after, saved_by, tiny_model, world):
    """After the switch its next step is that of the optimizer before, but for the precision of the format."""
    folder, began, straight = saved_by(before)
    switched = next_content(resumed(after, folder, tiny_model, world), world)
    names = [name for name in began if " of " not in name]
    moved = sum((straight[name] - began[name]).square().sum() for name in names).sqrt()
    assert sum((straight[name] - switched[name]).square().sum() for name in names).sqrt() < 0.05 * moved
    formats = [{name: it.dtype for name, it in each.items()} for each in (switched, saved_by(after)[1])]
    assert formats[0] == formats[1]


OTHERS = [("adamw_8bit", "muon"), ("sgd", "adamw"), ("muon", "adamw_8bit"), ("sgd", "sign_sgd")]


@pytest.mark.parametrize(("before", "after"), OTHERS)
def test_another_kind_of_optimizer_is_refused_with_both_names(before, after, saved_by, tiny_model, world):
    words = f"optimizer is '{before.removesuffix('_8bit')}', and `optim.type` is '{after}'"
    with pytest.raises(ConfigError, match=words):
        resumed(after, saved_by(before)[0], tiny_model, world)


def test_moments_in_codes_of_an_earlier_version_are_refused(tiny_model, world, tmp_path):
    state = state_with(tiny_model, world, "adamw_8bit")
    tiny.train_step(state, tiny.random_samples([12]), world)
    for held in state.optimizer.state.values():
        held.pop("ranges", None)
    tiny.save(tmp_path, state, world)
    with pytest.raises(ConfigError, match="codes without `ranges`"):
        resumed("adamw_8bit", tmp_path, tiny_model, world)


def test_sign_sgd_moves_each_weight_by_the_learning_rate():
    model = torch.nn.Linear(3, 1)
    optim = Optimizer(type="sign_sgd", lr=0.5, weight_decay=0.2, betas=(0.1, 0.2))
    optimizer = build_optimizer(model, optim)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
        model.bias.fill_(4.0)
    model.weight.grad, model.bias.grad = torch.tensor([[1e-20, -7.0, 0.0]]), torch.tensor([0.1])
    set_lr(optimizer, optim, Scheduler(warmup_steps=2), step=0, max_steps=9)  # half of the rate, so decay is 0.05
    optimizer.step()
    assert model.weight.tolist() == [pytest.approx([0.95 - 0.25, -1.9 + 0.25, 2.85])]
    assert model.bias.tolist() == [3.75]
    assert not optimizer.state


def test_orthogonal_update_has_singular_values_near_one():
    for shape in ((40, 40), (64, 24), (24, 64), (3, 24, 40)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonal(matrix))
        assert 0.3 < float(values.min()) <= float(values.max()) < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.mT @ orthogonal(matrix) @ v.mT
        diagonal = torch.diag_embed(torch.diagonal(inside, dim1=-2, dim2=-1))
        assert float((inside - diagonal).abs().max()) < 1e-4


def test_muon_is_torchs_muon():
    torch.manual_seed(0)
    ours = torch.nn.Linear(128, 96)
    theirs = deepcopy(ours)
    optimizer = build_optimizer(ours, Optimizer(type="muon", lr=1e-2, weight_decay=0.1))
    reference = torch.optim.Muon([theirs.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = ours.weight.detach().clone()
    for seed in range(3):
        gradient = torch.randn(96, 128, generator=torch.Generator().manual_seed(seed))
        ours.weight.grad, theirs.weight.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    moved, expected = ours.weight.detach() - before, theirs.weight.detach() - before
    assert (moved - expected).norm() / expected.norm() < 0.02  # theirs is rounded to bfloat16 on the way
    assert rate_of(torch.Size([3, 64, 256])) == pytest.approx(0.2 * 16)


def test_muon_takes_the_matrices_of_layers_and_adamw_all_the_rest(saved_by):
    keys: dict[str, set[str]] = {}
    for key, _, name in (found.partition(" of ") for found in saved_by("muon")[1] if " of " in found):
        keys.setdefault(name, set()).add(key)
    hidden = {name for name, found in keys.items() if found == {"momentum_buffer"}}
    assert hidden == {name for name in keys if "proj" in name}
    assert all(keys[name] == {"step", "exp_avg", "exp_avg_sq"} for name in keys.keys() - hidden)


def test_norms_and_biases_are_exempt_from_weight_decay():
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = torch.nn.Parameter(torch.ones(2, 4, 6))
            self.down_proj_bias = torch.nn.Parameter(torch.ones(2, 6))
            self.norm = torch.nn.Parameter(torch.ones(6))

    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"experts": Experts()})})
    optimizer = build_optimizer(model, Optimizer(type="muon", weight_decay=0.1))
    groups = {tuple(p.shape): (g["is_hidden"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert groups == {(2, 4, 6): (True, 0.1), (2, 6): (False, 0.0), (6,): (False, 0.0)}


def step_with(value, state, config):
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return optimizer_step(state, config)["skipped_in_a_row"]


def test_a_run_ends_after_so_many_broken_steps_in_a_row_also_across_a_stop(tiny_model, world, tmp_path):
    state, config = state_with(tiny_model, world, "adamw"), Optimizer(max_nonfinite=3)
    assert [step_with(value, state, config) for value in (nan, nan, 1.0)] == [1, 2, 0]
    before = tiny.weights_of(state.model)
    assert [step_with(nan, state, config) for _ in range(2)] == [1, 2]
    state.version = 1
    tiny.save(tmp_path, state, world)
    again = resumed("adamw", tmp_path, tiny_model, world)
    assert tiny.are_equal(tiny.content_of(state), tiny.content_of(again))
    for each in (state, again):
        with pytest.raises(NotFinite, match=r"3 optimizer steps in a row, .* batch 1 \(norm nan\)") as caught:
            step_with(nan, each, config)
        assert caught.value.exit_code == 3  # which the launcher takes for final
        assert tiny.are_equal(before, tiny.weights_of(each.model))
    with pytest.raises(NotFinite, match="1 optimizer steps in a row"):
        step_with(nan, state_with(tiny_model, world, "adamw"), Optimizer(nonfinite="stop", max_nonfinite=3))


@pytest.mark.parametrize("value", [nan, inf])
def test_the_step_that_makes_weights_not_finite_ends_the_run(tiny_model, world, value):
    state = state_with(tiny_model, world, "adamw")
    state.version = 4
    for group in state.optimizer.param_groups:
        group["lr"] = value
    with pytest.raises(NotFinite, match="step on batch 4 made weights that are not finite") as caught:
        step_with(1.0, state, Optimizer(max_nonfinite=3))
    assert caught.value.exit_code == 3


HALF = sqrt(0.5)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("constant", {"warmup_steps": 4, "min_lr": 0.5}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", {"warmup_steps": 2, "min_lr": 0.5}, [0.5, 1.0, 1.0, 0.75, 0.5]),
        ("cosine", {}, [1.0, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0.0]),
        ("cosine", {"min_lr": 0.2}, [1.0, 0.6, 0.2]),
        ("cosine", {"warmup_steps": 3}, [1 / 3, 2 / 3, 1.0, 1.0]),  # all warm-up: nothing is divided by 0
        ("wsd", {"warmup_steps": 2, "min_lr": 0.2, "decay_steps": 4}, [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("wsd", {"warmup_steps": 2, "decay_steps": 4}, [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("wsd", {}, [1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_schedules_by_hand(kind, settings, expected):
    last, scheduler = len(expected) - 1, Scheduler(type=kind, **settings)
    found = [lr_factor(step, Optimizer(lr=1.0), scheduler, max_steps=last) for step in range(last + 1)]
    assert found == pytest.approx(expected)
    beyond = lr_factor(last + 90, Optimizer(lr=1.0), scheduler, max_steps=last)
    assert beyond == (1.0 if kind == "constant" else settings.get("min_lr", 0.0))


@pytest.mark.parametrize(("warmup", "decay", "steps"), [(10, 10, 30), (2, 8, 12), (5, 3, 9)])
def test_wsd_is_within_one_step_of_the_linear_schedule_of_prime_rl(warmup, decay, steps):
    """Torch's own schedulers, put together as prime-rl does: the first step's rate is 0 there, and the last one's."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    ends = [(1e-8, 1.0, warmup), (1.0, 1.0, steps - warmup - decay), (1.0, 1e-8, decay - 1)]
    parts = [LinearLR(optimizer, start_factor=a, end_factor=b, total_iters=n) for a, b, n in ends]
    theirs = SequentialLR(optimizer, parts, milestones=[warmup, steps - decay])
    scheduler = Scheduler(type="wsd", warmup_steps=warmup, decay_steps=decay)

    for step in range(steps):
        ours = lr_factor(step, Optimizer(lr=1.0), scheduler, max_steps=steps)
        one_step = 1 / warmup if step < warmup else 1 / decay if step >= steps - decay else 0.0
        assert theirs.get_last_lr()[0] == pytest.approx(ours, abs=one_step + 1e-6)
        optimizer.step()
        theirs.step()


def test_a_tenth_of_the_run_is_decay_unless_configured():
    assert [Scheduler(type="wsd").decay_of(steps) for steps in (5, 10, 99, 200)] == [1, 1, 9, 20]
    assert Scheduler(type="wsd", decay_steps=3).decay_of(200) == 3
