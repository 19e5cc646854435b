"""The probe of new weights does not stand in line behind requests that a full engine has no place for yet."""

import asyncio
import json
import random

import pytest

from real_run import SharedEngine
from trireme.base.waiting import Waits
from trireme.config.inference import InferenceConfig
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool

pytestmark = pytest.mark.slow

DEADLINE_S = 120


def test_a_probe_is_answered_before_the_requests_that_wait_for_a_place(engine: SharedEngine) -> None:
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
    """Of different lengths, so that places become free one after the other."""
    sampling = {"max_tokens": random.Random(number).randint(20, 150), "ignore_eos": True, "logprobs": 0}
    body = json.dumps({"token_ids": [5, 6, 7], "sampling_params": sampling}).encode()
    status, _ = await pool.engines[0].request("inference/v1/generate", body)
    assert status == 200
