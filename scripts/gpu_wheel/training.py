"""The trainer's forward pass, each loss and each optimizer on tensors of a GPU that exist in shape and device alone.

torch's `FakeTensorMode` runs each operation as to shapes, types and devices, and refuses operands on two devices. The
backward pass cannot run so: autograd asks the driver for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from trireme.messages import MicroBatch
from trireme.trainer.model.forward import _ATTRIBUTE, Scorer, compute_columns
from trireme.trainer.model.head import Head
from trireme.trainer.model.model import build_model
from trireme.trainer.model.packing.attention import use_packed_attention
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.context_parallel import Team
from trireme.trainer.step import policy_gradient
from trireme.trainer.try_step import longest_row

DEVICE = torch.device("cuda", 0)
MODELS = ("models/reverse-text-tiny", "Qwen/Qwen3-0.6B")
ROW, SAMPLE = 256, 100  # tokens of a row, and of its longest sample


def main() -> None:
    for name in MODELS:
        model = build_model(TrainerModel(from_scratch=True), name)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device=DEVICE)
            row = row_for(model)
            check(f"{name}: own forward pass", lambda model=model, row=row: forward(model, row, packed=False))
            check(f"{name}: packed forward pass", lambda model=model, row=row: forward(model, row, packed=True))
            columns = forward(model, row, packed=False)
            for kind in get_args(Loss.model_fields["type"].annotation):
                if kind != "custom":
                    check(f"{name}: loss {kind}", lambda kind=kind, columns=columns: loss(kind, columns))
            for kind in get_args(Optimizer.model_fields["type"].annotation):
                check(f"{name}: optimizer {kind}", lambda kind=kind, model=model: optimizer_step(kind, model))


def check(what: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        Row("failed", what, f"{type(error).__name__}: {error}").print()
    else:
        Row("ok", what).print()


def row_for(model: PreTrainedModel) -> MicroBatch:
    config = RunConfig(seq_len=SAMPLE)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"micro_batch_tokens": ROW})})
    return longest_row(config, vocabulary=model.config.vocab_size, version=0)


def forward(model: PreTrainedModel, row: MicroBatch, *, packed: bool) -> Columns:
    """Compute the columns of a row; all of them must lie on the GPU."""
    scorer = Scorer(model, Team(), 64, 1e-3, Head(model), is_packed=packed, shares_prefixes=packed, is_tried=True)
    if packed:
        use_packed_attention(model)
    vars(model)[_ATTRIBUTE] = scorer
    columns = compute_columns(model, row, DEVICE, entropy_gradient=True)
    elsewhere = {
        name for name, each in vars(columns).items() if isinstance(each, torch.Tensor) and each.device != DEVICE
    }
    assert not elsewhere, f"{elsewhere} are not on {DEVICE}"
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
