"""Memory and time of logprobs and entropies from hidden states, with gradients: all logits at once, and in chunks.

    uv run python -m benchmarks.trainer.head [--tokens 1024] [--vocabulary 151936] [--hidden 64] [--chunks 128]

Each form runs in a process of its own, whose memory is looked at from outside of PyTorch: the most that it ever held,
less what it held before. Sums of logprobs and the norm of the head's gradient show that all forms compute the same.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measuring import command, print_table, wall_s
from trireme.trainer.model.head import Head, HeadOutput, Targets, score_in_chunks

MIB = 2**20
COLUMNS = ("form", "peak MiB", "seconds", "sum of logprobs", "norm of the head's gradient")


def main(tokens: int = 1024, vocabulary: int = 151936, hidden: int = 64, chunks: tuple[int, ...] = (128,)) -> None:
    sizes = {"tokens": tokens, "vocabulary": vocabulary, "hidden": hidden}
    print(f"all logits in float32: {tokens * vocabulary * 4 / MIB:,.0f} MiB")
    print(f"the head: {vocabulary * hidden * 4 / MIB:,.0f} MiB\n")
    print_table(COLUMNS, rows_of(sizes, chunks))


def rows_of(sizes: dict[str, int], chunks: tuple[int, ...]) -> Iterator[list[str]]:
    for chunk in (None, *chunks):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            options = sizes | {"device": "cpu", "dtype": torch.float32, "chunk": chunk}
            found = pool.apply(measure, kwds=options)
        form = "all logits at once" if chunk is None else f"chunks of {chunk}"
        figures = (f"{found['peak_mib']:,.0f}", f"{found['seconds']:.2f}", f"{found['logprobs']:.4f}")
        yield [form, *figures, f"{found['gradient']:.6f}"]


def measure(
    *, device: str, dtype: torch.dtype, tokens: int, vocabulary: int, hidden: int, chunk: int | None, repeats: int = 2
) -> dict[str, float]:
    """
    Args:
        chunk: tokens whose logits exist at once; None for all at once, by PyTorch's own log-softmax.

    Returns:
        `peak_mib` beyond weights and hidden states, `seconds` of forward and backward (the best of some), and the sums
        of logprobs and entropies and the norm of the head's gradient, for comparison.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 8, "num_attention_heads": 1, "head_dim": 8}
    with torch.device(device):
        config = Qwen3Config(**sizes, vocab_size=vocabulary, num_hidden_layers=0, num_key_value_heads=1)
        model = Qwen3ForCausalLM(config).to(dtype)
        states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
        targets = Targets(torch.randint(0, vocabulary, (tokens,)), torch.ones(tokens), None)
    outputs: list[Any] = []

    def work() -> None:
        states.grad, model.lm_head.weight.grad = None, None
        outputs.clear()
        outputs.append(
            _plain(model, states, targets)
            if chunk is None
            else score_in_chunks(Head(model), states, targets, chunk=chunk)
        )
        outputs[0].logprobs.sum().backward()

    before = _held_mib(device)
    seconds = min(wall_s(work, device) for _ in range(repeats))
    return {
        "peak_mib": _held_mib(device) - before,
        "seconds": seconds,
        "logprobs": float(outputs[0].logprobs.detach().sum()),
        "entropies": float(outputs[0].entropies.sum()),
        "gradient": float(model.lm_head.weight.grad.float().norm()),
    }


def _plain(model: Qwen3ForCausalLM, states: torch.Tensor, targets: Targets) -> HeadOutput:
    normalised = torch.log_softmax(model.lm_head(states).float(), -1)
    with torch.no_grad():
        entropies = torch.special.entr(normalised.exp()).sum(-1)
    return HeadOutput(normalised.gather(-1, targets.ids[:, None]).squeeze(-1), entropies)


def _held_mib(device: str) -> float:
    """Return the most that the process has held until now."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    command(main)
