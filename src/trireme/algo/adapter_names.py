"""What adapters are called where they are not part of the model: on the wire, in files, in requests."""

from __future__ import annotations

PREFIX = "base_model.model."
"""Of tensors, as PEFT has them in its files; no published model has tensors of this name."""

POLICY = "policy"
"""The name under which an engine that holds adapters serves them; its other name is that of the base model."""


def is_of_adapter(tensor: str) -> bool:
    return tensor.startswith(PREFIX)
