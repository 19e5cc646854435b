"""Adapters on the real engine: it computes with the ones that were trained, and says by name where it does not."""

import json
from itertools import pairwise

import numpy as np
import pytest
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from support.engines.posted_update import sample_through_update, update, updated_by_hand
from support.models.tiny import logprobs_of
from support.runs.real_run import REPOSITORY, open_engine, run_apart, run_command
from trireme.algo.weight_checks import POLICY
from trireme.journal.versions import Versions

MODEL = REPOSITORY / "models/reverse-text-tiny"
RANK = 4
LORA = ("--trainer.model.lora.rank", str(RANK), "--trainer.model.lora.alpha", str(2 * RANK))
STEPS = 3
PROMPT = [(17 + 11 * place) % json.loads((MODEL / "config.json").read_text())["vocab_size"] for place in range(12)]

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def lora_engine(tmp_path_factory):
    with open_engine(tmp_path_factory.mktemp("lora_engine"), *LORA, "--trainer.model.lora.sync", "adapter") as engine:
        yield engine


@pytest.fixture
def post(lora_engine, tmp_path):
    with updated_by_hand(lora_engine.port, epoch=str(tmp_path)) as post:
        yield post


def test_running_request_uses_new_adapters_from_the_next_token(lora_engine, post, tmp_path):
    """Every token's logprob is that of the version that it names: what came before is computed again, too."""
    base, first, second = load_file(MODEL / "model.safetensors"), adapters(1), adapters(2)
    update(post, base | first, tmp_path, version=0)
    post("v1/load_lora_adapter", lora_name=POLICY, lora_path=POLICY)

    def load(is_second: bool) -> None:
        update(post, second if is_second else first, tmp_path, version=int(is_second))

    sampling = {"max_tokens": 200, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    asked = {"token_ids": PROMPT, "model": POLICY, "sampling_params": sampling}
    (answer,) = sample_through_update(post, lora_engine.port, load, **asked)["choices"]
    spans = {span["version"]: range(span["start"], span["end"]) for span in answer["weight_versions"]}
    assert set(spans) == {"0", "1"}
    told = np.array([entry["logprob"] for entry in answer["logprobs"]["content"]])
    ids = PROMPT + answer["token_ids"]
    for version, sent in (("0", first), ("1", second)):
        expected = logprobs_of(MODEL, merged(base, sent), ids)[len(PROMPT) - 1 :]
        assert np.abs(told - expected)[list(spans[version])].max() < 1e-4
    assert (
        np.abs(logprobs_of(MODEL, merged(base, first), ids) - logprobs_of(MODEL, merged(base, second), ids)).max() > 0.1
    )


def test_adapters_that_are_left_out_are_named(post, tmp_path):
    base, sent = load_file(MODEL / "model.safetensors"), adapters(3)
    assert update(post, base | sent, tmp_path, version=0) == []
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    halved = {other: tensor for other, tensor in sent.items() if other != name}
    assert update(post, halved, tmp_path, version=1) == ["model.layers.1.mlp.up_proj"]


def adapters(seed: int) -> Tensors:
    rng, found = np.random.default_rng(seed), {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            out_size, in_size = tensor.shape
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{layer}.lora_A.weight"] = rng.normal(0, 0.1, (RANK, in_size)).astype(np.float32)
            found[f"{layer}.lora_B.weight"] = rng.normal(0, 0.1, (out_size, RANK)).astype(np.float32)
    return found


def merged(base: Tensors, sent: Tensors) -> Tensors:
    found = dict(base)
    for name in base:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in sent:
            found[name] = base[name] + sent[f"{layer}.lora_B.weight"] @ sent[f"{layer}.lora_A.weight"]
    return found


@pytest.mark.parametrize("sync", ["adapter", pytest.param("merged", marks=pytest.mark.slow)])
def test_a_run_with_adapters_is_confirmed_audited_and_replayed_to_the_bit(sync, lora_engine, tmp_path):
    """One engine serves adapters beside its base model, or the merged model; checkpoints of both are adapters."""
    flags = (*LORA, "--trainer.model.lora.sync", sync, "--trainer.optim.lr", "5e-3", "--max-steps", str(STEPS))
    run = run_apart(lora_engine, tmp_path / "run", *flags)
    assert max(row["mismatch_kl"] for row in run.rows("trainer")) < 1e-6
    digests = [Versions(run.paths.journal).read(version).digests for version in range(STEPS + 1)]
    names = {name for one, other in pairwise(digests) for name in one if one[name] != other[name]}
    assert names
    assert all(name.endswith("_proj.weight") or ".lora_" in name for name in names)
    assert any(".lora_" in name for name in digests[0]) is (sync == "adapter")
    for verb in ("audit", "replay"):
        run_command("trireme", verb, run.root)
    folder = run.weights(STEPS).parent
    assert not (folder / "model.safetensors").exists()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MODEL), str(folder))
    assert sum(".lora_" in name for name, _ in model.named_parameters()) == len(adapters(0))
