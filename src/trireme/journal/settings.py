"""The settings of each step: a run that was resumed with others trained its earlier steps by those of their time.

`configs/run.json` holds the newest settings and `configs/run.earlier-N.json` those before a resume.
`configs/run.steps.json` records until which step each of these held. Steps that are repeated, a replay and
the audit read them there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Generic

import msgspec

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import atomic_write
from trireme.config.files import ProcessName, find_run_file, read_table
from trireme.config.resume import When, with_settings_of
from trireme.config.run import AnyRun
from trireme.config.section import AnySection


class Earlier(msgspec.Struct, frozen=True):
    """Settings that held until a run was resumed with others.

    Example:
        Earlier("run.earlier-1.json", steps=226, batches=228)  # trained steps 0 to 225, filled batches 0 to 227
    """

    file: str  # its name in the same folder
    steps: int  # trained with them, and with those before
    batches: int  # filled with them, and with those before; as many as steps in `sft`
    repeated_from: int | None = None  # steps from here on were repeated later by a trainer that rounds differently


class Past(msgspec.Struct, frozen=True):
    """Earlier settings of a run, the oldest first."""

    earlier: list[Earlier] = []
    went_back_s: float = 0.0  # unix time of the last return to an earlier step; lines of metrics before do not count


def steps_file(run_file: Path) -> Path:
    return run_file.with_suffix(".steps.json")


def read_past(run_file: Path) -> Past:
    """Return earlier settings; none if the run was never resumed with others.

    Raises: JournalCorrupt if the file is damaged.
    """
    try:
        return msgspec.json.decode(steps_file(run_file).read_bytes(), type=Past)
    except FileNotFoundError:
        return Past()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(
            f"{steps_file(run_file)} is not what was written: {error}. It says which settings each step was trained "
            "with: restore it from a copy."
        ) from error


def write_past(run_file: Path, past: Past) -> None:
    if past != read_past(run_file):
        with atomic_write(steps_file(run_file)) as file:
            file.write(msgspec.json.encode(past) + b"\n")


def until(earlier: list[Earlier], steps: int, batches: int) -> list[Earlier]:
    """Return what is left of earlier settings in a run that went back: those that trained or filled anything."""
    left: list[Earlier] = []
    for each in earlier:
        cut = msgspec.structs.replace(each, steps=min(each.steps, steps), batches=min(each.batches, batches))

        # An entry that no longer covers any step or batch is dropped; its rounding still counts for the one before.
        if (cut.steps, cut.batches) != ((left[-1].steps, left[-1].batches) if left else (0, 0)):
            left.append(cut)
        elif left and each.repeated_from is not None:
            left[-1] = msgspec.structs.replace(left[-1], repeated_from=each.repeated_from)
    return left


def is_rounded(earlier: list[Earlier], version: int) -> bool:
    """Return whether a version was made twice, by trainers that round differently."""
    return any(each.repeated_from is not None and each.repeated_from < version <= each.steps for each in earlier)


class Settings(Generic[AnySection]):
    """The configuration by which each step of a run is trained.

    Example:
        Settings(config, "trainer").at(3).trainer.optim.lr
    """

    def __init__(self, config: AnySection, process: ProcessName = "trainer") -> None:
        """Read which settings held when. There are no earlier ones if the folder holds no run yet.

        Raises: JournalCorrupt, ConfigError if a file is damaged.
        """
        assert isinstance(config, AnyRun)
        self.now: AnySection = config
        self._is_sft = not hasattr(config, "orchestrator")
        try:
            run_file = find_run_file(config.paths.root, process)
        except ConfigError:
            run_file = config.paths.run_config
        self._folder = run_file.parent
        self.earlier = read_past(run_file).earlier
        self._with = cache(self._merge)

    def at(self, step: int) -> AnySection:
        """Return the configuration with the settings of a step and of the batch that it trains on."""
        trained = next((each.file for each in self.earlier if step < each.steps), None)
        filled = next((each.file for each in self.earlier if step < each.batches), None)
        return self._with(trained, filled, ("step",))

    def built(self, step: int) -> AnySection:
        """Return the newest configuration with what the model and its ranks were built with at a step."""
        trained = next((each.file for each in self.earlier if step < each.steps), None)
        return self._with(trained, None, ("rounding", "checkpoint"))

    def eras(self) -> list[tuple[int, AnySection]]:
        """Return each configuration that steps are trained by, with the first of these steps, in order."""
        begins = sorted({0, *(each.steps for each in self.earlier), *(each.batches for each in self.earlier)})
        return [(begin, self.at(begin)) for begin in begins]

    def _merge(self, trained: str | None, filled: str | None, whens: tuple[When, ...]) -> AnySection:
        found = self.now

        # A step can train on a batch that was filled before the settings of training changed, so both are looked up.
        for file, kinds in ((filled, ("batch",)), (trained, whens)):
            if file is not None:
                found = with_settings_of(found, read_table(self._folder / file), kinds, is_sft=self._is_sft)
        return found
