"""Checks that trainer, orchestrator and engines share about weights: adapter names, probe prompts, and digests."""

from __future__ import annotations

PREFIX = "base_model.model."
"""Prefix of an adapter's tensors, as in PEFT's files. No published model has tensors with it."""

POLICY = "policy"
"""The name under which an engine serves the adapters. It also serves the base model under its own name."""


def is_of_adapter(tensor: str) -> bool:
    return tensor.startswith(PREFIX)


def first_difference(expected: dict[str, str], found: dict[str, str]) -> str | None:
    """Name the first entry, in the order of `expected`, that differs, is missing, or was not expected.

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
    """Return [count] tokens from all over the vocabulary, the same for every process."""
    return [(17 + 7919 * place) % vocabulary for place in range(count)]
