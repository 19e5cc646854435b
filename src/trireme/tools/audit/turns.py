"""Turns of agent programs: each one on disk is trained, left out or dropped for a reason, or still under way.

A turn is on disk before its program sees it, so a batch can hold no turn that is not there.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from trireme.journal.model_turn import Turn
from trireme.journal.records import BatchRecord, Dropped, Rollout, State
from trireme.journal.turns import MISSING, compare_turns, read_turns, turns_file, turns_folder
from trireme.tools.audit.report import Report
from trireme.tools.record_differences import some

NAME = re.compile(r"(\d+)-\d+\.\d+\.turns")
UNDER_WAY, DROPPED, TRAINED = "under way", "of dropped rollouts", "trained"


class TurnAudit:
    """Compares the turns of each rollout with its samples, batch by batch."""

    def __init__(self, journal: Path, report: Report) -> None:
        self._counts: Counter[str] = Counter()  # turns, by what became of them
        self._report = report
        aside = sorted(journal.glob("set_aside_*"), reverse=True)  # a rewind moves the turns of all rollouts
        self._journals = [folder for folder in (journal, *aside) if turns_folder(folder).is_dir()]
        self._left = {file.name for file in turns_folder(journal).glob("*.turns")}  # without a fate so far
        self._has_gap = False

    def take(self, record: BatchRecord, *, after_gap: bool) -> None:
        """Check the rollouts whose fates a batch decides."""
        self._has_gap |= after_gap
        for rollout in record.rollouts:
            turns = self._read(record.step, rollout)
            if turns is not None:
                self._compare(record.step, rollout, turns)
            elif rollout.branches and self._journals:
                self._add(
                    record.step,
                    rollout,
                    "was played by an agent program, and its file of turns is missing",
                    expected=f"{turns_file(Path(), _name(rollout), rollout.attempt)} in the journal",
                )
            elif rollout.branches:
                self._report.note("journal/turns is not there, so turns of agent programs are not compared")
        # dropped rollouts are in no sample, so their turns are only counted
        for dropped in record.dropped:
            self._counts[DROPPED] += len(self._read(record.step, dropped) or ())

    def close(self, state: State) -> None:
        """Check the files that no batch has decided on.

        Args:
            state: after the newest batch.
        """

        is_open = {group.id for group in state.open_groups}
        unknown = []
        for name in sorted(self._left):
            found = NAME.fullmatch(name)
            # the orchestrator is still working on open groups, and on groups begun after the newest batch
            if found and (int(found[1]) in is_open or int(found[1]) >= state.next_group):
                self._counts[UNDER_WAY] += len(read_turns(turns_folder(self._journals[0]) / name))
            else:
                unknown.append(name)

        self._report.summary.turns = dict(self._counts)
        if unknown and not self._has_gap:  # an unreadable batch may know them
            self._report.add(
                "turns",
                state.next_batch,
                f"{some(unknown)} in journal/turns: turns of an unknown rollout",
                expected="turns of rollouts that a batch has trained or dropped, or of groups that are open",
                advice="The rollout was lost, or the file is of another run.",
            )

    def _read(self, step: int, one: Rollout | Dropped) -> list[Turn] | None:
        """Return the turns of an attempt; None if there is no file of them."""
        for journal in self._journals:
            file = turns_file(journal, _name(one), one.attempt)
            if file.exists():
                # files that a rewind moved aside are not expected to have a fate
                if journal is self._journals[0]:
                    self._left.discard(file.name)
                try:
                    return read_turns(file)
                except (ValueError, TypeError, OSError) as error:
                    self._add(step, one, f"has unreadable turns: {error}", expected=f"{file} as it was written")
                    return []
        return None

    def _compare(self, step: int, rollout: Rollout, turns: list[Turn]) -> None:
        compared, unused = compare_turns(rollout.samples, turns)

        self._counts[TRAINED] += sum(not turn.difference for turn in compared)
        left_out = Counter(prompt for prompts in rollout.left_out.values() for prompt in prompts)
        for why, prompts in rollout.left_out.items():
            self._counts[why] += len(prompts)
        # only the first difference: one damaged turn changes the prompts of all that follow
        for turn in compared:
            if turn.difference:
                where = f"has a turn (sample {turn.sample}, token {turn.begin})"
                is_missing = turn.difference == MISSING
                found = "that is missing on disk" if is_missing else f"whose {turn.difference} differ on disk"
                self._add(step, rollout, f"{where} {found}", expected="each turn in a batch as it was answered")
                return
        # every other turn on disk must be listed as left out, and every turn left out must be on disk
        on_disk = Counter(turn.prompt for turn in unused)
        if extra := on_disk - left_out:
            found = f"was answered {extra.total()} turns that are in no sample and were not left out"
            self._add(step, rollout, found, expected="each turn in a sample, or left out for a reason")
        elif extra := left_out - on_disk:
            found = f"left out {extra.total()} turns that are missing on disk"
            self._add(step, rollout, found, expected="each turn that was answered on disk")

    def _add(self, step: int, one: Rollout | Dropped, found: str, *, expected: str) -> None:
        self._report.add(
            "turns",
            step,
            f"batch {step}: group {one.group}, place {one.place} {found}",
            expected=expected,
            advice=f"Compare the batch with {turns_file(Path('journal'), _name(one), one.attempt)}. A file "
            "that was changed or cut off ends at its last whole turn.",
        )


def _name(one: Rollout | Dropped) -> str:
    return f"{one.group}-{one.place}"
