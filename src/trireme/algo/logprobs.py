"""Log-probabilities of sampled tokens, and the entropy of the distributions that they came from.

K positions of a row whose next token counts, V vocabulary.
"""

from __future__ import annotations

import torch

_CHUNK = 1024


def token_logprobs(
    logits_KV: torch.Tensor, targets_K: torch.Tensor, temperature_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each target at its sampling temperature, in float32.

    Args:
        logits_KV: [K, V] the model's output at the position before each target.
        targets_K: [K] int64 tokens.
        temperature_K: [K] of the sample that each target belongs to; 0 (greedy) counts as 1.

    Returns:
        [K] logprobs and [K] entropies in nats (no gradient). In chunks: the normalised [K, V] is never whole.
    """
    scale = torch.where(temperature_K > 0, temperature_K, torch.ones_like(temperature_K))
    logprobs, entropies = [], []
    for start in range(0, len(targets_K), _CHUNK):
        part = slice(start, start + _CHUNK)
        normalised = torch.log_softmax(logits_KV[part].float() / scale[part, None], dim=-1)
        logprobs.append(normalised.gather(-1, targets_K[part, None]).squeeze(-1))
        with torch.no_grad():
            entropies.append(torch.special.entr(normalised.exp()).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
