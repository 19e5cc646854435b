"""Fixed prompts, on which two that should compute the same are compared."""

from __future__ import annotations


def probe_ids(vocabulary: int, count: int) -> list[int]:
    """[count] tokens from all over the vocabulary, the same for everybody who asks."""
    return [(17 + 7919 * place) % vocabulary for place in range(count)]
