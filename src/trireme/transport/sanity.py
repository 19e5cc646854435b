"""Validation of decoded requests: numbers in range, tensors that fit together.

The decoder checks types. This checks what types cannot express, so that no later code has to test whether a rank is
smaller than its world.

Example:
    check_request(GetBatch(run_id="run", step=3, rank=2, world=2), max_steps=10, num_batches=5)
    # "GetBatch asks for rank 2 of 2 - a rank from 0 to 1 was expected"
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from trireme.messages import (
    Done,
    GetBatch,
    Heartbeat,
    PolicyReady,
    PolicySent,
    Probe,
    Request,
    TensorSpec,
)

MOST_RANKS = 1 << 16
MOST_WORDS = 1 << 10  # of a heartbeat, each no longer than LONGEST_WORDS
LONGEST_WORDS = 1 << 12
KINDS = ("gloo", "nccl", "ipc", "filesystem")

DIGEST = re.compile(r"[!-~]{1,256}")
DTYPE = re.compile(r"[a-z][a-z0-9_]{1,31}")


def check_request(request: Request, *, max_steps: int | None = None, num_batches: int | None = None) -> str | None:
    """Return what is wrong with a request, or None.

    Args:
        max_steps: of the run.
        num_batches: in the journal. No batch after the one being filled can be requested, and no later version trained.
    """
    for problem in _problems(request, max_steps, num_batches):
        return f"{type(request).__name__} {problem}"
    return None


def check_digests(ready: PolicyReady, sent: PolicySent) -> str | None:
    """Return what is wrong with a transfer's digests, given the tensors that were announced for it, or None."""
    announced, digested = {spec.name for spec in ready.specs}, set(sent.digests)
    if announced == digested:
        return None
    names = sorted(announced ^ digested)
    return (
        f"PolicySent has digests of {len(digested)} tensors where {len(announced)} were announced; they differ in "
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} - one for each announced tensor was expected"
    )


def _problems(request: Request, max_steps: int | None, num_batches: int | None) -> Iterator[str]:
    match request:
        case GetBatch(step=step, rank=rank, world=world):
            yield from _outside(
                "asks for batch", step, 0, _smaller(None if max_steps is None else max_steps - 1, num_batches)
            )
            yield from _outside("is of a world of", world, 1, MOST_RANKS)
            yield from _outside(f"of world {world} is of rank", rank, 0, world - 1)
        case PolicyReady():
            yield from _outside("announces version", request.version, 0, _smaller(max_steps, num_batches))
            yield from _problems_of_transfer(request)
        case PolicySent():
            yield from _outside("is about version", request.version, 0, _smaller(max_steps, num_batches))
            yield from _outside("is of attempt", request.attempt, 0, 2**31)
            if not request.digests:
                yield "has no digests - one for each tensor was expected"
            for name, digest in request.digests.items():
                if DIGEST.fullmatch(digest) is None:
                    yield f"has {digest[:80]!r} for the digest of {name[:200]} - letters without spaces were expected"
            yield from _problems_of_probe(request.probe)
        case Heartbeat():
            yield from _outside("is at version", request.version, -1, _smaller(max_steps))
            if not 0 < len(request.process) <= 64 or len(request.state) > LONGEST_WORDS:
                yield "names its process in no letter or in more than 64 - 1 to 64 were expected"
            if len(request.waits) > MOST_WORDS or any(len(text) > LONGEST_WORDS for text in request.waits):
                yield f"has {len(request.waits)} waits, or one of over {LONGEST_WORDS} letters - fewer were expected"
        case Done(version=version):
            yield from _outside("says that it has finished version", version, 0, _smaller(max_steps, num_batches))


def _smaller(*numbers: int | None) -> int:
    return min((number for number in numbers if number is not None), default=2**31)


def _outside(what: str, value: int, low: int, high: int) -> Iterator[str]:
    if not low <= value <= high:
        yield f"{what} {value} - a number from {low} to {high} was expected"


def _problems_of_transfer(request: PolicyReady) -> Iterator[str]:
    yield from _outside("is of attempt", request.attempt, 0, 2**31)
    yield from _outside("names port", request.port, 0, 65535)
    if request.kind not in KINDS:
        yield f"would send by {request.kind[:40]!r} - one of {', '.join(KINDS)} was expected"
    if not 0 < len(request.incarnation) <= 256 or not 0 < len(request.host) <= 256:
        yield "names a trainer or a host in no letter or in more than 256 - 1 to 256 were expected"
    names = {spec.name for spec in request.specs}
    if not names or len(names) < len(request.specs):
        yield f"announces {len(request.specs)} tensors under {len(names)} names - as many were expected, and some"
    for spec in request.specs:
        if not _is_tensor(spec):
            yield f"announces {repr(spec)[:200]} - a dtype and a shape of positive numbers were expected"


def _is_tensor(spec: TensorSpec) -> bool:
    """Return whether a spec can be a parameter: no dimension of 0, at most 2^48 elements."""
    return (
        DTYPE.fullmatch(spec.dtype) is not None
        and len(spec.shape) <= 8
        and all(size > 0 for size in spec.shape)
        and math.prod(spec.shape) < 2**48
    )


def _problems_of_probe(probe: Probe) -> Iterator[str]:
    if len(probe.ids) < 2 or len(probe.logprobs) != len(probe.ids) - 1:
        yield f"has {len(probe.logprobs)} logprobs of {len(probe.ids)} probe tokens - one fewer was expected"
    if any(not 0 <= token < 2**31 for token in probe.ids):
        yield "has a negative or absurd token in its probe - ids of the vocabulary were expected"
    odd = [logprob for logprob in probe.logprobs if not (math.isfinite(logprob) and logprob <= 1e-3)]
    if odd:
        yield (
            f"has {odd[0]} among its probe's logprobs - finite ones of at most 0 were expected; the trainer's weights "
            "no longer make sense: look at `loss` and `grad_norm` in metrics.jsonl"
        )
