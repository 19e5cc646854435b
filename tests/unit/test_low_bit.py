"""Low-bit weights become the bfloat16 values that they mean, and are plain weights from then on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

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

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
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


def test_any_region_has_the_values_of_each_byte_and_scale(tmp_path: Path) -> None:
    numbers = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (2, 3, 2, 16), generator=numbers, dtype=torch.uint8)
    scales = torch.tensor([0, 1, 2, 100, 126, 127, 128, 129, 130, 200, 253, 254], dtype=torch.uint8).reshape(2, 3, 2)
    values = torch.randn(2, 140, 70, generator=numbers).to(torch.float8_e4m3fn)
    grid = torch.randint(120, 130, (2, 3, 2), generator=numbers, dtype=torch.uint8)  # exponents, as of some models
    tensors = {"e_blocks": blocks, "e_scales": scales, "w": values, "w_scale_inv": grid}
    save_file(tensors, tmp_path / "model.safetensors")

    def fp4(expert: int, row: int, column: int) -> float:
        byte = int(blocks[expert, column, row // 32, row % 32 // 2])
        nibble = byte >> 4 if row % 2 else byte & 15
        return (-1) ** (nibble >> 3) * FP4[nibble & 7] * 2.0 ** (int(scales[expert, column, row // 32]) - 127)

    def fp8(expert: int, row: int, column: int) -> float:
        return float(values[expert, row, column]) * 2.0 ** (int(grid[expert, row // 64, column // 64]) - 127)

    fp8_of = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    for name, config, value, sizes in (("e", {"quant_method": "mxfp4"}, fp4, (64, 3)), ("w", fp8_of, fp8, (140, 70))):
        stored = {key: each for key, each in tensors.items() if key.startswith(name)}
        save_file(stored, tmp_path / "model.safetensors")
        files = PublishedFiles([tmp_path / "model.safetensors"], config)
        for rows in (slice(0, sizes[0]), slice(33, 35), slice(5, 64)):
            columns = slice(1, sizes[1])
            expected = [
                [value(1, row, column) for column in range(1, sizes[1])] for row in range(rows.start, rows.stop)
            ]
            assert torch.equal(
                files.read(name, (slice(1, 2), rows, columns))[0].double(), torch.tensor(expected).double()
            )


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
