"""TRL's `GRPOTrainer` and us, side by side: the same model file, prompts, reward, batch, learning rate and cores.

    uv run python -m benchmarks.vs_trl [--quick] [--seeds 0 1 2 3 4] [--rows bcde] [--write]

Rows: (a) reward against rollouts, and (b) seconds and CPU seconds to a reward, from the same runs; (c) tokens per
second as the spread of response lengths grows; (d) environments that take a while; (e) 20 million parameters, responses
of 128 tokens. One run at a time, sides by turns. TRL gets a virtual environment of its own, made by uv, and what was
found to be its fastest options on a CPU (`--tune` tries the others, see `trl/tuning.py`).

What has been measured lies in FOLDER/results.json: the same command goes on where it stopped. `--write` puts the
tables into docs/benchmarks.md. `--quick`: three seeds and fewer steps, in under 20 minutes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from benchmarks import ROOT
from benchmarks.made_models import write_countdown
from benchmarks.measuring import command
from benchmarks.trl.cells import LARGE, SPREADS, Cell, Results, cells_of
from benchmarks.trl.runs import run, their_python
from benchmarks.trl.summary import by_row, tables, written_into
from benchmarks.trl.tuning import try_options

DOCUMENT = ROOT / "docs" / "benchmarks.md"


def measure(cells: list[Cell], results: Results, folder: Path) -> list[dict[str, Any]]:
    """Run those that are not known yet, after one step of each side that reads its files from the disk."""
    if any(results.get(cell) is None for cell in cells):
        for cell in {cell.side: cell for cell in reversed(cells)}.values():
            run(replace(cell, max_steps=1), folder / "runs" / f"warm-{cell.side}")
    found = []
    for number, cell in enumerate(cells, 1):
        if (result := results.get(cell)) is None:
            began = time.perf_counter()
            print(f"[{number}/{len(cells)}] {cell.key} ...", end=" ", flush=True)
            result = run(cell, folder / "runs" / cell.key.replace("/", "-").replace(" ", ""))
            results.put(cell, result)
            print(f"{time.perf_counter() - began:.0f} s", flush=True)
        found.append(result)
    return found


def prepare(folder: Path) -> None:
    """Install TRL, and write the models that count down."""
    their_python(folder)
    write_countdown(folder / "models" / "small", SPREADS, hidden=128, layers=3, heads=4)
    write_countdown(folder / "models" / "large", [LARGE], hidden=384, layers=11, heads=6)


def main(
    quick: bool = False,
    seeds: tuple[int, ...] | None = None,
    rows: Annotated[str, "(a) is measured with (b)"] = "bcde",
    folder: Path = Path("outputs/vs-trl"),
    write: Annotated[bool, "tables into docs/benchmarks.md"] = False,
    tune: Annotated[bool, "TRL's options, one after the other"] = False,
) -> None:
    folder = folder.resolve() / ("quick" if quick else "full")
    prepare(folder)
    if tune:
        try_options(folder, rows=rows)
        return
    cells = cells_of(seeds or ((0, 1, 2) if quick else (0, 1, 2, 3, 4)), folder, quick=quick, rows=rows)
    found = measure(cells, Results(folder / "results.json"), folder)
    text = tables(by_row(cells, found))
    print(f"\n{text}")
    if write:
        DOCUMENT.write_text(written_into(DOCUMENT.read_text(), text))


if __name__ == "__main__":
    command(main)
