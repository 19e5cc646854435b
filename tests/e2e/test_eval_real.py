"""`uv run eval` and `trireme eval run` with a real engine: what it answers is what the checkpoint would say."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from real_run import REPOSITORY, SharedEngine, command

pytestmark = pytest.mark.e2e

DEADLINE_S = 300
BASE = REPOSITORY / "models" / "reverse-text-tiny"
EXAMPLES = 6
SAME, NOISE, ADAPTERS, MERGED = 1, 2, 3, 4


def write_noise(folder: Path) -> None:
    shutil.copytree(BASE, folder)
    torch.manual_seed(5)
    tensors = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in load_file(BASE / WHOLE).items()}
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


WHOLE = "model.safetensors"


def write_adapters(adapters: Path, merged: Path) -> None:
    """By PEFT, which also says what they come to."""
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), settings)
    torch.manual_seed(6)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2)
    model.peft_config["default"].base_model_name_or_path = str(BASE)
    model.save_pretrained(adapters)
    shutil.copytree(BASE, merged)
    model.merge_and_unload().save_pretrained(merged)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "weights"
    shutil.copytree(BASE, folder / f"step_{SAME}")
    write_noise(folder / f"step_{NOISE}")
    write_adapters(folder / f"step_{ADAPTERS}", folder / f"step_{MERGED}")
    return folder


def evaluate(engine: SharedEngine, weights: Path, *words: str) -> Path:
    """The engine is shared with tests that train: their runs are over."""
    where = ["--client.base-url", f"http://127.0.0.1:{engine.port}/v1", "--weights-dir", str(weights), "--take-over"]
    what = ["--env.id", "reverse-text", "--env.args.max-length", "8", "--num-examples", str(EXAMPLES)]
    done = subprocess.run(
        [command("eval"), *where, *what, "--sampling.max-tokens", "16", "--max-concurrent", "1", *words],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return weights.parent / "evals"


def said(folder: Path, step: int) -> list[str]:
    lines = (folder / f"step_{step}" / "reverse-text.jsonl").read_text().splitlines()
    return [json.loads(line)["completion"][-1]["content"] for line in lines]


def serves(engine: SharedEngine) -> Any:
    return httpx.get(f"http://127.0.0.1:{engine.port}/weight_info", trust_env=False).json()["weight_version"]


def test_each_checkpoint_answers_with_its_own_weights_and_the_base_model_is_given_back(
    engine: SharedEngine, weights: Path
) -> None:
    results = evaluate(engine, weights)
    answers = {step: said(results, step) for step in range(5)}
    assert [len(each) for each in answers.values()] == [EXAMPLES] * 5
    assert answers[SAME] == answers[0]
    assert answers[ADAPTERS] == answers[MERGED]
    assert len({tuple(answers[step]) for step in (0, NOISE, ADAPTERS)}) == 3
    rewards = {row["model"]: row["reward"] for row in json.loads((results / "summary.json").read_text())}
    assert rewards["base"] == rewards[f"step_{SAME}"] > rewards[f"step_{NOISE}"]
    assert serves(engine) == "default"


def test_weights_over_the_wire_answer_like_those_from_the_folder_also_at_once(
    engine: SharedEngine, weights: Path
) -> None:
    elsewhere = ("--output-dir", str(weights.parent / "sent"), "--transfer", "gloo", "--steps", f"{NOISE},{ADAPTERS}")
    evaluate(engine, weights, *elsewhere, "--no-eval-base")
    for step in (NOISE, ADAPTERS):
        assert said(weights.parent / "sent", step) == said(weights.parent / "evals", step)
    assert serves(engine) == "default"


def test_a_server_is_asked_on_its_chat_route_like_any_other(engine: SharedEngine, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{engine.port}/v1"
    model = httpx.get(f"{url}/models", trust_env=False).json()["data"][0]["id"]
    endpoints = tmp_path / "endpoints.py"
    endpoints.write_text(f'ENDPOINTS = {{"tiny": {{"model": {model!r}, "url": {url!r}, "key": "local"}}}}')
    words = ["-m", "tiny", "-e", str(endpoints), "-n", "4", "-r", "2", "-a", '{"max_length": 8}', "-t", "16", "-s"]
    done = subprocess.run(
        [command("trireme"), "eval", "run", "reverse-text", *words, "-o", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = tmp_path.glob("reverse-text--tiny/*/results.jsonl")
    rollouts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["example"], line["rollout"]) for line in rollouts] == [(e, r) for e in range(4) for r in range(2)]
    assert "difficulty" in done.stdout or "success" in done.stdout
