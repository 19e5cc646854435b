"""Models that are made for a benchmark: a Qwen3 of any size, and one whose answers have the lengths that are wanted.

The latter counts down, and does all the work of a model. Every word says how many are still to come: after "a7" or
"b7", by chance, comes "a6" or "b6", and after "a0" the end. A prompt's last word chooses the distribution that the
first one is drawn from. That is written into embeddings and head (orthogonal enough, and steep); the layers between are
random, and add nothing to what passes by them: but all of it is computed, forwards and backwards, as in any model.

V words, H hidden size, N lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

STEEP = 40.0  # logit of what is to come; of all else it is 40 times a cosine of random vectors. Steeper ones give
# probabilities below the smallest normal float32, with which some processors compute a hundred times slower.
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %} <end>{% endif %}"
    "{% endfor %}"
)


def qwen3(hidden: int, layers: int, **changes: Any) -> Qwen3Config:
    """Describe a Qwen3 of this width and depth, with heads of 64, two to a group.

    Args:
        changes: other values of keys of its config.json.
    """
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "head_dim": 64,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**sizes | changes)


@dataclass(frozen=True)
class Spread:
    """The lengths of answers: log-normal, cut off at `longest`, with this mean; 0 makes all equal."""

    variation: float  # standard deviation over mean, as asked for
    mean: int = 64
    longest: int = 512

    @property
    def word(self) -> str:
        return f"spread{round(100 * self.variation)}"

    def shares(self) -> np.ndarray:
        """[N] of each length from 1 on. The mean is what was asked for, whatever was cut off."""
        lengths = np.arange(1, self.longest + 1)
        if not self.variation:
            return (lengths == self.mean).astype(float)
        low, high = 0.1, 100.0 * self.mean
        for _ in range(80):  # the mean grows with the scale: halve the range until it fits
            middle = (low * high) ** 0.5
            shares = self._log_normal(lengths, middle)
            low, high = (middle, high) if (shares * lengths).sum() < self.mean else (low, middle)
        return shares

    def _log_normal(self, lengths: np.ndarray, mean: float) -> np.ndarray:
        variance = np.log1p(self.variation**2)
        density = np.exp(-((np.log(lengths) - np.log(mean) + variance / 2) ** 2) / (2 * variance)) / lengths
        return density / density.sum()

    def true_variation(self) -> float:
        """After cutting off."""
        lengths, shares = np.arange(1, self.longest + 1), self.shares()
        mean = (shares * lengths).sum()
        return float(np.sqrt((shares * (lengths - mean) ** 2).sum()) / mean)


def write_countdown(folder: Path, spreads: list[Spread], *, hidden: int, layers: int, heads: int) -> Path:
    """Write a model's folder, as `transformers` and vLLM load it, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    longest = max(spread.longest for spread in spreads)
    tokenizer = _tokenizer(longest, [spread.word for spread in spreads])
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": hidden // heads}
    words = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, "eos_token_id": 1, "pad_token_id": 0}
    model = Qwen3ForCausalLM(qwen3(hidden, layers, **shape, **words, max_position_embeddings=4096)).float()
    _write_counting(model, tokenizer, spreads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _tokenizer(longest: int, prompts: list[str]) -> PreTrainedTokenizerFast:
    counts = [f"{mark}{left}" for mark in "ab" for left in range(longest)]
    words = ["<pad>", "<end>", "<other>", *prompts, *(f"n{number}" for number in range(100)), *counts]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )


@torch.no_grad()
def _write_counting(model: Any, tokenizer: PreTrainedTokenizerFast, spreads: list[Spread]) -> None:
    for layer in model.model.layers:  # a layer adds nothing
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    longest = max(spread.longest for spread in spreads)
    size, num_prompts = model.config.hidden_size, len(spreads)
    counts_NH = nn.functional.pad(_directions(longest, size - num_prompts), (0, num_prompts))
    prompts = torch.eye(size)[-num_prompts:]  # in places of their own, so that first words are drawn as they should be
    embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
    head.zero_()
    scale = size**0.5  # the last norm makes a vector of length 1 this long
    for mark in "ab":
        first = tokenizer.convert_tokens_to_ids(f"{mark}0")
        embeddings[first : first + longest] = counts_NH
        head[first : first + longest - 1] = counts_NH[1:] * STEEP / scale
        for prompt, spread in zip(prompts, spreads, strict=True):
            shares = torch.zeros(longest)
            shares[: spread.longest] = torch.from_numpy(spread.shares())
            logits = STEEP + shares.clamp(min=1e-30).log().clamp(min=-STEEP)
            head[first : first + longest] += logits[:, None] * prompt / scale
    head[tokenizer.eos_token_id] = counts_NH[0] * STEEP / scale
    for prompt, spread in zip(prompts, spreads, strict=True):
        embeddings[tokenizer.convert_tokens_to_ids(spread.word)] = prompt


def _directions(count: int, size: int) -> torch.Tensor:
    """[count, size] of length 1, pushed apart until no two are near each other."""
    vectors = nn.functional.normalize(torch.randn(count, size), dim=-1)
    for _ in range(200):
        overlap = vectors @ vectors.T - torch.eye(count)
        vectors = nn.functional.normalize(vectors - 0.3 * (overlap.sign() * overlap.abs() ** 3) @ vectors, dim=-1)
    return vectors
