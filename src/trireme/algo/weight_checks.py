"""What adapters are called where they are not part of the model: on the wire, in files, in requests."""

from __future__ import annotations

PREFIX = "base_model.model."
"""Of tensors, as PEFT has them in its files; no published model has tensors of this name."""

POLICY = "policy"
"""The name under which an engine that holds adapters serves them; its other name is that of the base model."""


def is_of_adapter(tensor: str) -> bool:
    return tensor.startswith(PREFIX)


def first_difference(expected: dict[str, str], found: dict[str, str]) -> str | None:
    """The first entry, in the order of `expected`, that differs, is missing, or is too many.

    Example:
        first_difference({"norm": "ab"}, {"norm": "cd"})  # "norm has digest cd, expected ab"
    """
    for name, digest in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != digest:
            return f"{name} has digest {found[name]}, expected {digest}"
    extra = [name for name in found if name not in expected]
    return f"{extra[0]} was not sent" if extra else None


def probe_ids(vocabulary: int, count: int) -> list[int]:
    """[count] tokens from all over the vocabulary, the same for everybody who asks."""
    return [(17 + 7919 * place) % vocabulary for place in range(count)]
