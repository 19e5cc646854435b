"""Low-bit weights become the bfloat16 values that they mean, and are plain weights from then on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moe
from families import build_config
from low_bit import LOW_BIT, save_low_bit
from tiny import are_equal, save_run, weights_of
from trireme.base.errors import ConfigError
from trireme.config.trainer import Lora, Optimizer, TrainerModel
from trireme.tools.export.merging import export_merged
from trireme.tools.export.weights_folder import open_source
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.served_weights import served_tensors
from trireme.transport.weights.published_files import PublishedFiles

CONFIGS = [build_config(kind, **changes) for kind, changes in LOW_BIT.items()]
CONFIGS += [build_config("qwen3", intermediate_size=300), moe.build_config("deepseek_v3", kv_lora_rank=136)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_low_bit_model_is_trained_served_and_exported_as_a_plain_one(
    config: PretrainedConfig, tiny_model: Path, tmp_path: Path, world: World
) -> None:
    folder = tmp_path / "model"
    meant = save_low_bit(folder, config, tiny_model)
    model = load_model(TrainerModel(attn="eager"), str(folder), world)
    assert are_equal(dict(served_tensors(model, torch.float32)), {name: each.float() for name, each in meant.items()})
    assert {each.dtype for each in model.parameters()} == {torch.float32}  # experts too
    assert are_equal(dict(open_source(folder, base=None, dtype="bfloat16").tensors()), meant)
    save_run(tmp_path / "run", TrainerState(model, build_optimizer(model, Optimizer())), folder, world)
    export = tmp_path / "run" / "weights" / "step_0"
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    assert are_equal(weights_of(AutoModelForCausalLM.from_pretrained(export)), weights_of(model))


def test_adapters_are_merged_into_the_plain_weights(tiny_model: Path, tmp_path: Path, world: World) -> None:
    folder = tmp_path / "model"
    meant = save_low_bit(folder, build_config("qwen3", intermediate_size=300), tiny_model)
    model = load_model(TrainerModel(lora=Lora(rank=2)), str(folder), world)
    save_run(tmp_path / "run", TrainerState(model, build_optimizer(model, Optimizer())), folder, world)
    export_merged(tmp_path / "run" / "checkpoints" / "step_0", tmp_path / "merged", dtype="bfloat16")
    assert are_equal(dict(open_source(tmp_path / "merged", base=None, dtype="bfloat16").tensors()), meant)


def test_any_region_is_that_of_the_whole_and_scales_may_be_exponents(tmp_path: Path) -> None:
    numbers, path = torch.Generator().manual_seed(1), tmp_path / "model.safetensors"
    blocks = torch.randint(256, (2, 3, 2, 16), generator=numbers, dtype=torch.uint8)
    scales = torch.tensor([0, 1, 2, 100, 126, 127, 128, 129, 130, 200, 253, 254], dtype=torch.uint8).reshape(2, 3, 2)
    save_file({"e_blocks": blocks, "e_scales": scales}, path)
    files = PublishedFiles([path], {"quant_method": "mxfp4"})
    region = (slice(1, 2), slice(5, 64), slice(1, 3))
    assert torch.equal(files.read("e", region), convert_moe_packed_tensors(blocks, scales)[region])
    values = torch.randn(2, 140, 70, generator=numbers).to(torch.float8_e4m3fn)
    exponents, region = scales.transpose(1, 2)[:, :1], (slice(1, 2), slice(33, 135), slice(29, 65))
    for stored in (exponents.contiguous(), torch.exp2(exponents.float() - 127)):
        save_file({"w": values, "w_scale_inv": stored}, path)
        files = PublishedFiles([path], {"quant_method": "fp8", "weight_block_size": [140, 30]})
        whole = values.double() * torch.exp2(exponents.double() - 127).repeat_interleave(30, 2)[..., :70]
        assert torch.equal(files.read("w", region), whole[region].bfloat16())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight": (200, 64)}, r"a.weight as F8_E4M3 without scales .*Take such a copy"),
        ({"a.weight": (200, 64), "a.weight_scale_inv": (1, 1)}, r"a.weight_scale_inv \[1, 1\] .*expected \[2, 1\]"),
    ],
)
def test_values_without_their_scales_are_refused_by_name(tensors: dict, words: str, tmp_path: Path) -> None:
    types = {name: torch.float32 if name.endswith("inv") else torch.float8_e4m3fn for name in tensors}
    save_file({name: torch.ones(shape).to(types[name]) for name, shape in tensors.items()}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=words):
        PublishedFiles([tmp_path / "m.safetensors"], {"quant_method": "fp8", "weight_block_size": [128, 128]})
