"""Moments in 8 bits: small, near those in 32, and resumed to the same bits."""

import pytest
import torch
import torch._dynamo as dynamo

from trireme.config.trainer import Optimizer
from trireme.trainer.optim import adamw_8bit
from trireme.trainer.optim.optimizer import build_optimizer


def test_8_bits_hold_a_quarter_of_what_32_do_and_little_more():
    module = torch.nn.Linear(256, 256)
    optimizer = build_optimizer(module, Optimizer(type="adamw_8bit", lr=1e-3))
    module.weight.grad = torch.randn(256, 256)
    optimizer.step()
    state = optimizer.state[module.weight]
    num_bytes = sum(tensor.numel() * tensor.element_size() for key, tensor in state.items() if key != "step")
    assert num_bytes == 2 * 256 * 256 + 3 * 4 * 2 * 256  # two codes per value, and 3 numbers for each half of a row


@pytest.mark.parametrize(
    "shape_of",
    [
        *(lambda normal, _, scale=scale: scale * normal for scale in (1.0, 1e-5, 1e-7)),
        lambda normal, uniform: normal * 10 ** (-3 * uniform[0]),
        lambda normal, uniform: normal * (uniform < 0.05),
        lambda normal, _: normal * torch.where(torch.arange(256) == 7, 3000.0, 1.0),
    ],
    ids=["1", "1e-5", "1e-7", "rms of 1 to 1e-3", "one in twenty not 0", "one channel 3,000 times larger"],
)
def test_8_bits_go_the_way_that_32_go_whatever_the_gradients(shape_of):
    size, generator = (300, 16, 256), torch.Generator().manual_seed(0)
    gradients = shape_of(torch.randn(size, generator=generator), torch.rand(size, generator=generator))
    ways, largest = {}, {}
    for kind in ("adamw", "adamw_8bit"):
        module = torch.nn.Linear(256, 16, bias=False)
        torch.nn.init.zeros_(module.weight)
        optimizer = build_optimizer(module, Optimizer(type=kind, lr=1e-4))
        steps = []
        for gradient in gradients:
            before = module.weight.detach().clone()
            module.weight.grad = gradient
            optimizer.step()
            steps.append((module.weight.detach() - before).abs().max())
        ways[kind], largest[kind] = module.weight.detach(), max(steps)
    assert largest["adamw_8bit"] < 2.5 * largest["adamw"]
    assert (ways["adamw_8bit"] - ways["adamw"]).norm() < 0.05 * ways["adamw"].norm()
    assert not torch.equal(ways["adamw_8bit"], ways["adamw"])


def test_the_compiled_step_of_8_bits_covers_every_shape_of_a_model(monkeypatch):
    """And is the step that a CPU takes. torch's default is to compile a function for eight shapes."""
    shapes = [*((64 * each, 128) for each in range(1, 7)), *((32, 256 * each) for each in range(1, 7))]
    shapes += [(32,), (96,), (128,)]
    made = []
    eager = adamw_8bit._take_step
    for step in (eager, torch.compile(eager, backend="eager", **adamw_8bit.COMPILED)):
        monkeypatch.setattr(adamw_8bit, "_take_step", step)
        draw = torch.Generator().manual_seed(0)
        module = torch.nn.ParameterList(torch.randn(shape, generator=draw) for shape in shapes)
        optimizer = build_optimizer(module, Optimizer(type="adamw_8bit", lr=1e-2, weight_decay=0.1))
        with dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(2):
                for weight in module:
                    weight.grad = torch.randn(weight.shape, generator=draw)
                optimizer.step()
        made.append([weight.detach() for weight in module])
    assert all(map(torch.equal, *made))
