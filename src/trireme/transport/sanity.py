"""Validation of decoded requests: numbers in range of the run, tensors that fit together.

The decoder checks types and bounds (`messages.py`). This checks what they cannot express, so that no later code has to
test whether a rank is smaller than its world.

Example:
    check_request(GetBatch(run_id="run", step=3, rank=2, world=2), max_steps=10, num_batches=5)
    # "GetBatch asks for rank 2 of a world of 2 - 0 to 1 was expected"
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trireme.messages import Done, GetBatch, Heartbeat, PolicyReady, PolicySent, Request


def check_request(request: Request, *, max_steps: int, num_batches: int) -> str | None:
    """Return what is wrong with a request, or None.

    Args:
        num_batches: number of batches in the journal. No batch after the one being filled can be requested, and no
            later version trained.
    """
    problem = next(_problems(request, max_steps, num_batches), None)
    return problem and f"{type(request).__name__} {problem}"


def _problems(request: Request, max_steps: int, num_batches: int) -> Iterator[str]:
    match request:
        # Batches are numbered from 0. The one after the last in the journal is being filled, and may be waited for.
        case GetBatch(step=step, rank=rank, world=world):
            if step > (last := min(max_steps - 1, num_batches)):
                yield f"asks for batch {step} - 0 to {last} was expected"
            if rank >= world:
                yield f"asks for rank {rank} of a world of {world} - 0 to {world - 1} was expected"

        # Version N comes from batches 0 to N - 1, so it cannot be newer than the journal.
        case PolicyReady() | PolicySent() | Done():
            if request.version > (last := min(max_steps, num_batches)):
                yield f"is about version {request.version} - 0 to {last} was expected"

        # A heartbeat only reports: a bound by the length of the run is enough.
        case Heartbeat():
            if request.version > max_steps:
                yield f"is at version {request.version} - at most {max_steps} was expected"

    # Digests and shapes are looked up by name later, so a name must not occur twice.
    if isinstance(request, PolicyReady):
        names = {spec.name for spec in request.specs}
        if len(names) < len(request.specs):
            yield f"announces {len(request.specs)} tensors under {len(names)} names - as many were expected"

        # Engines allocate what is announced, so an absurd shape must not reach them.
        for spec in request.specs:
            if math.prod(spec.shape) >= 2**48:
                yield f"announces {repr(spec)[:200]} - fewer than 2^48 elements were expected"

    if isinstance(request, PolicySent):
        probe = request.probe
        if len(probe.logprobs) != len(probe.ids) - 1:
            yield f"has {len(probe.logprobs)} logprobs of {len(probe.ids)} probe tokens - one fewer was expected"
        if not math.isfinite(probe.noise):
            yield f"has a probe with noise {probe.noise} - a finite number was expected"

        # Logprobs of sound weights are at most 0, up to rounding. NaN and infinity mean that training has diverged.
        for logprob in probe.logprobs:
            if not (math.isfinite(logprob) and logprob <= 1e-3):
                yield (
                    f"has {logprob} among its probe's logprobs - finite ones of at most 0 were expected; the trainer's "
                    "weights no longer make sense: look at `loss` and `grad_norm` in metrics.jsonl"
                )


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
