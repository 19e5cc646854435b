"""An engine that did not receive all of a model's weights says which layer it lacks: for every tensor that there is."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from posted_update import Post, update, updated_by_hand
from real_run import REPOSITORY, SharedEngine
from tiny import logprobs_of
from trireme.algo.weight_checks import probe_ids
from trireme.trainer.publish.probe import PROBE_TOKENS

MODEL = REPOSITORY / "models/reverse-text-tiny"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@pytest.fixture
def post(engine: SharedEngine) -> Iterator[Post]:
    with updated_by_hand(engine.port) as post:
        yield post


def test_whichever_tensor_is_left_out_its_layer_is_named(post: Post, tmp_path: Path) -> None:
    """The engine has tied embeddings, fused projections and packed weights; none of that may hide a gap."""
    tensors = load_file(MODEL / "model.safetensors")
    found = {name: update(post, {n: t for n, t in tensors.items() if n != name}, tmp_path) for name in tensors}
    missed = {name: reported for name, reported in found.items() if layer_of(name) not in reported}
    assert missed == {}
    assert {name: reported for name, reported in found.items() if len(reported) > 1} == {
        "model.embed_tokens.weight": ["model.embed_tokens", "lm_head"]
    }


def test_after_a_whole_update_the_engine_computes_with_it(post: Post, tmp_path: Path) -> None:
    tensors = load_file(MODEL / "model.safetensors")
    rng = np.random.default_rng(0)
    moved = {name: t + rng.normal(0, 0.02, t.shape).astype(t.dtype) for name, t in tensors.items()}
    ids = probe_ids(json.loads((MODEL / "config.json").read_text())["vocab_size"], PROBE_TOKENS)

    def logprobs() -> np.ndarray:
        """[T - 1] what the engine says about the fixed prompt."""
        post("resume")
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0}
        entries = post("inference/v1/generate", token_ids=ids, sampling_params=sampling)["prompt_logprobs"][1:]
        post("pause?mode=keep")
        return np.array([entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries, strict=True)])

    before = logprobs()
    assert update(post, moved, tmp_path) == []
    after = logprobs()
    assert np.abs(after - logprobs_of(MODEL, moved, ids)).max() < 1e-4
    assert np.abs(after - before).max() > 0.01


def layer_of(tensor: str) -> str:
    *above, last = tensor.removesuffix(".weight").split(".")
    return ".".join([*above, FUSED.get(last, last)])
