"""`eval` with a real engine: each checkpoint answers with its own weights."""

import json
import shutil
from pathlib import Path

import httpx
import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.runs.real_run import REPOSITORY, run_command

BASE = REPOSITORY / "models" / "reverse-text-tiny"
WHOLE = "model.safetensors"
EXAMPLES = 6
SAME, NOISE, ADAPTERS, MERGED = 1, 2, 3, 4


def write_weights(weights: Path) -> None:
    """The base model, one with noise, and adapters by PEFT, which also says what they come to."""
    for step in (SAME, NOISE, MERGED):
        shutil.copytree(BASE, weights / f"step_{step}")
    torch.manual_seed(5)
    tensors = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in load_file(BASE / WHOLE).items()}
    save_file(tensors, weights / f"step_{NOISE}" / WHOLE, metadata={"format": "pt"})
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), settings)
    torch.manual_seed(6)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2)
    model.peft_config["default"].base_model_name_or_path = str(BASE)
    model.save_pretrained(weights / f"step_{ADAPTERS}")
    model.merge_and_unload().save_pretrained(weights / f"step_{MERGED}")


def test_eval_of_a_real_engine_gives_each_checkpoint_its_own_answers(engine, tmp_path):
    url = f"http://127.0.0.1:{engine.port}"

    def said(folder: str, step: int) -> list[str]:
        lines = (tmp_path / folder / f"step_{step}" / "reverse-text.jsonl").read_text().splitlines()
        return [json.loads(line)["completion"][-1]["content"] for line in lines]

    def serves() -> str:
        return httpx.get(f"{url}/weight_info", trust_env=False).json()["weight_version"]

    write_weights(tmp_path / "weights")
    words = ["eval", "--client.base-url", f"{url}/v1", "--weights-dir", tmp_path / "weights", "--take-over"]
    words += ["--env.id", "reverse-text", "--env.args.max-length", "8", "--num-examples", str(EXAMPLES)]
    words += ["--sampling.max-tokens", "16", "--max-concurrent", "1"]
    run_command(*words)
    answers = {step: said("evals", step) for step in range(5)}
    assert [len(each) for each in answers.values()] == [EXAMPLES] * 5
    assert answers[SAME] == answers[0]
    assert answers[ADAPTERS] == answers[MERGED]
    assert len({tuple(answers[step]) for step in (0, NOISE, ADAPTERS)}) == 3
    described = [tmp_path / "evals" / f"step_{step}" / "reverse-text.json" for step in range(3)]
    rewards = [json.loads(file.read_text())["avg_reward"] for file in described]
    assert rewards[0] == rewards[SAME] > rewards[NOISE]
    assert serves() == "default"
