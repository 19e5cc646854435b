"""The page of a run, section by section."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trireme.journal.manifest import complete_steps
from trireme.monitor.run_text import held_out_lines, short_time
from trireme.tools.audit.audit import audit_run
from trireme.tools.audit.report import PROMISES
from trireme.tools.report.choices import choices_of, whole
from trireme.tools.report.curves import curves_section
from trireme.tools.report.facts import Facts
from trireme.tools.report.hours import hours_section
from trireme.tools.report.page import Block, Code, Fold, Page, Section, Table, Words
from trireme.tools.report.rollouts import held_out_section, rollouts_section

MOST_CONTRADICTIONS = 5


def build_page(folder: Path, *, num_rollouts: int = 2, audits: bool = True) -> Page:
    """
    Args:
        num_rollouts: of each of three batches.
        audits: reads the whole journal, which takes a while where it is long.

    Raises: ConfigError where the folder is not a run's.
    """
    facts = Facts(folder)
    sections = [
        _overview(facts),
        curves_section(facts),
        hours_section(facts),
        _warnings(facts),
        held_out_section(facts),
        rollouts_section(facts, num_rollouts),
        _audit(facts) if audits else None,
        _configuration(facts),
        _surroundings(facts),
        _again(facts),
    ]
    return Page(facts.name, _lead(facts), [section for section in sections if section is not None])


def _lead(facts: Facts) -> str:
    """What came of it."""
    said = [f"{facts.progress.num_done} of {facts.config.max_steps} steps{_how_long(facts)}"]
    if ends := facts.progress.reward_ends():
        said.append(f"mean reward {ends.first:.3f} → {ends.last:.3f} (of {ends})")
    said += [line.replace("->", "→") for line in held_out_lines(facts.progress.evaluations())]
    if held_out := facts.points("validation/loss"):
        said.append(f"held-out loss {held_out[0][1]:.4g} → {held_out[-1][1]:.4g}")
    return "; ".join(said) + "."


def _how_long(facts: Facts) -> str:
    if len(facts.times_s) < 2:
        return ""
    return f" in {short_time(max(facts.times_s) - min(facts.times_s))}, from the first batch on"


def _overview(facts: Facts) -> Section:
    return Section("Overview", [Table([row for row in _facts(facts) if row[1]])])


def _facts(facts: Facts) -> Iterator[tuple[str, str]]:
    config, rl = facts.config, facts.rl
    yield "model", f"`{config.model.name}`"
    if rl:
        entries = ", ".join(f"`{entry.name or entry.id}`" for entry in rl.orchestrator.env)
        yield "environments", entries
        yield "batch", f"{rl.orchestrator.batch_size} rollouts, {rl.orchestrator.rollouts_per_example} of each example"
        yield "loss and advantage", f"loss `{rl.trainer.loss.type}`, advantage `{rl.orchestrator.advantage.type}`"
        yield (
            "generation ahead of training",
            f"up to {rl.max_async_level} batches" if rl.max_async_level else "none",
        )
        yield "optimizer", f"`{rl.trainer.optim.type}`, learning rate {rl.trainer.optim.lr:g}"
    else:
        yield "training", "supervised"
    yield "trained on", _trained_on(facts)
    yield "written", _when(facts)
    yield "checkpoints", ", ".join(map(str, complete_steps(facts.paths.checkpoints)))


def _trained_on(facts: Facts) -> str:
    tokens = sum(value for _, value in facts.points("tokens/total") if math.isfinite(value))
    rollouts = sum(value for _, value in facts.points("rollouts/trained") if math.isfinite(value))
    dropped = sum(value for _, value in facts.points("rollouts/dropped") if math.isfinite(value))
    if not rollouts:
        return ""
    return f"{rollouts:,.0f} rollouts, {tokens:,.0f} tokens with their prompts; {dropped:,.0f} rollouts dropped"


def _when(facts: Facts) -> str:
    if not facts.times_s:
        return ""
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (min(facts.times_s), max(facts.times_s)))
    return f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"


def _warnings(facts: Facts) -> Section:
    said = facts.progress.warnings
    if not said:
        return Section("Warnings", [Words("None: no sign of a collapse was seen.")])
    counts = Counter(warned.name for warned in said)
    newest = {warned.name: warned for warned in said}
    rows = [
        (str(warned.step + 1), f"{name} ({counts[name]} times)" if counts[name] > 1 else name, warned.text)
        for name, warned in newest.items()
    ]
    return Section("Warnings", [Table(rows, head=("step", "sign", "what, why, and what to try"))])


def _audit(facts: Facts) -> Section | None:
    """None for supervised training, which has no journal."""
    if facts.rl is None or not facts.batches:
        return None
    report = audit_run(facts.folder)
    blocks: list[Block] = [Code("\n".join(report.summary.lines()))]
    if report.holds:
        blocks.insert(0, Words("Nothing was lost, and nothing was trained twice: " + "; ".join(PROMISES) + "."))
    else:
        found = report.findings.in_order()[:MOST_CONTRADICTIONS]
        total = report.findings.total
        blocks.insert(0, Words(f"{total} contradiction{'' if total == 1 else 's'} between the files of the run:"))
        blocks += [Code(str(contradiction)) for contradiction in found]
    blocks += [Words(f"Note: {note}") for note in report.findings.notes[:3]]
    return Section("Audit", blocks)


def _configuration(facts: Facts) -> Section:
    return Section(
        "Configuration",
        [
            Words("What is not at its default, without ports and paths:"),
            Code(choices_of(facts.config), "toml"),
            Fold("All keys", [Code(whole(facts.config), "toml")]),
        ],
    )


def _surroundings(facts: Facts) -> Section:
    if not facts.surroundings:
        return Section("Versions and machine", [Words("The run did not write down what it ran with.")])
    return Section("Versions and machine", [Table(list(_flat(facts.surroundings)))])


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name} ")
        elif value:
            yield f"{above}{name}", " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _again(facts: Facts) -> Section:
    program, folder = "rl" if facts.rl else "sft", facts.folder
    lines = [f"uv run {program} @ again.toml --name {facts.name}-again   # the configuration above, in a file"]
    if facts.rl:
        lines += [
            f"uv run trireme replay {folder}   # trains it again from its journal, compares every weight",
            f"uv run trireme audit {folder}",
            f"uv run trireme diff {folder} outputs/{facts.name}-again   # where two runs part, and why",
            f"uv run trireme dashboard {folder}",
        ]
    said = []
    if facts.rl and not (facts.rl.max_async_level == 0 and facts.rl.device == "cpu"):
        said.append(
            Words(
                "Generation that runs ahead of training, and GPUs, do not repeat to the bit: expect the same curve, "
                "not the same numbers. `--max-async-level 0` on a CPU repeats to the bit."
            )
        )
    return Section("How to do it again", [Code("\n".join(lines), "sh"), *said])
