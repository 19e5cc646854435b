"""Models whose layers carry a state, on the real engine: updates arrive, also under a request, and a run trains.

Those with parts that text training leaves out are exported with them.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from support.engines.posted_update import sample_through_update, update, updated_by_hand
from support.models.families import SERVED, build_config, save_family
from support.models.tiny import logprobs_of
from support.runs.real_run import REPOSITORY, open_engine, run_apart, run_command
from trireme.config.model.state_layers import SERVED_ON_CPU

TINY = REPOSITORY / "models/reverse-text-tiny"
VOCABULARY = json.loads((TINY / "config.json").read_text())["vocab_size"]
PROMPT = [(17 + 11 * place) % VOCABULARY for place in range(40)]
NOISE = 0.1  # mean of bfloat16, whose largest is that of a token that was not likely; the two models differ by nats


def test_there_is_a_model_of_each_architecture_that_is_said_to_be_served():
    assert SERVED.keys() == set(SERVED_ON_CPU)


@pytest.mark.parametrize(
    "kind", [kind if kind == "nemotron_h" else pytest.param(kind, marks=pytest.mark.slow) for kind in SERVED]
)
def test_a_hybrid_is_updated_in_flight_and_trained(kind, tmp_path):
    folder = save_family(tmp_path / "model", build_config(kind, **SERVED[kind], vocab_size=VOCABULARY))
    for file in (*TINY.glob("*token*"), *TINY.glob("*.jinja")):
        shutil.copy(file, folder)
    one = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    other = {name: tensor + rng.normal(0, 0.05, tensor.shape).astype(tensor.dtype) for name, tensor in one.items()}
    flags = ("--model.name", folder, "--inference.model.dtype", "bfloat16", "--seq-len", "512", "--max-steps", "3")
    with open_engine(tmp_path / "engine", *flags) as engine:
        with updated_by_hand(engine.port) as post:
            sampling = {"max_tokens": 400, "ignore_eos": True, "logprobs": 0}

            def load(is_other: bool) -> None:
                assert update(post, other if is_other else one, tmp_path, version=int(is_other)) == []

            asked = {"token_ids": PROMPT, "sampling_params": sampling}
            (answer,) = sample_through_update(post, engine.port, load, **asked)["choices"]
            ids, told = PROMPT + answer["token_ids"], [each["logprob"] for each in answer["logprobs"]["content"]]
            expected = [logprobs_of(folder, tensors, ids)[len(PROMPT) - 1 :] for tensors in (one, other)]
            assert np.abs(expected[0] - expected[1]).mean() > 4 * NOISE
            assert [span["version"] for span in answer["weight_versions"]] == ["0", "1"]
            for span, logprobs in zip(answer["weight_versions"], expected, strict=True):
                assert np.abs(told - logprobs)[span["start"] : span["end"]].mean() < NOISE
        lora = ("--trainer.model.lora.rank", "4") if kind == "qwen3_5_text" else ()
        flags = (*flags, "--trainer.model.moe.router-replay", "false", *lora)
        run = run_apart(engine, tmp_path / "run", *flags, config="tests/e2e/moe.toml")
    rows = run.rows("trainer")
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["mismatch_kl"] for row in rows) < 1e-2
    kept = [name for name in one if name.startswith(("mtp.", "model.visual."))]
    if lora:  # whose export is adapters
        return
    with safe_open(run.weights(3), framework="np") as exported:
        assert set(exported.keys()) == one.keys()
        assert all(np.array_equal(exported.get_tensor(name), one[name]) for name in kept)
    if kept:
        assert "version 3: " in (told := run_command("trireme", "replay", run.root))
        assert "differ" not in told
