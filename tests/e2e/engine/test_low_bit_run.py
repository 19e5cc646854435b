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
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


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


@pytest.mark.slow
def test_an_engine_in_few_bits_rounds_each_version_again_and_is_confirmed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    meant = save_low_bit(folder, build_config("qwen3", **WIDE, vocab_size=vocabulary), TINY)
    one = {name: tensor.float().numpy() for name, tensor in meant.items()}
    rng = np.random.default_rng(0)
    other = {name: tensor + rng.normal(0, 0.05, tensor.shape).astype(np.float32) for name, tensor in one.items()}
    flags = ("--model.name", folder, "--max-steps", "3", "--inference.model.dtype", "bfloat16")
    flags += ("--inference.args.quantization", "fp8_per_channel")
    with open_engine(tmp_path / "engine", *flags) as engine:
        served = [logprobs_at(engine.port, folder)]
        for tensors in (other, one):
            with updated_by_hand(engine.port) as post:
                assert update(post, tensors, tmp_path) == []
            served.append(logprobs_at(engine.port, folder))
        run = run_apart(engine, tmp_path / "run", *flags)
    assert 1e-6 < max(row["mismatch_kl"] for row in run.rows("trainer")) < 0.05
    (export,) = run.paths.weights.glob("step_3")
    exact = [logprobs_of(export, tensors, IDS) for tensors in (one, other)]
    assert served[2] == served[0]
    for found, own, others in ((served[0], *exact), (served[1], *exact[::-1])):
        assert 0.01 < np.abs(np.subtract(found, own)).mean() < 0.3
        assert np.abs(np.subtract(found, others)).mean() > 1


def logprobs_at(port: int, model: Path) -> list[float]:
    body = {"model": str(model), "prompt": IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False)
    return [next(iter(each.values()))["logprob"] for each in answer.json()["choices"][0]["prompt_logprobs"][1:]]
