"""Real runs, as a user starts them: of shipped configurations, and of models that are made for a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.made_models import Spread, write_countdown
from support.runs.real_run import Run

LONGEST_S = 1200
SIZES = {2: (192, 4, 6), 20: (384, 11, 6), 100: (768, 14, 12), 500: (1536, 18, 12)}
"""Width, depth and heads of a model, by millions of parameters, about."""

TASK = ROOT / "benchmarks" / "trl" / "task.py"
CONFIG = """
name = "run"
output_dir = {folder}
max_steps = {steps}
device = "cpu"
{settings}

[model]
name = {model}

[[orchestrator.env]]
id = {environment}
name = "task"
args = {{ kind = "countdown", spread = {spread} }}
"""


def start(program: str, *words: object, log: Path | None = None) -> None:
    """Run one of our commands to its good end; with a log, say nothing but the end of that if it fails."""
    command = [str(Path(sys.executable).with_name(program)), *map(str, words)]
    if log is None:
        subprocess.run(command, cwd=ROOT, check=True)
        return
    with log.open("wb") as output:
        ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=LONGEST_S)
    if ended.returncode:
        sys.exit(f"`{program}` ended with {ended.returncode}:\n{log.read_text(errors='replace')[-3000:]}")


def run_countdown(millions: int, folder: Path, *, answer_tokens: int, steps: int, settings: str) -> Run:
    """Run `rl` with a model whose answers are all equally long, which is made in `folder`.

    Args:
        answer_tokens: tokens of each answer, the last of which ends it.
        settings: the other lines of its configuration; must not touch `[model]` or the environment.
    """
    answers = Spread(0.0, mean=answer_tokens, longest=answer_tokens + 2)
    hidden, layers, heads = SIZES[millions]
    model = write_countdown(folder / "model", [answers], hidden=hidden, layers=layers, heads=heads)
    words: dict[str, Any] = {"folder": str(folder / "run"), "steps": steps, "model": str(model)}
    words |= {"environment": str(TASK), "spread": answers.word}
    text = {name: json.dumps(value) for name, value in words.items()}
    (folder / "rl.toml").write_text(CONFIG.format(settings=settings, **text))
    start("rl", "@", folder / "rl.toml", log=folder / "log")
    return Run(folder / "run" / "run")
