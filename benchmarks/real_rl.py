"""A real run, with its real engine and trainer, of a model that is made for it: its answers are all equally long."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
LONGEST_S = 1200

CONFIG = """
name = "run"
output_dir = {folder}
max_steps = {steps}
device = "cpu"
{ours}

[model]
name = {model}

[[orchestrator.env]]
id = {environment}
name = "task"
args = {{ kind = "countdown", spread = {spread} }}
"""


@dataclass(frozen=True)
class Size:
    """Of a model, by its width and depth."""

    hidden: int
    layers: int
    heads: int


SIZES = {2: Size(192, 4, 6), 20: Size(384, 11, 6), 100: Size(768, 14, 12), 500: Size(1536, 18, 12)}
"""By millions of parameters, about."""


def run(size: Size, folder: Path, *, answer_tokens: int, steps: int, ours: str) -> tuple[Path, Path]:
    """Returns the folders of the run and of its model.

    Args:
        answer_tokens: of each answer, the last of which ends it.
        ours: the other lines of its configuration; must not touch `[model]` or the environment.
    """
    sys.path.insert(0, str(HERE.with_name("trl")))
    from models import Spread, write_countdown

    answers = Spread(0.0, mean=answer_tokens, longest=answer_tokens + 2)
    shape = {"hidden": size.hidden, "layers": size.layers, "heads": size.heads}
    model = write_countdown(folder / "model", [answers], **shape)
    config = folder / "rl.toml"
    config.write_text(
        CONFIG.format(
            folder=json.dumps(str(folder / "run")),
            steps=steps,
            ours=ours,
            model=json.dumps(str(model)),
            environment=json.dumps(str(HERE.with_name("trl") / "task.py")),
            spread=json.dumps(answers.word),
        )
    )
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(Path(sys.executable).with_name("rl")), "@", str(config)]
        ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=LONGEST_S)
    if ended.returncode:
        sys.exit(f"The run ended with {ended.returncode}:\n{log.read_text(errors='replace')[-3000:]}")
    return folder / "run" / "run", model
