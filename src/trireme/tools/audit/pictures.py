"""Check that every picture that a run's rollouts show is on disk as it was shown."""

from __future__ import annotations

from trireme.base.errors import JournalCorrupt
from trireme.journal.pictures import PictureFiles
from trireme.journal.records import BatchRecord
from trireme.tools.audit.report import DAMAGED, Findings


class PictureAudit:
    """Read each picture once."""

    def __init__(self, files: PictureFiles, findings: Findings) -> None:
        self._files = files
        self._findings = findings
        self._seen: set[str] = set()

    def take(self, record: BatchRecord) -> None:
        samples = [sample for rollout in record.rollouts for sample in rollout.samples]
        for digest in sorted({picture.digest for sample in samples for picture in sample.pictures} - self._seen):
            self._seen.add(digest)
            try:
                self._files.read(digest)
            except (JournalCorrupt, OSError) as error:
                self._findings.add(
                    "journal",
                    record.step,
                    f"batch {record.step} shows a picture that cannot be read: {error}",
                    expected="the picture as the engine was sent it",
                    meaning=f"The batch cannot be trained on again. {DAMAGED}",
                )
