"""The configuration's own rules, as the commands ask them of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.config.rules import file_problems, launch_problems, problems
from trireme.tools.doctor.commands import commands_of, port_problems
from trireme.tools.doctor.finding import Case, Finding, ok, told


def configuration(case: Case) -> Iterator[Finding]:
    """What ports, models and files of environments have to say is said by their own questions."""
    elsewhere = {*port_problems(case), *file_problems(case.config)}
    found = [words for words in dict.fromkeys(_problems(case)) if words not in elsewhere]
    yield from map(told, found)
    if not found:
        config = case.config
        what = "as it was typed" if case.is_given else "the quickstart's, for none was named"
        yield ok(
            f"{what}: {config.max_steps} steps of {config.orchestrator.batch_size} rollouts on {config.device}, "
            f"weights over {config.weight_broadcast.type}"
        )


def _problems(case: Case) -> Iterator[str]:
    for command in commands_of(case):
        yield from problems(command.config, case.devices, section=command.room)
        yield from launch_problems(command.config, case.devices, section=command.room)
