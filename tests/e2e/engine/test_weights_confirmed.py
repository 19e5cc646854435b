"""An engine without all weights says which layer it lacks, and its probe does not wait behind requests."""

import asyncio
import json
import random

import pytest
from safetensors.numpy import load_file

from support.engines.posted_update import update, updated_by_hand
from support.runs.real_run import REPOSITORY
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceConfig
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool

DEADLINE_S = 120
MODEL = REPOSITORY / "models/reverse-text-tiny"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def test_whichever_tensor_is_left_out_its_layer_is_named(engine, tmp_path):
    """The engine has tied embeddings, fused projections and packed weights; none of that may hide a gap."""
    tensors = load_file(MODEL / "model.safetensors")
    with updated_by_hand(engine.port) as post:
        found = {name: update(post, {n: t for n, t in tensors.items() if n != name}, tmp_path) for name in tensors}
    missed = {name: reported for name, reported in found.items() if layer_of(name) not in reported}
    assert missed == {}
    assert {name: reported for name, reported in found.items() if len(reported) > 1} == {
        "model.embed_tokens.weight": ["model.embed_tokens", "lm_head"]
    }


def layer_of(tensor: str) -> str:
    *above, last = tensor.removesuffix(".weight").split(".")
    return ".".join([*above, FUSED.get(last, last)])


@pytest.mark.slow
def test_a_probe_is_answered_before_the_requests_that_wait_for_a_place(engine):
    """Twice as many as the engine has places for: the second half waits, and would all be ahead of the probe."""
    places = InferenceConfig().max_num_seqs

    async def answered_before_the_probe() -> int:
        url = f"http://127.0.0.1:{engine.port}"
        async with open_inference_pool(
            [url], waits=Waits("test"), max_model_len=256, timeout_s=DEADLINE_S, max_concurrent=1
        ) as pool:
            asked = [asyncio.create_task(say(pool, number)) for number in range(2 * places)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert len(await pool.prompt_logprobs(pool.engines[0], [5, 6, 7])) == 2
            num_answered = sum(task.done() for task in asked)
            await asyncio.gather(*asked)
            return num_answered

    assert asyncio.run(asyncio.wait_for(answered_before_the_probe(), DEADLINE_S)) < places


async def say(pool: InferencePool, number: int) -> None:
    sampling = {"max_tokens": random.Random(number).randint(20, 150), "ignore_eos": True, "logprobs": 0}
    body = json.dumps({"token_ids": [5, 6, 7], "sampling_params": sampling}).encode()
    status, _ = await pool.engines[0].request("inference/v1/generate", body)
    assert status == 200
