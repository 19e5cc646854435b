"""Models with low-bit weights on the real engine: it reads what the trainer reads, and a run trains them."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from families import ATTENTION, build_config
from low_bit import LOW_BIT, save_low_bit
from posted_update import update, updated_by_hand
from real_run import REPOSITORY, open_engine, run_apart
from tiny import logprobs_of

TINY = REPOSITORY / "models/reverse-text-tiny"
IDS = list(range(5, 45))
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 64}


LATENT = {"hidden_size": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4}
LATENT |= {"topk_group": 2, "num_experts_per_tok": 4}  # all, as rounding may choose others


@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe", "deepseek_v3"))]
)
def test_low_bit_weights_are_served_and_trained_as_what_they_mean(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    sizes = LOW_BIT.get(kind, LATENT) | {"vocab_size": vocabulary, "head_dim": 64}
    rope = {"rope_parameters": YARN, "max_position_embeddings": 2048} if kind == "gpt_oss" else {}
    meant = save_low_bit(folder, build_config(kind, **sizes, **rope), TINY)
    flags = ("--model.name", folder, "--max-steps", "3", "--trainer.model.attn", ATTENTION.get(kind, "sdpa"))
    rng = np.random.default_rng(0)
    one = {name: tensor.float().numpy() for name, tensor in meant.items()}
    other = {name: tensor + rng.normal(0, 0.05, tensor.shape).astype(np.float32) for name, tensor in one.items()}
    with open_engine(tmp_path / "engine", *flags) as engine:
        served = [logprobs_at(engine.port, folder)]
        with updated_by_hand(engine.port) as post:
            assert update(post, other, tmp_path) == []
        served.append(logprobs_at(engine.port, folder))
        run = run_apart(engine, tmp_path / "run", *flags)
    assert max(row["mismatch_kl"] for row in run.rows("trainer")) < 1e-8
    (export,) = run.paths.weights.glob("step_3")
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    for found, tensors in zip(served, (one, other), strict=True):
        np.testing.assert_allclose(found, logprobs_of(export, tensors, IDS), atol=1e-4)


def logprobs_at(port: int, model: Path) -> list[float]:
    body = {"model": str(model), "prompt": IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False)
    return [next(iter(each.values()))["logprob"] for each in answer.json()["choices"][0]["prompt_logprobs"][1:]]
