"""Prove from disk, with no process running, that a run lost nothing and trained nothing twice.

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

from pathlib import Path

from trireme.algo.rules import rules_of
from trireme.base.errors import JournalCorrupt
from trireme.base.paths import RunPaths, steps_in
from trireme.config.files import find_run_file, read_run
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.records import BatchRecord, State
from trireme.journal.settings import Settings, is_rounded
from trireme.journal.versions import Versions
from trireme.tools.audit.examples import OrderAudit, check_outcomes
from trireme.tools.audit.fates import Fates
from trireme.tools.audit.metrics import MetricsLines, compare_batch, compare_lines
from trireme.tools.audit.report import Report
from trireme.tools.audit.tokens import TokenAudit
from trireme.tools.audit.turns import TurnAudit
from trireme.tools.audit.weights import check_checkpoints, check_versions

MAY_LACK_LINES = 2
"""Newest batches, and newest steps, whose lines may be missing: see above."""


def audit_run(folder: Path, *, run_code: str | None = None) -> Report:
    """Read every entry of a run once. Write nothing, and run no code that the folder names.

    Args:
        run_code: the one function ("module:name") that the audit may call if the journal names it.

    Raises:
        ConfigError: the folder holds no run.
    """
    config = read_run(RunConfig, find_run_file(folder, "orchestrator"))
    paths, report = RunPaths(folder), Report(folder)
    journal, recorded = Journal(paths.journal), Versions(paths.journal)
    # effects are listed before causes: checkpoints, versions and batches, then metrics, then their causes again
    checkpoints, newest_at_first, batches = steps_in(paths.checkpoints), recorded.newest, journal.steps()
    lines = MetricsLines(paths.metrics)
    known, num_batches = recorded.known(), max(journal.steps(), default=-1) + 1
    batches_set_aside = _list_set_aside(paths.journal, "batch")
    # rewinds move batches and versions aside, and their lines stay in `metrics.jsonl`
    versions_set_aside = _list_set_aside(paths.journal, "version")

    newest = max(known, default=-1)
    settings = Settings(updated(config, {"name": None, "output_dir": folder}), "orchestrator")
    # digests may differ without harm on GPUs, which round differently, and in versions made again by other trainers
    may_differ = {version for version in known if config.device == "cuda" or is_rounded(settings.earlier, version)}
    confirmed = check_versions(recorded, known, report, num_batches=num_batches, may_differ=may_differ)
    # batches that an interrupted rewind has yet to move aside are by versions that it has moved aside already
    confirmed |= {version for version in versions_set_aside if version > newest}

    if lines.unreadable:
        report.note(f"{lines.unreadable} lines of {paths.metrics} were cut off, and say nothing")
    # the newest lines may be missing, and abandoned steps keep theirs: see above
    compare_lines(
        lines,
        trained=min(newest_at_first - MAY_LACK_LINES, num_batches),
        newest=newest,
        num_batches=num_batches,
        set_aside=batches_set_aside | {version - 1 for version in versions_set_aside},
        report=report,
    )

    # every audit sees the batches in order, and each batch is read once
    order = OrderAudit(report)
    fates = Fates(order, report)
    tokens = TokenAudit(confirmed, report, run_code)
    pictures, seen = PictureFiles(pictures_folder(paths.journal)), set[str]()
    turns, state = TurnAudit(paths.journal, report), State()
    listed = set(batches)
    expected, newest_batch = 0, max(batches, default=-1)
    for step in range(newest_batch + 1):
        if (record := _read_batch(journal, step, listed, report)) is None:
            continue
        # the rules of that step, as a resume may change them; older journals do not record them
        rules, after_gap = record.rules or rules_of(settings.at(step)), step != expected
        fates.take(record, rules, after_gap=after_gap)
        tokens.take(record, rules, after_gap=after_gap)
        turns.take(record, after_gap=after_gap)
        _check_pictures(record, pictures, seen, report)
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
    check_checkpoints(paths, checkpoints, lines.trained, report, newest=newest)

    report.summary.batches, report.summary.checkpoints = len(batches), checkpoints
    report.summary.set_aside = sorted(
        str(path.relative_to(folder)) for path in folder.glob("*/set_aside_*") if path.is_dir()
    )
    return report


def _list_set_aside(journal: Path, kind: str) -> set[int]:
    """Return the numbers of the batches, or versions, that were moved aside by rewinds."""
    names = (path.stem.removeprefix(f"{kind}_") for path in journal.glob(f"set_aside_*/{kind}_*.msgpack"))
    return {int(name) for name in names if name.isdigit()}


def _read_batch(journal: Journal, step: int, listed: set[int], report: Report) -> BatchRecord | None:
    """Read an entry; report if that is impossible, or if it has another number."""
    if step not in listed:
        report.add(
            "journal",
            step,
            f"batch {step} is missing, and batch {max(listed)} is there",
            expected="all batches from 0 on",
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
