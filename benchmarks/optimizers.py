"""What each optimizer holds per parameter, and how long its step takes, beside the others.

    uv run python benchmarks/optimizers.py [--hidden 256] [--layers 4] [--device cpu]

A model of random weights and random gradients. Seconds are the least of several steps, after one that allocates (and,
on a GPU, compiles). `adamw, plain` is torch's step without fusing, for comparison.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config

from trireme.config.trainer import Optimizer
from trireme.trainer.optim.optimizer import build_optimizer

REPEATS = 3


def build_model(hidden: int, layers: int, device: str) -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=16 * hidden,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def optimizers(model: torch.nn.Module) -> dict[str, torch.optim.Optimizer]:
    ours = {kind: build_optimizer(model, Optimizer(type=kind)) for kind in ("adamw", "adamw_8bit", "muon", "sgd")}
    plain = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    return {"adamw, plain": plain, **ours}


def measure(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Seconds of a step."""
    best = float("inf")
    for repeat in range(REPEATS + 1):
        _wait_for(device)
        began = time.perf_counter()
        optimizer.step()
        _wait_for(device)
        best = min(best, time.perf_counter() - began) if repeat else best
    return best


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bytes_held(optimizer: torch.optim.Optimizer) -> int:
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    model = build_model(asked.hidden, asked.layers, asked.device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters on {asked.device}, {torch.get_num_threads()} threads\n")
    print("| optimizer | bytes per parameter | ms per step |\n|---|---|---|")
    for name, optimizer in optimizers(model).items():
        seconds = measure(optimizer, asked.device)
        print(f"| {name} | {bytes_held(optimizer) / count:.2f} | {seconds * 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    main()
