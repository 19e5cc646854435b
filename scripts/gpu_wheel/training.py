"""The trainer's forward pass, each loss and each optimizer on tensors of a GPU that exist in shape and device alone.

torch's `FakeTensorMode` runs each operation as to shapes, types and devices, and refuses operands on two devices. The
backward pass cannot run so: autograd asks the driver for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import get_args

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor compiles for a device that it finds

import torch
from rows import Row
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from trireme.algo.columns import Columns, Totals
from trireme.config.losses import Loss
from trireme.config.run import RunConfig
from trireme.config.trainer import Optimizer, TrainerModel
from trireme.trainer.model.forward import _ATTRIBUTE, Scorer, compute_columns
from trireme.trainer.model.head import Head
from trireme.trainer.model.model import build_model
from trireme.trainer.model.packing.attention import FLASH, SDPA, use_packed_attention
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.context_parallel import Team
from trireme.trainer.step import policy_gradient
from trireme.trainer.try_step import longest_row

DEVICE = torch.device("cuda", 0)
MODELS = ("models/reverse-text-tiny", "Qwen/Qwen3-0.6B")
ROW, SAMPLE = 256, 100  # tokens of a row, and of its longest sample


def main() -> None:
    for name, dtype, attention in product(MODELS, (torch.float32, torch.bfloat16), (None, SDPA, FLASH)):
        model = build_model(TrainerModel(from_scratch=True), name).to(dtype)
        what = f"{name} in {str(dtype).removeprefix('torch.')}"
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=DEVICE)
            if attention != FLASH or dtype == torch.bfloat16:  # the kernel takes half precision alone
                check(f"{what}, {attention or 'own'} attention: forward pass", partial(forward, model, attention))
            if attention is None and dtype == torch.float32:  # weights are updated in it alone
                check_updates(what, model)


def check_updates(what: str, model: PreTrainedModel) -> None:
    columns = forward(model, None)
    for kind in get_args(Loss.model_fields["type"].annotation):
        if kind != "custom":
            check(f"{what}, loss {kind}", partial(loss, kind, columns))
    for kind in get_args(Optimizer.model_fields["type"].annotation):
        check(f"{what}, optimizer {kind}", partial(optimizer_step, kind, model))


def check(what: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        Row("failed", what, f"{type(error).__name__}: {error}").print()
    else:
        Row("ok", what).print()


def forward(model: PreTrainedModel, attention: str | None) -> Columns:
    """Compute the columns of a row; all of them must lie on the GPU.

    Args:
        attention: over packed samples; None for transformers' own, with a mask of the whole row.
    """
    config = RunConfig(seq_len=SAMPLE)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"micro_batch_tokens": ROW})})
    row = longest_row(config, vocabulary=model.config.vocab_size, version=0)
    is_packed = attention is not None
    if attention is not None:
        use_packed_attention(model, attention)

    # A scorer that was tried already: trying one compares values, which these tensors do not have.
    vars(model)[_ATTRIBUTE] = Scorer(
        model, Team(), 64, 1e-3, Head(model), is_packed=is_packed, shares_prefixes=is_packed, is_tried=True
    )
    columns = compute_columns(model, row, DEVICE, entropy_gradient=True)
    tensors = {name: each for name, each in vars(columns).items() if isinstance(each, torch.Tensor)}
    elsewhere = [name for name, each in tensors.items() if each.device != DEVICE]
    assert not elsewhere, f"{', '.join(elsewhere)} are not on {DEVICE}"
    return columns


def loss(kind: str, columns: Columns) -> None:
    terms = policy_gradient(Loss(type=kind), length=SAMPLE)(columns, Totals(tokens=ROW, samples=3))
    assert terms.loss.device == DEVICE, f"the loss is on {terms.loss.device}"


def optimizer_step(kind: str, model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, Optimizer(type=kind))
    optimizer.step()
    states = [each for state in optimizer.state.values() for name, each in state.items() if name != "step"]
    assert {each.device for each in states} <= {DEVICE}, "a moment is not on the GPU"


if __name__ == "__main__":
    main()
