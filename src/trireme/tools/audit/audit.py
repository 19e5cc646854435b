"""`trireme audit RUN`: prove from disk, with no process running, that a run lost nothing and trained nothing twice.

Every fact of a run is on disk before a process acts on it: a version's confirmation before a token of it is used, a
batch before the trainer sees it, a step's metrics before its checkpoint. So an effect is never there without its cause,
whenever the run was killed, and while it is running. The only exceptions are:

- the newest batch may have no line of the orchestrator in `metrics.jsonl` yet (after a rewind, the line may be that of
  the abandoned steps), and the step that made the newest version no line of the trainer; if the disk was full, lines
  wait for the next one, so the one before may be missing too. The orchestrator writes its line when it restarts, the
  trainer when it repeats the step
- any number of batches may be on disk that no version has been trained from
- a checkpoint may have no export yet
- `metrics.jsonl` may end in a partial line, and have a partial line wherever a process was killed
- after an interrupted rewind, batches may still be there whose versions are moved aside already: batches are moved last

A running run is listed in the order opposite to that in which it writes: effects before causes.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.algo.rules import rules_of
from trireme.base.errors import JournalCorrupt
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.origin import Origin, read_origin
from trireme.journal.pictures import PictureFiles
from trireme.journal.records import BatchRecord, State
from trireme.journal.settings import Settings, is_rounded
from trireme.monitor.lines import read_lines
from trireme.monitor.metrics import parse_row
from trireme.orchestrator.batch_metrics import batch_metrics
from trireme.tools.audit.fates import Fates, check_outcomes
from trireme.tools.audit.report import Report
from trireme.tools.audit.tokens import TokenAudit, TurnAudit
from trireme.tools.audit.weights import check_checkpoints, check_versions
from trireme.tools.record_differences import some
from trireme.tools.run_reader import RunReader

MAY_LACK_LINES = 2
"""Newest batches, and newest steps, whose lines may be missing: see above."""


def command(argv: list[str]) -> int:
    """Audit a run, and return the exit code. Raises: ConfigError if the folder is not a run's."""
    parser = ArgumentParser(
        prog="trireme audit",
        description="Reads a run's journal, confirmed versions, checkpoints and metrics, and proves that every rollout "
        "has one fate, that examples came in order, and that every token that was trained on is by confirmed weights. "
        "The run may be finished, killed, or going on. Writes nothing.",
        epilog="Ends with 0 where all holds, 1 at a contradiction, 2 where the folder is not a run's.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder; it may have been moved")
    code = "call this function if the run's advantages are that custom function; no code of a run is called otherwise"
    add("--run-code", metavar="MODULE:NAME", help=code)
    add("--json", action="store_true", help="all contradictions and notes, for machines")
    arguments = parser.parse_args(argv)
    report = audit_run(arguments.run, run_code=arguments.run_code)
    print(json.dumps(report.as_json(), indent=1) if arguments.json else report.text())
    return 0 if report.holds else 1


