"""Memory and time of logprobs and entropies from hidden states, with gradients: all logits at once, and in chunks.

    uv run python benchmarks/head.py [--tokens 1024] [--vocabulary 151936] [--hidden 64] [--chunks 128]

Each form runs in a process of its own, whose memory is looked at from outside of PyTorch: the most that it ever held,
less what it held before. Prints one row per form.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trireme.trainer.model.head import Head, HeadOutput, Targets, score_in_chunks

MIB = 2**20


def measure(
    *, device: str, dtype: torch.dtype, tokens: int, vocabulary: int, hidden: int, chunk: int | None, repeats: int = 2
) -> dict[str, float]:
    """
    Args:
        chunk: tokens whose logits exist at once; all at once, by PyTorch's own log-softmax, where None.

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
    before = _held_mib(device)
    best, output = float("inf"), None
    for _ in range(repeats):
        states.grad, model.lm_head.weight.grad = None, None
        began = time.perf_counter()
        if chunk is None:
            output = _plain(model, states, targets)
        else:
            output = score_in_chunks(Head(model), states, targets, chunk=chunk)
        output.logprobs.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    assert output is not None
    return {
        "peak_mib": _held_mib(device) - before,
        "seconds": best,
        "logprobs": float(output.logprobs.sum()),
        "entropies": float(output.entropies.sum()),
        "gradient": float(model.lm_head.weight.grad.float().norm()),
    }


def _plain(model: Qwen3ForCausalLM, states: torch.Tensor, targets: Targets) -> HeadOutput:
    normalised = torch.log_softmax(model.lm_head(states).float(), -1)
    with torch.no_grad():
        entropies = torch.special.entr(normalised.exp()).sum(-1)
    return HeadOutput(normalised.gather(-1, targets.ids[:, None]).squeeze(-1), entropies)


def _held_mib(device: str) -> float:
    """The most until now."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(**settings: object) -> dict[str, float]:
    """`measure` there; the JSON that it prints."""
    code = f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r}); import head, json; "
    arguments = ", ".join(f"{name}={value}" for name, value in settings.items())
    found = subprocess.run(
        [sys.executable, "-c", code + f"print('RESULT' + json.dumps(head.measure({arguments})))"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, found.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128])
    options = parser.parse_args()
    sizes = {"tokens": options.tokens, "vocabulary": options.vocabulary, "hidden": options.hidden}
    logits_mib = options.tokens * options.vocabulary * 4 / MIB
    print(
        f"all logits in float32: {logits_mib:,.0f} MiB; the head: {options.vocabulary * options.hidden * 4 / MIB:,.0f}"
    )
    print(f"{'form':>14} {'peak MiB':>10} {'seconds':>9} {'logprobs':>14} {'gradient':>12}")
    for chunk in (None, *options.chunks):
        found = in_own_process(device="'cpu'", dtype="torch.float32", chunk=chunk, **sizes)
        form = "plain" if chunk is None else f"chunks of {chunk}"
        print(
            f"{form:>14} {found['peak_mib']:>10,.0f} {found['seconds']:>9.2f} {found['logprobs']:>14.4f} "
            f"{found['gradient']:>12.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
