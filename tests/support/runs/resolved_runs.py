"""Runs as `rl` loads and resolves them, for tests of the configuration."""

import shlex
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules.check import launch_problems, problems
from trireme.config.run import RunConfig
from trireme.config.section import Section

CPU = Devices(cores=4)


def gpus(count: int, **driver: Any) -> Devices:
    return Devices(gpus=tuple(map(str, range(count))), cores=16, **driver)


GPUS = gpus(4)
ENV = """--orchestrator.env '[{id = "a"}, {id = "b"}]' """


def resolved(flags: str = "", *, on: Devices = CPU, section: ProcessName | None = None) -> RunConfig:
    """Resolve the run that these flags describe, as they are typed in a shell."""
    return resolve(load_run_config(shlex.split(flags), program="rl", section=section)[0], on, section=section)


def run_in(folder: Path, *, resume: bool = False, resume_step: int | None = None) -> RunConfig:
    """Return a run in a folder, new or resumed."""
    values = {"output_dir": folder, "resume": resume, "trainer": {"ckpt": {"resume_step": resume_step}}}
    return RunConfig.model_validate(values)


def refusals(flags: str, words: str = "", *, on: Devices = CPU, at_launch: bool = False) -> list[str]:
    """Return the problems of a run with environments which contain all of `words`, separated by " ... "."""
    found = (launch_problems if at_launch else problems)(resolved(ENV + flags, on=on), on)
    return [message for message in found if all(part in message for part in words.split(" ... "))]


def prefixed(table: str, flags: str) -> str:
    """Put a table before the name of each flag, so that a test about one table need not repeat it."""
    return " ".join(f"--{table}.{word[2:]}" if word.startswith("--") else word for word in flags.split(" "))


def value_at(config: Section, key: str) -> Any:
    """Return the value at a dotted key, as a file of JSON has it; None below a table that is off."""
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = None if value is None else value[int(part) if part.isdigit() else part]
    return value
