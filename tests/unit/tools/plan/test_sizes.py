"""Parameters, states and encoders of a model are those that transformers builds."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from support.models.families import HYBRIDS, MROPE, build_config
from trireme.algo.model.activations import Pass
from trireme.algo.model.chips import GIB
from trireme.config.trainer import TrainerModel, Vlm
from trireme.tools.plan.engine_memory import Serving
from trireme.tools.plan.sizes import count_sizes
from trireme.tools.plan.trainer_memory import Training

STATES = {
    **dict.fromkeys(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"], (1, 64 * 3, 4 * 8 * 8)),
    **dict.fromkeys(["granitemoehybrid", "nemotron_h"], (1, 80 * 3, 4 * 16 * 8)),
    **dict.fromkeys(["lfm2", "lfm2_moe"], (1, 32 * 2, 0)), "falcon_h1": (2, 2 * 80 * 3, 2 * 4 * 16 * 8),
    "mamba2": (0, 2 * 80 * 3, 2 * 4 * 16 * 8),
}  # fmt: skip
"""By hand: layers that attend, and the values that a request carries in convolutions (the channels of the inputs before
the current one) and in matrices (heads, value size, key or state size)."""


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_with_a_state_are_counted_and_hold_no_keys_and_values(kind):
    config = build_config(kind, **{"mamba_ssm_dtype": "float32"} if kind == "qwen3_5_text" else {})
    sizes = count_sizes(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.active_parameters <= sizes.num_parameters
    attending, convolutions, matrices = STATES[kind]
    serving = Serving(sizes, memory=80 * GIB, value_bytes=2)
    recurrent_bytes = 4 if kind in ("qwen3_5_text", "nemotron_h") else 2  # the latter is vLLM's default
    assert serving.state_bytes == 2 * convolutions + recurrent_bytes * matrices
    assert serving.kv_bytes(100) - serving.state_bytes == 100 * 2 * 2 * 8 * 2 * attending
    assert sum(Training(sizes, Pass(256, 4)).parts.values()) > 16 * sizes.num_parameters


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_a_vision_encoder_is_counted_and_held_but_trained_only_if_asked(kind):
    config = build_config(kind, rope_parameters=MROPE)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    sizes = count_sizes(config.to_dict(), Vlm())
    assert (sizes.num_parameters, sizes.tower) == (sum(each.numel() for each in model.parameters()), tower)
    training, blind = (Training(each, Pass(256, 4)) for each in (sizes, replace(sizes, tower=0)))
    assert training.trained == blind.trained == sizes.num_parameters - tower
    assert training.weight_bytes - blind.weight_bytes == 4 * tower
    whole = replace(training, settings=TrainerModel(vlm=Vlm(freeze_vision_encoder=False)))
    assert (whole.trained, whole.weight_bytes) == (sizes.num_parameters, training.weight_bytes)
    held = [each.optimizer_bytes + each.gradient_bytes for each in (training, whole)]
    assert held[1] - held[0] == 12 * tower
    adapters = replace(training, row=replace(training.row, targets=("q_proj",), rank=8))
    assert adapters.frozen == sizes.num_parameters
