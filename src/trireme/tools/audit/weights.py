"""Checks of confirmed versions and of checkpoints."""

from __future__ import annotations

import math
from functools import partial

from trireme.algo.weight_checks import first_difference
from trireme.base.errors import JournalCorrupt
from trireme.base.paths import RunPaths, step_folder
from trireme.journal.manifest import find_damage
from trireme.journal.versions import Version, Versions
from trireme.tools.audit.report import Report
from trireme.tools.record_differences import some


def check_versions(
    versions: Versions, known: list[int], report: Report, *, first: int, num_batches: int, may_differ: set[int]
) -> set[int]:
    """Read and check the records of all versions, and that the journal has the batch that each was made from.

    Args:
        first: version of the run, which no batch made.
        may_differ: versions that were trained twice by what may round differently (a GPU, another number of ranks), so
            other digests are only worth a note.

    Returns:
        the versions that engines confirmed
    """
    newest, confirmed = max(known, default=-1), set[int]()
    # versions are confirmed one by one, so a gap below the newest is a lost record
    missing = sorted(set(range(first, newest)) - set(known))
    for version in missing[:20]:
        report.add(
            "versions",
            version,
            f"version {version} has no record, and version {newest} has",
            expected=f"a record of each version that engines ever confirmed, from {first} on",
        )

    for version in known:
        add = partial(report.add, "versions", version)
        try:
            entry = versions.read(version)
        except (JournalCorrupt, OSError) as error:
            add(str(error), expected="a record as it was written")
            continue
        # what the record itself shows comes first: who confirmed it, and with which digests
        if found := _unsound(version, entry):
            add(found, expected="the engines that confirmed it, with the digest of each tensor")
        else:
            confirmed.add(version)
        # a resumed or replayed run confirms a version again, and must come to the same weights
        for number, confirmation in enumerate(entry.confirmations[1:], start=2):
            difference = first_difference(entry.confirmations[0].digests, confirmation.digests)
            if difference is None:
                continue
            found = f"version {version}: its {number}. confirmation says that {difference}, by the first one"
            if version in may_differ and entry.confirmations[0].digests.keys() == confirmation.digests.keys():
                report.note(
                    f"{found} (trained again on a GPU, or by another number of ranks, it may be rounded differently)"
                )
                continue
            add(
                found,
                expected="the same digests at each confirmation of a version",
                advice="A replay did not come to the same version (with another number of ranks it rounds "
                "differently), or the record was changed.",
            )
            break

    report.summary.versions_confirmed = len(confirmed)
    # batch n - 1 makes version n, so no version is newer than the number of batches
    if newest > num_batches:
        report.add(
            "versions",
            num_batches,
            f"version {newest} was confirmed, and there are {num_batches} batches",
            expected=f"batch {newest - 1} in the journal: version n is made by batch n - 1",
            advice="Batches were lost from the journal, or a rewind was cut off on the way: then give the same "
            "command again.",
        )
    return confirmed


def _unsound(version: int, entry: Version) -> str | None:
    """Return what is missing from a record, or wrong in it."""
    digests = [confirmation.digests for confirmation in entry.confirmations]
    difference = max((one.difference for one in entry.confirmations), default=0.0)
    if entry.version != version:
        return f"the record of version {version} is about version {entry.version}"
    if not digests or not all(digests):
        return f"version {version} was recorded without digests"
    if not all(one.engines for one in entry.confirmations):
        return f"version {version} was recorded without an engine that confirmed it"
    if not (math.isfinite(difference) and difference >= 0):
        return f"version {version} was recorded with a difference of {difference} on the probe"
    return None


def check_checkpoints(
    paths: RunPaths, steps: list[int], trained: set[int], report: Report, *, first: int, newest: int
) -> None:
    """Read and check every byte of the checkpoints.

    Args:
        trained: steps with a line of the trainer.
    """
    for step in steps:
        folder = step_folder(paths.checkpoints, step)
        try:
            trouble = find_damage(folder)
        except OSError as error:
            trouble = str(error)
        if not folder.exists():  # removed meanwhile by the trainer, which keeps the last few
            continue

        add = partial(report.add, "checkpoints", step)
        if trouble is not None:
            add(
                trouble,
                expected=f"checkpoint {step} as its manifest describes it",
                advice="Move it away: the run resumes from an earlier one, and comes to the same weights.",
            )
        # a version is confirmed before its checkpoint is saved
        if step > newest:
            add(
                f"{folder} is of version {step}, and the newest confirmed one is {newest}",
                expected="checkpoints of versions that engines confirmed before",
                advice="Confirmations were lost, or it is of another run.",
            )
        # the trainer flushes the lines of all steps before it saves a checkpoint
        missing = sorted(set(range(first, step)) - trained)
        if missing:
            report.add(
                "metrics",
                missing[0],
                f"checkpoint {step} is there, and metrics.jsonl has no line of the trainer for step {some(missing)}",
                expected=f"a line for each of steps {first} to {step - 1}, written before the checkpoint",
                advice="Or the checkpoint is of another run.",
            )
        if not list(step_folder(paths.weights, step).glob("*.safetensors")):
            report.note(f"there is no export of checkpoint {step} in {paths.weights}; removed, or never finished")
