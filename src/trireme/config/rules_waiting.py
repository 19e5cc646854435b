"""Rules of how long processes wait for each other: who waits for rollouts waits longer than one may take."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.run import RunConfig


def _a_batch_is_waited_for_as_long_as_a_rollout_may_take(config: RunConfig, _: Devices) -> Iterator[str]:
    environments = config.orchestrator.env
    if not environments:
        return
    slowest = max(environments, key=lambda environment: environment.rollout_timeout_s)
    for key, limit in (
        ("trainer.batch_timeout_s", config.trainer.batch_timeout_s),
        ("orchestrator.trainer_timeout_s", config.orchestrator.trainer_timeout_s),
    ):
        if limit <= slowest.rollout_timeout_s:
            yield (
                f"`{key} = {limit:g}` with `rollout_timeout_s = {slowest.rollout_timeout_s:g}` of environment "
                f"{slowest.name or slowest.id!r} - expected longer than a rollout may take: a batch of slow ones would "
                f"end the run. Set `{key}` to {4 * slowest.rollout_timeout_s:g} or so."
            )


_COMMANDS: tuple[ProcessName | None, ...] = (None, "trainer", "orchestrator")

RULES = ((_a_batch_is_waited_for_as_long_as_a_rollout_may_take, _COMMANDS),)