def audit_run(folder: Path, *, run_code: str | None = None) -> Report:
    """Read every entry of a run once. Write nothing, and run no code that the folder names.

    Args:
        run_code: the one function ("module:name") that the audit may call if the journal names it.

    Raises:
        ConfigError: the folder holds no run.
    """
    run, report = RunReader(folder), Report(folder)
    config, paths, journal = run.read_config(), run.paths, run.journal
    # effects are listed before causes: checkpoints, versions and batches, then metrics, then their causes again
    checkpoints, newest_at_first, batches = run.checkpoints(), run.versions.newest, journal.steps()
    lines = MetricsLines(paths.metrics)
    known, num_batches = run.versions.known(), max(journal.steps(), default=-1) + 1
    # rewinds move batches and versions aside, and their lines stay in `metrics.jsonl`
    batches_set_aside, versions_set_aside = run.set_aside("batch"), run.set_aside("version")

    newest = max(known, default=-1)
    settings = Settings(config, "orchestrator")
    # digests may differ without harm on GPUs, which round differently, and in versions made again by other trainers
    may_differ = {version for version in known if config.device == "cuda" or is_rounded(settings.earlier, version)}
    origin = _read_origin(folder, report)
    first, begun = (origin.begins_at, origin.state) if origin else (0, State())
    confirmed = check_versions(
        run.versions, known, report, first=first, num_batches=max(first, num_batches), may_differ=may_differ
    )
    # batches that an interrupted rewind has yet to move aside are by versions that it has moved aside already
    confirmed |= {version for version in versions_set_aside if version > newest}

    if lines.unreadable:
        report.note(f"{lines.unreadable} lines of {paths.metrics} were cut off, and say nothing")
    # the newest lines may be missing, and abandoned steps keep theirs: see above
    compare_lines(
        lines,
        first=first,
        trained=min(newest_at_first - MAY_LACK_LINES, num_batches),
        newest=newest,
        num_batches=num_batches,
        set_aside=batches_set_aside | {version - 1 for version in versions_set_aside},
        report=report,
    )

    # every audit sees the batches in order, and each batch is read once
    fates, tokens = Fates(report, begun), TokenAudit(begun, confirmed, report, run_code)
    turns, state = TurnAudit(paths.journal, report), begun
    listed, seen_pictures = set(batches), set[str]()
    expected, newest_batch = first, max(batches, default=-1)
    for step in range(first, newest_batch + 1):
        if (record := _read_batch(journal, step, listed, report)) is None:
            continue
        # the rules of that step, as a resume may change them; older journals do not record them
        rules, after_gap = record.rules or rules_of(settings.at(step)), step != expected
        fates.take(record, rules, after_gap=after_gap)
        tokens.take(record, rules, after_gap=after_gap)
        turns.take(record, after_gap=after_gap)
        _check_pictures(record, run.pictures, seen_pictures, report)
        check_outcomes(record, rules, report)
        compare_batch(
            record,
            config.model_copy(update={"max_async_level": rules.max_async_level}),
            lines.batches.get(step),
            report,
            may_lack_line=step > newest_batch - MAY_LACK_LINES,
            may_have_old_line=step == newest_batch and step in batches_set_aside,
        )
        expected, state = step + 1, record.state
    turns.close(state)
    check_checkpoints(paths, checkpoints, lines.trained, report, first=first, newest=newest)

    report.summary.batches, report.summary.checkpoints = len(batches), checkpoints
    report.summary.set_aside = sorted(
        str(path.relative_to(folder)) for path in folder.glob("*/set_aside_*") if path.is_dir()
    )
    return report


def _read_origin(folder: Path, report: Report) -> Origin | None:
    """Return what the run began from, and report if that is no longer what it was; None if it was the base model."""
    try:
        origin = read_origin(folder)
        damage = origin.find_damage(folder) if origin else None
    except (JournalCorrupt, OSError) as error:
        origin, damage = None, str(error)
    if damage is not None:
        expected = "the checkpoint that the run began from, as it was taken over"
        report.add("checkpoints", origin.begins_at if origin else 0, damage, expected=expected, advice="See `origin/`.")
    if origin is not None:
        without = f" without its {', '.join(origin.without)}" if origin.without else ""
        report.summary.began_from = (
            f"version {origin.version} of {origin.folder}{without} (manifest {origin.manifest[:12]})"
        )
    return origin


def _read_batch(journal: Journal, step: int, listed: set[int], report: Report) -> BatchRecord | None:
    """Read an entry; report if that is impossible, or if it has another number."""
    if step not in listed:
        report.add(
            "journal",
            step,
            f"batch {step} is missing, and batch {max(listed)} is there",
            expected=f"all batches from {journal.first()} on",
            advice=f"Restore {journal.path(step)} from a copy.",
        )
        return None
    try:
        record = journal.read(step)
    except (JournalCorrupt, OSError) as error:
        report.add("journal", step, str(error), expected=f"batch {step} as it was written")
        return None
    # a file that was copied over another one holds a wrong number, which later checks must not take for the step
    numbers = {"step": (record.step, step), "state.next_batch": (record.state.next_batch, step + 1)}
    report.compare("journal", step, numbers, by="by the name of its file")
    record.step = step
    return record


def _check_pictures(record: BatchRecord, files: PictureFiles, seen: set[str], report: Report) -> None:
    """Read each picture of the rollouts that is not in `seen`, and add it there."""
    samples = [sample for rollout in record.rollouts for sample in rollout.samples]
    for digest in sorted({picture.digest for sample in samples for picture in sample.pictures} - seen):
        seen.add(digest)
        try:
            files.read(digest)
        except (JournalCorrupt, OSError) as error:
            report.add(
                "journal",
                record.step,
                f"batch {record.step} shows a picture that cannot be read: {error}",
                expected="the picture as the engine was sent it",
            )


