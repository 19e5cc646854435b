"""Models with low-bit weights on the real engine: it reads what the trainer reads, and a run trains them."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from support.engines.posted_update import update, updated_by_hand
from support.models.families import ATTENTION, build_config
from support.models.low_bit import LOW_BIT, save_low_bit
from support.models.tiny import logprobs_of
from support.runs.real_run import REPOSITORY, Run, open_engine, run_apart

TINY = REPOSITORY / "models/reverse-text-tiny"
IDS = list(range(5, 45))
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 64}

LATENT = {"hidden_size": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4}
LATENT |= {"topk_group": 2, "num_experts_per_tok": 4}  # all, as rounding may choose others
WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip

Logprobs = np.ndarray


def served_and_trained(
    folder: Path, kind: str, sizes: dict, *flags: str, trains: bool = True
) -> tuple[Run | None, list[Logprobs], list[Logprobs]]:
    """Return a run of three steps, what its engine said before it with the first weights, with others and with the
    first again, and what both come to."""
    vocabulary = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = build_config(kind, **sizes | {"vocab_size": vocabulary})
    config.save_pretrained(folder / "plain")
    meant = save_low_bit(folder / "model", config, TINY)
    rng = np.random.default_rng(0)
    one = {name: tensor.float().numpy() for name, tensor in meant.items()}
    other = {name: tensor + rng.normal(0, 0.05, tensor.shape).astype(np.float32) for name, tensor in one.items()}
    words = ("--model.name", folder / "model", "--max-steps", "3", *flags)
    with open_engine(folder / "engine", *words) as engine:
        served = [logprobs_at(engine.port, folder / "model")]
        for tensors in (other, one):
            with updated_by_hand(engine.port) as post:
                assert update(post, tensors, folder) == []
            served.append(logprobs_at(engine.port, folder / "model"))
        small = ("--orchestrator.batch-size", "8", "--no-orchestrator.eval")  # few bits are slow on some processors
        run = run_apart(engine, folder / "run", *words, *small) if trains else None
    return run, served, [logprobs_of(folder / "plain", tensors, IDS) for tensors in (one, other)]


@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe", "deepseek_v3"))]
)
def test_low_bit_weights_are_served_and_trained_as_what_they_mean(kind, tmp_path):
    sizes = LOW_BIT.get(kind, LATENT) | {"head_dim": 64}
    sizes |= {"rope_parameters": YARN, "max_position_embeddings": 2048} if kind == "gpt_oss" else {}
    attention = ("--trainer.model.attn", ATTENTION.get(kind, "sdpa"))
    run, served, (one, other) = served_and_trained(tmp_path, kind, sizes, *attention, trains=kind != "gpt_oss")
    np.testing.assert_allclose(served, [one, other, one], atol=1e-4)
    if run is not None:  # of the first, `test_layouts.py` holds the trainer's weights against the same values
        assert max(row["mismatch_kl"] for row in run.rows("trainer")) < 1e-8
        assert "quantization_config" not in json.loads(run.weights(3).with_name("config.json").read_text())


@pytest.mark.slow
def test_an_engine_in_few_bits_rounds_each_version_again_and_is_confirmed(tmp_path):
    flags = ("--inference.model.dtype", "bfloat16", "--inference.args.quantization", "fp8_per_channel")
    run, served, exact = served_and_trained(tmp_path, "qwen3", WIDE, *flags)
    assert run is not None
    assert 1e-6 < max(row["mismatch_kl"] for row in run.rows("trainer")) < 0.05
    assert served[2].tolist() == served[0].tolist()
    for found, own, others in ((served[0], *exact), (served[1], *exact[::-1])):
        assert 0.01 < np.abs(found - own).mean() < 0.3
        assert np.abs(found - others).mean() > 1


def logprobs_at(port: int, model: Path) -> Logprobs:
    body = {"model": str(model), "prompt": IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False)
    prompt = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return np.array([next(iter(each.values()))["logprob"] for each in prompt])
