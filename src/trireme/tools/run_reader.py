"""A run's folder as the tools read it: audit, diff, replay, viewer, dashboard and data sets.

The run may be running, killed or finished. Nothing is written into its folder, and none of its code is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trireme.base.paths import RunPaths, step_folder, steps_in
from trireme.config.files import find_run_file, read_run, read_table, without_secrets
from trireme.config.model.folder import config_file
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.versions import Versions
from trireme.monitor.lines import last_bytes
from trireme.monitor.metrics import Row, latest_by_step, read_in_pieces, read_metrics
from trireme.tools.rollouts import BatchFile, identity_of
from trireme.tools.tokenizer import Decode, load_decoder


class RunReader:
    """The files of one run. What is named by a method is read when it is called.

    Example:
        run = RunReader(Path("outputs"))
        run.journal.read(3).rollouts, run.rows()["trainer", 3]["loss"], run.checkpoints()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths = RunPaths(path)
        self.journal = Journal(self.paths.journal)
        self.versions = Versions(self.paths.journal)
        self.pictures = PictureFiles(pictures_folder(self.paths.journal))
        self._metrics_inode: int | None = None
        self._metrics_offset = 0  # bytes of `metrics.jsonl` that `new_rows` has read

    def read_config(self) -> RunConfig:
        """Return the resolved configuration, with the folder's present place: it may have been moved.

        Raises: ConfigError if the folder holds no `rl` run, or one of another version.
        """
        config = read_run(RunConfig, find_run_file(self.path, "orchestrator"))
        return updated(config, {"name": None, "output_dir": self.path})

    def read_raw_config(self) -> dict[str, Any]:
        """Return the configuration as it is on disk, so that it may be one of any version or kind of run.

        Raises: ConfigError if the folder holds no run.
        """
        return without_secrets(read_table(find_run_file(self.path, "trainer")))

    def checkpoints(self) -> list[int]:
        return steps_in(self.paths.checkpoints)

    def exports(self) -> list[int]:
        return steps_in(self.paths.weights)

    def set_aside(self, kind: str) -> set[int]:
        """Return the numbers of the batches, or versions, that rewinds moved aside."""
        found = self.paths.journal.glob(f"set_aside_*/{kind}_*.msgpack")
        return {int(name) for path in found if (name := path.stem.removeprefix(f"{kind}_")).isdigit()}

    def batch(self, step: int) -> BatchFile:
        """Return the rollouts of a batch as rows and records."""
        return BatchFile(self.journal.path(step))

    def decoder(self) -> Decode | None:
        """Return the tokenizer of the newest exported weights, or else that of the model; None if neither is on this
        machine. Nothing is downloaded.
        """
        exported = (step_folder(self.paths.weights, step) for step in reversed(self.exports()))
        files: list[Path | None] = [folder / "tokenizer.json" for folder in exported]
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            name = json.loads(self.paths.run_config.read_bytes())["model"]["name"]
            files.append(config_file(name, "tokenizer.json"))
        return next((decode for file in files if file and (decode := load_decoder(file))), None)

    # metrics

    def rows(self) -> dict[tuple[str, int], Row]:
        """Return all metrics by process and step. If a step was trained again, its later values count."""
        return latest_by_step(row for rows, _ in read_in_pieces(self.paths.metrics) for row in rows)

    def last_rows(self, num_bytes: int) -> list[Row]:
        """Return the rows at the end of a file that may be very long."""
        return read_metrics(self.paths.metrics, last_bytes(self.paths.metrics, num_bytes))[0]

    def new_rows(self) -> Iterator[tuple[list[Row], bool]]:
        """Yield the rows since the last call, a few megabytes at a time, each time with whether the file is another one
        than before: an earlier run was moved aside, and the rows that came so far are its rows.
        """
        identity = identity_of(self.paths.metrics)
        inode = identity[0] if identity else None
        if self._metrics_inode not in (None, inode):
            self._metrics_offset = 0
            yield [], True
        self._metrics_inode = inode
        # the place is kept before the rows are handed out, as the caller may stop in between and read on later
        for rows, offset in read_in_pieces(self.paths.metrics, self._metrics_offset):
            is_another = offset < self._metrics_offset
            self._metrics_offset = offset
            yield rows, is_another
