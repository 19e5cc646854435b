"""Folders of runs with metrics alone, as the dashboard reads them."""

import json
import math
from pathlib import Path
from typing import Any

from trireme.monitor.metrics import MetricsFile
from trireme.tools.dashboard.runs import RunFolder


def write(run: Path, steps: range, *, reward: float = 0.5, config: Any = None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    trainer, orchestrator = (MetricsFile(run / "metrics.jsonl", name) for name in ("trainer", "orchestrator"))
    for step in steps:
        orchestrator.append(step, {"reward/mean": reward + step, "time/step": 1.0})
        trainer.append(step, {"loss": -0.1 * step, "time/step": 2.0, "grad_norm": math.nan if step == 1 else 1.0})
    if config is not None:
        (run / "configs").mkdir()
        (run / "configs" / "run.json").write_text(json.dumps(config))
    return run


def opened(run: Path) -> RunFolder:
    folder = RunFolder(run, run.name)
    folder.refresh()
    return folder
