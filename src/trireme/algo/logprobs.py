"""Log-probabilities of the tokens of a row, and the entropy of the distributions that they came from."""

from __future__ import annotations

import torch

_CHUNK = 1024


def token_logprobs(
    logits_TV: torch.Tensor, ids_T: torch.Tensor, temperature_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of each token given those before it, at its sampling temperature, in float32.

    Args:
        logits_TV: [T, V] the model's output; position t predicts token t + 1.
        ids_T: [T] the row's tokens.
        temperature_T: [T] of the sample that each token belongs to; 0 (greedy) counts as 1.

    Returns:
        [T] logprobs and [T] entropies (no gradient), both shifted to the token they speak of; position 0 is 0. The
        first token of each packed sample gets a number without meaning: its loss mask is 0.
    """
    scale = torch.where(temperature_T > 0, temperature_T, torch.ones_like(temperature_T))
    logprobs, entropies = [ids_T.new_zeros(1, dtype=torch.float32)], [ids_T.new_zeros(1, dtype=torch.float32)]
    for start in range(0, len(ids_T) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(ids_T) - 1)
        scaled = logits_TV[start:stop].float() / scale[start + 1 : stop + 1, None]
        normalised = torch.log_softmax(scaled, dim=-1)
        logprobs.append(normalised.gather(-1, ids_T[start + 1 : stop + 1, None]).squeeze(-1))
        with torch.no_grad():
            entropies.append(-(normalised.exp() * normalised).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
