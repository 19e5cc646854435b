"""The model that answers an environment's questions in a check, an evaluation or a prompt search."""

from __future__ import annotations

from typing import Protocol

from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.rollout.driver import RolloutSpec
from trireme.orchestrator.rollout.runner import Finished


class CheckPolicy(Protocol):
    """A script (`check_script`), an engine of ours (`check_engine`), or a chat endpoint (`check_endpoint`)."""

    @property
    def name(self) -> str:
        """For the report."""
        ...

    @property
    def is_policy(self) -> bool:
        """Whether its rewards say how hard the environment is."""
        ...

    async def rollout(self, environment: Environment, spec: RolloutSpec) -> Finished:
        """Raises: RolloutFailed; TriremeError where no other rollout could go better."""
        ...
