"""Writes down what a run that starts here depends on beside its configuration."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.errors import TriremeError
from trireme.config.run import RunConfig
from trireme.journal.provenance import collect_provenance, describe_environment, write_provenance


def note_surroundings(config: RunConfig, devices: Devices) -> None:
    """Never in the way of a run: what cannot be found out is not there."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    with suppress(OSError):
        write_provenance(config.paths, collect_provenance(devices, _environments(config), command))


def _environments(config: RunConfig) -> dict[str, Any]:
    evaluation = config.orchestrator.eval
    entries = (*config.orchestrator.env, *(evaluation.env if evaluation else ()))
    return {entry.name or entry.id: _environment(entry.id) for entry in entries}


def _environment(id: str) -> dict[str, Any]:
    from trireme.orchestrator.environments.venv import find_environment, installed_venv

    try:
        source = find_environment(id)
        venv = installed_venv(source)
    except (TriremeError, OSError):
        return {}
    file = Path(source.module)
    folder = source.folder or (file if file.suffix == ".py" else None)
    return describe_environment(folder, venv / "bin" / "python" if venv else None)