# `metrics.jsonl`: one line of the orchestrator per batch, one of the trainer per step


class MetricsLines:
    """The lines of `metrics.jsonl` that the audit compares: the last one of each step counts."""

    def __init__(self, path: Path) -> None:
        lines = read_lines(path)[0]
        rows = [row for line in lines if (row := parse_row(line)) is not None]
        self.unreadable = sum(bool(line.strip()) for line in lines) - len(rows)
        self.trained = {row["step"] for row in rows if row["process"] == "trainer"}
        self.batches = {row["step"]: row for row in rows if row["process"] == "orchestrator" and "reward/mean" in row}


def compare_batch(
    record: BatchRecord,
    config: RunConfig,
    row: Mapping[str, Any] | None,
    report: Report,
    *,
    may_lack_line: bool,
    may_have_old_line: bool,
) -> None:
    """Compare the journal's metrics with its rollouts, then the line in the file with the journal.

    Args:
        config: by which the batch was filled.
        row: the batch's line in `metrics.jsonl`.
        may_lack_line: the run may have been killed before it was written.
        may_have_old_line: the line may be that of an abandoned batch of this number.
    """
    # lags need a sampled token; the audit of tokens reports rollouts without one
    step, found = record.step, record.metrics
    if any((sample.versions >= 0).any() for rollout in record.rollouts for sample in rollout.samples):
        due = batch_metrics(step, record.rollouts, record.dropped, config=config, outcomes=record.outcomes)
        due |= {f"data/{name}/epoch": cursor.epoch for name, cursor in record.state.cursors.items()}
        due["curriculum/stage"] = record.state.stage
        report.compare(
            "metrics",
            step,
            {name: (found[name], due[name]) for name in found if name in due},  # journals of older versions lack some
            by="by its rollouts",
            rtol=1e-6,
        )

    if row is None:
        if not may_lack_line:
            _add_missing_line(report, "orchestrator", f"batch {step}", step)
    elif not may_have_old_line:
        # to the last bit: JSON keeps floats exactly, and has null for what is not finite
        report.compare(
            "metrics",
            step,
            {name: (row.get(name), value if math.isfinite(value) else None) for name, value in found.items()},
            of="in metrics.jsonl ",
            by="by the journal",
        )


def compare_lines(
    lines: MetricsLines,
    *,
    first: int,
    trained: int,
    newest: int,
    num_batches: int,
    set_aside: set[int],
    report: Report,
) -> None:
    """Check that each trained step has one trainer line, and that no line is about a missing batch or version.

    Args:
        first: step of the run.
        trained: all steps from there to below this one must have a line.
        newest: version. The trainer writes the line of a step when the version that it made is confirmed.
        set_aside: abandoned steps, whose lines stay in the file.
    """
    # the trainer writes a step's line before the next version, so older steps have theirs
    for step in sorted(set(range(first, trained)) - lines.trained):
        _add_missing_line(report, "trainer", f"step {step}", step)
    # a line of the trainer comes after the confirmation of the version that the step made
    early = sorted(step for step in lines.trained - set_aside if newest <= step < num_batches)
    if early:
        report.add(
            "metrics",
            early[0],
            f"metrics.jsonl has a line of the trainer for step {some(early)}, and version {newest} is the newest",
            expected=f"version {early[0] + 1} confirmed before that line is written",
            advice=f"Or the confirmation was lost: look for journal/version_{early[0] + 1:06d}.msgpack.",
        )
    # no process reports on a batch before it is in the journal
    for process, steps in (("trainer", lines.trained), ("orchestrator", lines.batches.keys())):
        beyond = sorted(step for step in steps - set_aside if step >= num_batches)
        if beyond:
            report.add(
                "metrics",
                beyond[0],
                f"metrics.jsonl has lines of the {process} for step {some(beyond)}; there are {num_batches} batches",
                expected="a batch in the journal before any process reports on it",
                advice=f"Or batches were lost: look for journal/batch_{beyond[0]:06d}.msgpack.",
            )


def _add_missing_line(report: Report, process: str, what: str, step: int) -> None:
    report.add(
        "metrics",
        step,
        f"{what} has no line of the {process} in metrics.jsonl",
        expected="one line for each, but for the two newest",
    )
