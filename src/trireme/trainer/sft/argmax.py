"""What the model would have said: its likeliest token at every position whose logits are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


class Guesses:
    """Likeliest tokens, a few at a time, as the head is asked for logits."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        """The newest so many, and forgets all."""
        newest = torch.cat(self._found)[-count:]  # before a model's first row, some tokens are tried on it
        self._found.clear()
        return newest

    def note(self, logits: torch.Tensor) -> None:
        """Before a model scales or caps them, which changes no order."""
        self._found.append(logits.detach().argmax(-1).flatten())


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[Guesses]:
    """The head keeps telling while this is open."""
    guesses = Guesses()
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _module, _inputs, logits: guesses.note(logits))
    try:
        yield guesses
    finally:
        hook.remove()
