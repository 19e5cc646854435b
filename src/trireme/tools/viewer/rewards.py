"""Mean rewards for the tree: of batches from the run's metrics, of evaluations from their files; each file once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trireme.base.paths import RunPaths
from trireme.monitor.metrics import read_metrics
from trireme.tools.rollouts import ResultsFile
from trireme.tools.viewer.found import TRAINING, Home, Source

Wanted = Callable[[], bool]


class Rewards:
    """Knows what it has looked at; a file that grew is looked at again."""

    def __init__(self) -> None:
        self.known: dict[Path, float | None] = {}
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._offsets: dict[Path, int] = {}

    def look(self, homes: Sequence[Home], *, is_wanted: Wanted = lambda: True) -> Iterator[list[Path]]:
        """Says after each source which have another mean now, as long as somebody wants to know."""
        for home in homes:
            if TRAINING in home.shelves:
                yield self._of_training(home)
        sources = [source for home in homes for shelf in home.shelves.values() for source in shelf.sources]
        for source in sources:
            if not is_wanted():
                return
            if source.kind == "results" and self._of_results(source, is_wanted):
                yield [source.path]

    def _of_training(self, home: Home) -> list[Path]:
        """A run that trained a step again wrote it again: the later value counts."""
        paths = RunPaths(home.folder)
        rows, self._offsets[paths.metrics] = read_metrics(paths.metrics, self._offsets.get(paths.metrics, 0))
        means = {row["step"]: row["reward/mean"] for row in rows if isinstance(row.get("reward/mean"), int | float)}
        changed = [source for source in home.shelves[TRAINING].sources if source.version in means]
        self.known |= {source.path: float(means[source.version]) for source in changed}
        return [source.path for source in changed]

    def _of_results(self, source: Source, is_wanted: Wanted) -> bool:
        try:
            found = source.path.stat()
        except OSError:
            return False
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._seen.get(source.path) == state:
            return False
        mean = _mean_of(source.path, is_wanted)
        if is_wanted():
            self._seen[source.path], self.known[source.path] = state, mean
        return is_wanted()

    def trend(self, sources: Sequence[Source]) -> list[float]:
        """What is known of them, in their order."""
        return [mean for source in sources if (mean := self.known.get(source.path)) is not None]


def _mean_of(path: Path, is_wanted: Wanted) -> float | None:
    """Keeps nothing of what it has read."""
    file = ResultsFile(path)
    total, count = 0.0, 0
    is_more = True
    while is_more and is_wanted():
        is_more = file.read_more()
        rewards = [row.reward for row in file.rows if row.reward is not None]
        total, count = total + sum(rewards), count + len(rewards)
        file.rows.clear()
    return total / count if count else None
