"""What each optimizer holds per parameter, and how long its step takes, beside the others.

    uv run python -m benchmarks.trainer.optimizers [--hidden 256] [--layers 4] [--device cpu]

A model of random weights and random gradients. Times are the least of several steps, after one that allocates (and, on
a GPU, compiles). `adamw, plain` is torch's step without fusing, for comparison.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.made_models import qwen3
from benchmarks.measuring import command, least, print_table
from trireme.config.trainer import Optimizer
from trireme.trainer.optim.optimizer import build_optimizer


def main(hidden: int = 256, layers: int = 4, device: str = "cpu") -> None:
    model = build_model(hidden, layers, device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters on {device}, {torch.get_num_threads()} threads\n")
    rows = (
        (name, f"{bytes_held(optimizer) / count:.2f}", f"{seconds * 1e3:.1f}")
        for name, optimizer in optimizers(model).items()
        for seconds in [least(optimizer.step, device)]  # before its state is counted
    )
    print_table(("optimizer", "bytes per parameter", "ms per step"), rows)


def build_model(hidden: int, layers: int, device: str) -> torch.nn.Module:
    config = qwen3(hidden, layers, vocab_size=16 * hidden, num_key_value_heads=max(1, hidden // 128))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def optimizers(model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
    configs = [Optimizer(type=kind) for kind in ("adamw", "adamw_8bit", "muon", "sgd", "sign_sgd")]
    plain = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    return {"adamw, plain": plain} | {str(config.type): build_optimizer(model, config) for config in configs}


def bytes_held(optimizer: torch.optim.Optimizer) -> int:
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


if __name__ == "__main__":
    command(main)
