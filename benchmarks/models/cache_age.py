"""How far tokens are from the newest weights if they attend to a cache that older weights have computed.

    uv run python -m benchmarks.models.cache_age [--model reverse-text-tiny]

A synchronous run trains each model for 20 steps and keeps each version. An engine then begins answers under version 4,
is given version 4 + age while they are under way, and goes on with what it has computed: as with
`inference.keep_prefix_cache`. All of it is float32. The logprobs that the engine reported are compared with those of
version 4 + age by transformers, as KL(engine || trainer), estimated as `mismatch_kl` is (k3): of the tokens before the
update, which version 4 sampled (what the lag alone makes), and of those behind it (what the cache makes): of the first
16, whose context is all of the older version, and of all, which attend to more and more that the newer one computed.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import httpx
import numpy as np

from benchmarks.measuring import command, print_table
from benchmarks.models.families import SETTINGS, TINY, Family, sample
from support.engines.posted_update import Post, address, update, updated_by_hand
from support.models.tiny import logprobs_of
from support.runs.real_run import Run, open_engine, run_apart

AGES = (0, 1, 2, 4, 8, 16)
BEGUN = 4  # the version that begins answers
ANSWERS, LENGTH, BEFORE = 8, 400, 80  # at once; tokens of each; tokens of each before the update, about
FLAGS = f"--inference.model.dtype float32 --max-steps {BEGUN + max(AGES)} --trainer.ckpt.interval 1"
FLAGS += " --trainer.optim.lr 5e-4 --orchestrator.batch-size 64"
LEARNS = ("--orchestrator.env", '[{"id": "reverse-text", "args": {"max_length": 8}}]')
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reverse-text-tiny": ("dense, learns to reverse words", LEARNS),
    "qwen3": ("dense, random", ()),
    "falcon_h1": ("attention and Mamba, random", ()),
    "lfm2": ("convolutions and attention, random", ()),
}
ATTEMPTS = 10
FIRST = 16  # tokens behind the update
COLUMNS = ("model", "", "age", "by the lag", "by the cache, first", "by the cache, all", "largest \\|log ratio\\|")


def main(model: Annotated[tuple[str, ...], tuple(MODELS)] = tuple(MODELS)) -> None:
    rows = []
    for name in model:
        with TemporaryDirectory() as folder:
            rows += measure(name, Path(folder))
            print(rows[-len(AGES) :], flush=True)
    print_table(COLUMNS, rows)


def measure(name: str, folder: Path) -> list[list[str]]:
    """Return a row for each age."""
    what, flags = MODELS[name]
    checkpoint, attn, config = TINY, None, folder / "settings.toml"
    if name != TINY.name:
        family = Family(name, folder)
        checkpoint, attn = family.folder, family.attn
    config.write_text(SETTINGS)
    words = ("--model.name", str(checkpoint), *FLAGS.split(), *flags, *(("--trainer.model.attn", attn) if attn else ()))
    rows = []
    with open_engine(folder / "engine", *words, config=str(config)) as engine:
        run = run_apart(engine, folder / "run", *words, config=str(config))
        with updated_by_hand(engine.port) as post:
            for age in AGES:
                found = differences(post, engine.port, run, age, checkpoint, attn)
                kls = (f"{kl(np.concatenate(each)):.1e}" for each in found)
                rows.append([name, what, str(age), *kls, f"{np.abs(np.concatenate(found[2])).max():.2g}"])
    return rows


def differences(
    post: Post, port: int, run: Run, age: int, checkpoint: Path, attn: str | None
) -> list[list[np.ndarray]]:
    """Return the trainer's logprobs of version 4 + age less the engine's: before the update, at once behind it, and of
    all behind it; of each answer."""
    old, new = (as_float32(run.tensors(version)) for version in (BEGUN, BEGUN + age))
    rng, found = np.random.default_rng(age), []
    prompts = [rng.integers(20, 90, 70).tolist() for _ in range(ANSWERS)]
    for prompt, answer in zip(prompts, through_update(post, port, run, prompts, old, new), strict=True):
        ids, begin = prompt + answer["token_ids"], answer["weight_versions"][1]["start"]
        by_trainer = logprobs_of(checkpoint, new, ids, attn=attn)[len(prompt) - 1 :]
        difference = by_trainer - answer["logprobs"]
        found.append((difference[:begin], difference[begin : begin + FIRST], difference[begin:]))
    return [list(each) for each in zip(*found, strict=True)]


def through_update(post: Post, port: int, run: Run, prompts: list[list[int]], old: Any, new: Any) -> list[Any]:
    """Sample answers that each meet the update, which leaves the engine its cache; again if one was done before it.

    Raises: SystemExit if some always are.
    """
    for _ in range(ATTEMPTS):
        post("pause?mode=keep")  # forgets all caches
        assert update(post, old, run.root) == []
        post("resume")
        with ThreadPoolExecutor(len(prompts)) as threads:
            begun = num_sampled(port)
            answers = [threads.submit(sample, post, prompt, LENGTH) for prompt in prompts]
            while num_sampled(port) < begun + BEFORE * len(prompts):
                time.sleep(0.01)
            post("pause?mode=keep&clear_cache=false")
            assert update(post, new, run.root, version=1) == []
            post("resume")
            found = [answer.result() for answer in answers]
        if all(len(answer["weight_versions"]) == 2 for answer in found):
            return found
    raise SystemExit(
        f"In {ATTEMPTS} attempts some of {ANSWERS} answers of {LENGTH} tokens ended before the update - expected that "
        "each meets it. Run it on a quieter machine, or raise LENGTH."
    )


def num_sampled(port: int) -> float:
    text = httpx.get(f"{address(port)}/metrics", trust_env=False).text
    return sum(map(float, re.findall(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)))


def as_float32(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def kl(difference: np.ndarray) -> float:
    """Return the mean of k3 = exp(d) - 1 - d."""
    return float(np.mean(np.expm1(difference.astype(np.float64)) - difference))


if __name__ == "__main__":
    command(main)
