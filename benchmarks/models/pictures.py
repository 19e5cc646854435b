"""The table of models that see in docs/models.md: engine against trainer, with pictures, on tiny random models.

    uv run python -m benchmarks.models.pictures [--family qwen3_5]

Engine, orchestrator and trainer are real processes on the CPU. Differences are of logprobs, in nats, largest / mean.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch
from safetensors.numpy import load_file
from test_pictures_real import SIZES, Sight

from benchmarks.measuring import command, print_table
from benchmarks.models.families import SETTINGS, cell, extremes, last_kl
from support.engines.posted_update import update, updated_by_hand
from support.models.families import build_config, save_family
from support.models.tiny_tokenizer import write_seeing_tokenizer
from support.runs.real_run import SharedEngine, open_engine, run_apart, started

PRECISIONS = {"qwen2_5_vl": ("float32", "bfloat16"), "qwen3_5": ("bfloat16",), "qwen3_5_moe": ("bfloat16",)}
COLUMNS = ("float32", "bfloat16", "floor", "without the picture", "after an update", "mismatch KL", "resume / replay")
ENVIRONMENT = """
import base64, io
from PIL import Image


def dataset(size=40):
    return [{"prompt": [{"role": "user", "content": [show(number), {"type": "text", "text": "what?"}]}], "answer": ""}
            for number in range(size)]


def show(number):
    Image.new("RGB", (40 + 7 * (number % 5), 60), (6 * number, 90, 200)).save(file := io.BytesIO(), "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def reward(completion, answer):
    return sum(place * ord(letter) for place, letter in enumerate(completion, start=1)) % 97 / 97
"""


def main(family: Annotated[tuple[str, ...], tuple(PRECISIONS)] = tuple(PRECISIONS)) -> None:
    print_table(("family", *COLUMNS), map(row_of, family))


def row_of(kind: str) -> list[str]:
    with TemporaryDirectory() as folder:
        result = measure(kind, Path(folder))
    return [f"`{kind}`", *(result.get(name, "-") for name in COLUMNS)]


def measure(kind: str, root: Path) -> dict[str, str]:
    result: dict[str, str] = {}
    folder = root / "model"
    tokens = write_seeing_tokenizer(folder)
    config = build_config(kind, **SIZES[kind], vocab_size=128)
    config.update(tokens)
    save_family(folder, config)
    (root / "see.py").write_text(ENVIRONMENT)
    (root / "settings.toml").write_text(SETTINGS.replace("tests/e2e/say.py", str(root / "see.py")))
    for dtype in PRECISIONS[kind]:
        flags: tuple[str, ...] = ("--model.name", str(folder), "--model.vlm.vision-encoder-attr", "model.visual")
        flags += ("--inference.model.dtype", dtype)
        settings = str(root / "settings.toml")
        with open_engine(root / dtype, *flags, config=settings, forked=True) as engine:
            measure_engine(engine, folder, dtype, result)
            if dtype == "bfloat16":
                measure_run(engine, root, flags, result)
    return result


def measure_engine(engine: SharedEngine, folder: Path, dtype: str, result: dict[str, str]) -> None:
    """Record how far the engine is from transformers in float32 on tokens that it sampled after two pictures."""
    sight, rng = Sight(folder, engine.port), np.random.default_rng(0)
    sizes = ((70, 100), (120, 60))
    prompt = sight.show(*(rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes))
    blank = sight.show(*(np.zeros((*size, 3), np.uint8) for size in sizes))
    one = load_file(folder / "model.safetensors")
    other = {name: each + rng.normal(0, 0.05, each.shape).astype("float32") for name, each in one.items()}

    def show(difference: np.ndarray) -> str:
        return cell(extremes(difference), [])

    with updated_by_hand(engine.port) as post:
        post("resume")
        turn = sight.ask(prompt)
        exact = sight.logprobs(one, prompt, turn.ids)
        result[dtype] = show(turn.logprobs - exact)
        result["floor"] = show(sight.logprobs(one, prompt, turn.ids, dtype=torch.bfloat16) - exact)
        result["without the picture"] = show(turn.logprobs - sight.logprobs(one, blank, turn.ids))
        post("pause?mode=keep")
        assert update(post, other, folder.parent) == []
        post("resume")
        turn = sight.ask(prompt)
        result["after an update"] = show(turn.logprobs - sight.logprobs(other, prompt, turn.ids))
        post("pause?mode=keep")
        assert update(post, one, folder.parent, version=1) == []


def measure_run(engine: SharedEngine, root: Path, flags: tuple[str, ...], result: dict[str, str]) -> None:
    settings = str(root / "settings.toml")
    result["mismatch KL"] = cell(last_kl(run_apart(engine, root / "run", *flags, config=settings)), [])
    run = run_apart(engine, root / "run", *flags, "--resume", "--max-steps", "3", config=settings)
    with started("trireme", "replay", run.root, log=root / "replay.log", forked=True) as replay:
        is_replayed = replay.wait() == 0
    result["resume / replay"] = f"{cell(len(run.rows('trainer')) == 3, [])} / {cell(is_replayed, [])}"


if __name__ == "__main__":
    command(main)
