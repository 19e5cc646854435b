"""A harness of verifiers 0.4, which is no environment: it drives an agent, and has no tasks."""

import verifiers.v1 as vf
from verifiers.v1.harnesses import NullHarness


class ToyHarness(NullHarness):
    pass


assert issubclass(ToyHarness, vf.Harness)
__all__ = ["ToyHarness"]
