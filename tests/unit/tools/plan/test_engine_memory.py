"""The memory of an engine, worked out by hand."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from support.models.model_configs import MODELS
from trireme.algo.model.architecture import architecture_of
from trireme.algo.model.chips import GIB
from trireme.tools.plan.engine_memory import Serving
from trireme.tools.plan.sizes import count_sizes

QWEN = architecture_of(MODELS["Qwen/Qwen2.5-7B"])


def test_the_kv_cache_of_an_engine_by_hand():
    serving = Serving(QWEN, memory=80 * GIB, utilization=0.5, max_model_len=8192)
    per_token = 2 * 4 * 128 * 2 * 28  # keys and values, 4 heads of 128, bfloat16, 28 layers
    assert serving.kv_bytes(1) == per_token
    assert serving.room == 40 * GIB - sum(serving.parts.values()) + serving.parts["transfers"]
    assert serving.num_tokens == pytest.approx(serving.room / per_token, abs=1)
    assert serving.num_requests == pytest.approx(serving.num_tokens / 8192, rel=1e-3)
    assert Serving(QWEN, memory=80 * GIB, tp=2).parts["weights"] == serving.parts["weights"] / 2
    eight_bit = Serving(QWEN, memory=80 * GIB, matrix_bytes=1.0)  # all but norms, biases and the embedding
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert eight_bit.parts["weights"] == serving.parts["weights"] - matrices
    for tp, share in ((2, 2), (8, 4)):  # it has 4 heads of keys: more GPUs hold copies
        assert Serving(QWEN, memory=80 * GIB, tp=tp).kv_bytes(100) == 100 * per_token / share
    deepseek = count_sizes(AutoConfig.for_model("deepseek_v3").to_dict())
    assert deepseek.num_parameters == 671_026_404_352
    assert Serving(deepseek, memory=80 * GIB).kv_bytes(100) == 100 * (512 + 64) * 2 * 61  # one latent for all heads
    windowed = Serving(architecture_of(MODELS["google/gemma-3-1b"]), memory=80 * GIB)
    # every sixth of 26 layers looks at all tokens, the others at 512
    assert windowed.kv_bytes(10_000) == 2 * 1 * 256 * 2 * (22 * 512 + 4 * 10_000)


def test_the_first_update_of_an_engine_by_hand():
    embedding = 2 * 152064 * 3584  # as a bucket, as a copy, and in vLLM's new layer; and the next bucket
    apart = Serving(QWEN, memory=24 * GIB, utilization=0.5)
    assert apart.update_bytes == 3 * embedding + (64 << 20)
    shared = replace(apart, bucket_bytes=None, is_shared=True)
    assert shared.update_bytes == 2 * embedding
    assert apart.parts["activations"] + apart.parts["transfers"] == apart.update_bytes  # it is paused meanwhile
    beside = [sum(each.parts.values()) + each.room - 12 * GIB for each in (apart, shared)]
    assert beside == [apart.parts["transfers"], pytest.approx(0.0, abs=1.0)]  # vLLM measures before it
    mixture = Serving(architecture_of(MODELS["Qwen/Qwen3-30B-A3B"]), memory=80 * GIB, tp=4, bucket_bytes=None)
    assert mixture.update_bytes == 2 * 128 * 3 * 2048 * 768 * (1 + 1 / 4)  # experts of a layer, and a rank's part
