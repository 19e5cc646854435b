"""The steps of a run that can be replayed: every batch must be there, and a recorded result to compare with."""

from __future__ import annotations

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import RunPaths, step_folder
from trireme.journal.journal import Journal
from trireme.journal.manifest import complete_steps
from trireme.journal.versions import Versions


def find_span(paths: RunPaths, first: int, last: int | None) -> range:
    """Return the steps from version `first` to version `last`, or to the newest.

    Raises:
        ConfigError: the run has no such versions, no checkpoint to start from, or no recorded result.
        JournalCorrupt: a batch in between is missing.
    """
    journal, versions = Journal(paths.journal), Versions(paths.journal)
    newest = max(0, versions.newest, *(step + 1 for step in journal.steps()))
    span = range(first, newest if last is None else last)
    if not 0 <= span.start <= span.stop <= newest:
        raise ConfigError(
            f"Versions {span.start} to {span.stop} were asked for, the run in {paths.root} has 0 to {newest}. "
            "Give `--from` and `--until` within these."
        )
    if first and first not in (have := complete_steps(paths.checkpoints)):
        raise ConfigError(
            f"There is no whole checkpoint of step {first} in {paths.checkpoints} - it has {have or 'none'}. "
            "Give `--from` one of these, or leave it out to start from the base model."
        )
    missing = next((step for step in span if not journal.has(step)), None)
    if missing is not None:
        raise JournalCorrupt(
            f"{journal.path(missing)} is not there: without batch {missing}, version {span.stop} cannot be trained "
            f"again. Restore it, or stop before it with `--until {missing}`, or start after it with `--from`."
        )
    if not any(_is_recorded(version, paths, versions) for version in (*span, span.stop)):
        raise ConfigError(
            f"Nothing is recorded of versions {span.start} to {span.stop} in {paths.root} - expected "
            f"{versions.path(span.start)} and its like, which say what engines confirmed. Replay a run that has them."
        )
    return span


def _is_recorded(version: int, paths: RunPaths, versions: Versions) -> bool:
    return versions.has(version) or step_folder(paths.weights, version).is_dir()
