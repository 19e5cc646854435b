"""Prove from disk, with no process running, that a run lost nothing and trained nothing twice.

Every fact of a run is on disk before a process acts on it: a version's confirmation before a token of it is used, a
batch before the trainer sees it, a step's metrics before its checkpoint. So an effect is never there without its cause,
whenever the run was killed, and while it is running. The only exceptions are:

- the newest batch may have no line of the orchestrator in `metrics.jsonl` yet (after a rewind, the line may be that of
the
  abandoned steps), and the step that made the newest version no line of the trainer; where the disk was full, lines
  wait for the next one, so the one before may be missing too. The orchestrator writes its line when it restarts, the
  trainer when it repeats the step
- any number of batches may be on disk that no version has been trained from
- a checkpoint may have no export yet
- `metrics.jsonl` may end in a partial line, and have a partial line wherever a process was killed
- after an interrupted rewind, batches may still be there whose versions are moved aside already: batches are moved last

A running run is listed in the order opposite to that in which it writes: effects before causes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from trireme.algo.rules import Rules, rules_of
from trireme.base.errors import JournalCorrupt
from trireme.base.paths import RunPaths
from trireme.config.files import find_run_file, read_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord
from trireme.journal.versions import Versions
from trireme.tools.audit.examples import OrderAudit
from trireme.tools.audit.fates import Fates
from trireme.tools.audit.findings import Findings
from trireme.tools.audit.metrics import MetricsIndex, compare_batch, compare_lines
from trireme.tools.audit.outcomes import check_outcomes
from trireme.tools.audit.report import Report, Summary
from trireme.tools.audit.targets import TargetAudit
from trireme.tools.audit.tokens import TokenAudit, read_columns
from trireme.tools.audit.weights import VersionAudit, check_checkpoints, list_checkpoints


def audit_run(folder: Path, *, run_code: str | None = None) -> Report:
    """Read every entry of a run once. Write nothing, and run no code that the folder names.

    Args:
        run_code: the one function ("module:name") that may be called where the journal names it.

    Raises:
        ConfigError: the folder holds no run.
    """
    config = read_run(RunConfig, find_run_file(folder, "orchestrator"))
    paths = RunPaths(folder)
    before = _list(paths)
    with closing(MetricsIndex(paths.metrics)) as index:
        versions = Versions(paths.journal).known()
        audit = _Audit(paths, rules_of(config), index, before, versions, _list(paths).batches, run_code)
        audit.versions.read(may_differ=config.device == "cuda")
        audit.versions.compare_with_batches(audit.num_batches)
        audit.compare_lines()
        audit.read_journal()
        audit.read_checkpoints()
        return Report(folder, audit.summary(), audit.findings)


@dataclass(frozen=True)
class _Listed:
    """What was on disk at one moment; effects are listed before causes."""

    checkpoints: list[int]
    newest: int  # version
    batches: list[int]


def _list(paths: RunPaths) -> _Listed:
    return _Listed(
        checkpoints=list_checkpoints(paths.checkpoints),
        newest=Versions(paths.journal).newest,
        batches=Journal(paths.journal).steps(),
    )


MAY_LACK_LINES = 2
"""Newest batches, and newest steps, whose lines may be missing: see above."""


class _Audit:
    """One pass over a run."""

    def __init__(
        self,
        paths: RunPaths,
        rules: Rules,
        index: MetricsIndex,
        before: _Listed,
        versions: list[int],
        now: list[int],
        run_code: str | None,
    ) -> None:
        """Start an audit.

        Args:
            before: listed before the metrics were read.
            versions: listed after that.
            now: batches, listed last.
        """
        self.findings = Findings()
        self.num_batches = now[-1] + 1 if now else 0
        self._batches_set_aside = _set_aside(paths.journal, "batch")
        self._versions_set_aside = _set_aside(paths.journal, "version")
        self.versions = VersionAudit(Versions(paths.journal), versions, self._versions_set_aside, self.findings)
        self._paths = paths
        self._rules = rules
        self._index = index
        self._before = before
        self._journal = Journal(paths.journal)
        self._order = OrderAudit(self.findings)
        self._fates = Fates(self._order, self.findings)
        self._tokens = TokenAudit(self.versions.is_confirmed, self.findings)
        self._targets = TargetAudit(self.findings, run_code)

    def compare_lines(self) -> None:
        if self._index.unreadable:
            self.findings.note(f"{self._index.unreadable} lines of {self._index.path} were cut off, and say nothing")
        compare_lines(
            self._index,
            trained=min(self._before.newest - MAY_LACK_LINES, self.num_batches),
            newest=self.versions.newest,
            num_batches=self.num_batches,
            set_aside=self._batches_set_aside | {version - 1 for version in self._versions_set_aside},
            findings=self.findings,
        )

    def read_journal(self) -> None:
        expected, newest = 0, max(self._before.batches, default=-1)
        for step, record in self._records():
            self._check_numbers(step, record)
            rules = record.rules or self._rules
            self._fates.take(record, rules, after_gap=step != expected)
            columns = read_columns(record, self.findings)
            if columns is not None:
                self._tokens.take(record, columns, rules)
                self._targets.take(record, columns, rules, after_gap=step != expected)
            else:
                self._targets.skip(record)
            check_outcomes(record, rules, self.findings)
            compare_batch(
                record,
                columns,
                self._index.batch(step),
                self.findings,
                may_lack_line=step > newest - MAY_LACK_LINES,
                may_have_old_line=step == newest and step in self._batches_set_aside,
            )
            expected = step + 1

    def _records(self) -> Iterator[tuple[int, BatchRecord]]:
        """Yield the entries that can be read; report the others."""
        steps = set(self._before.batches)
        for step in range(max(steps, default=-1) + 1):
            if step not in steps:
                self.findings.add(
                    "journal",
                    step,
                    f"batch {step} is missing, and batch {max(steps)} is there",
                    expected="all batches from 0 on",
                    meaning=f"Its rollouts and their fates are lost. Restore {self._journal.path(step)} from a copy.",
                )
                continue
            try:
                record = self._journal.read(step)
            except (JournalCorrupt, OSError) as error:
                self.findings.add(
                    "journal",
                    step,
                    str(error),
                    expected=f"batch {step} as it was written",
                    meaning="It was damaged after it was written, by the disk or by hand.",
                )
                continue
            yield step, record

    def _check_numbers(self, step: int, record: BatchRecord) -> None:
        if record.step == step and record.state.next_batch == step + 1:
            return
        self.findings.add(
            "journal",
            step,
            f"the entry of batch {step} says that it is batch {record.step} and that {record.state.next_batch} is next",
            expected=f"batch {step}, and {step + 1} next",
            meaning="A run that goes on from here would leave out a batch, or write one twice.",
        )

    def read_checkpoints(self) -> None:
        check_checkpoints(self._paths, self._before.checkpoints, self.versions, self._index.trained, self.findings)

    def summary(self) -> Summary:
        fates, tokens = self._fates, self._tokens
        return Summary(
            batches=len(self._before.batches),
            trained=fates.trained,
            dropped=fates.dropped,
            dropped_for=dict(fates.reasons),
            open_groups=fates.num_open,
            groups=fates.num_begun,
            epochs=self._order.epochs if self._order.is_known else None,
            trained_tokens=tokens.num_trained,
            lag=tokens.lag,
            versions_used=len(tokens.versions),
            versions_confirmed=self.versions.num_confirmed,
            checkpoints=self._before.checkpoints,
            set_aside=_folders_set_aside(self._paths.root),
        )


def _set_aside(journal: Path, kind: str) -> set[int]:
    """Return the numbers of the batches, or versions, that were moved aside by rewinds."""
    names = (path.stem.removeprefix(f"{kind}_") for path in journal.glob(f"set_aside_*/{kind}_*.msgpack"))
    return {int(name) for name in names if name.isdigit()}


def _folders_set_aside(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/set_aside_*") if path.is_dir())
