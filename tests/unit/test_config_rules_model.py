"""What a model cannot be trained with is refused before anything starts, for `rl` and `sft` alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config import rules_model
from trireme.config.load import load_config, load_run_config
from trireme.config.resolve import resolve, resolve_sft
from trireme.config.rules import check, check_sft, launch_problems
from trireme.config.rules_model import model_launch_problems, model_problems
from trireme.config.sft import SftConfig
from trireme.config.trainer import TrainerModel

TABLE = "trainer.model"
CPU = Devices(cores=4)


def problems(ranks: int, **settings: Any) -> str:
    return "\n".join(model_problems(TABLE, TrainerModel(**settings), ranks))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model, as far as can be seen without reading its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    describe(folder)
    return folder


def describe(folder: Path, **changes: Any) -> None:
    config = {"model_type": "qwen3", "num_attention_heads": 4, "architectures": ["Qwen3ForCausalLM"]} | changes
    (folder / "config.json").write_text(json.dumps(config))


def found(folder: Path, *, device: str = "cpu", **settings: Any) -> str:
    return "\n".join(model_launch_problems(TABLE, TrainerModel(name=str(folder), **settings), device))


@pytest.mark.parametrize("key", ["dp_replicate", "cp"])
def test_ranks_can_be_split_evenly(key: str) -> None:
    assert problems(8, **{key: 4}) == ""
    assert f"trainer.model.{key} = 3 with 8 ranks - expected a divisor of their number: 1, 2, 4, 8" in problems(
        8, **{key: 3}
    )


def test_flash_attention_has_no_float32() -> None:
    assert 'Set `trainer.model.optimization_dtype = "bfloat16"`' in problems(1, attn="flash_attention_2")
    assert problems(1, attn="flash_attention_2", optimization_dtype="bfloat16") == ""


def test_ranks_share_no_row_with_eager_attention() -> None:
    assert '`trainer.model.attn = "sdpa"`' in problems(2, attn="eager", cp=2)


def test_a_model_that_can_be_trained_is_not_objected_to(folder: Path) -> None:
    assert found(folder) == ""


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "phi3", "glm4_moe"]
)
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_known_families_are_known(folder: Path, kind: str, attention: str) -> None:
    describe(folder, model_type=kind)
    assert found(folder, attn=attention) == ""


def test_weights_are_safetensors_unless_none_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    assert "has neither model.safetensors nor model.safetensors.index.json" in found(folder)
    assert found(folder, from_scratch=True) == ""
    (folder / "model.safetensors.index.json").touch()
    assert found(folder) == ""


def test_quantized_weights_are_refused(folder: Path) -> None:
    describe(folder, quantization_config={"quant_method": "mxfp4"})
    assert "quantized (mxfp4)" in found(folder)


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    describe(folder, model_type="qwen33")
    assert 'no architecture "qwen33"' in found(folder)


def test_code_of_a_model_runs_only_where_that_was_said(folder: Path) -> None:
    describe(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    assert "Set `trainer.model.trust_remote_code = true`" in found(folder).replace("Read it, and set", "Set")
    assert found(folder, trust_remote_code=True) == ""


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next", "falcon_h1"])
def test_models_with_a_state_are_refused(folder: Path, kind: str) -> None:
    describe(folder, model_type=kind)
    assert "samples which are packed into one row would see each other" in found(folder)


def test_an_attention_that_the_model_lacks_is_refused_with_those_it_has(folder: Path) -> None:
    describe(folder, model_type="gpt_oss")
    assert "expected one of eager." in found(folder)
    assert "expected one of flex_attention, eager." in found(folder, device="cuda")
    assert found(folder, attn="eager") == ""


def test_a_row_is_shared_by_as_many_ranks_as_divide_the_heads(folder: Path) -> None:
    assert "has 4 attention heads" in found(folder, cp=3)
    assert found(folder, cp=2) == ""


def test_a_package_that_attention_needs_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"attn": "flash_attention_2", "optimization_dtype": "bfloat16", "device": "cuda"}
    here = {"flash_attn", "transformers"}
    real = rules_model.find_spec
    monkeypatch.setattr(rules_model, "find_spec", lambda name: real("json") if name in here else None)
    assert found(Path("some/model"), **settings) == ""
    here.remove("flash_attn")
    assert "neither the package flash_attn nor kernels is installed" in found(Path("some/model"), **settings)


def test_a_configuration_that_is_no_json_is_said_to_be_none(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "cannot be read" in found(folder)


def test_rl_and_sft_refuse_alike(folder: Path, tmp_path: Path) -> None:
    describe(folder, model_type="qwen33")
    (tmp_path / "data.jsonl").write_text("{}\n")
    argv = ["--orchestrator.env", '[{"id": "x"}]', "--model.name", str(folder), "--trainer.model.cp", "3"]
    config = resolve(load_run_config(argv, program="rl")[0], CPU)
    with pytest.raises(ConfigError, match=r"trainer.model.cp = 3 with 1 ranks"):
        check(config, CPU)
    assert 'no architecture "qwen33"' in "\n".join(launch_problems(config, CPU))
    argv = ["--data", str(tmp_path / "data.jsonl"), "--model.name", str(folder), "--model.cp", "3"]
    sft = resolve_sft(load_config(argv, SftConfig, program="sft")[0], CPU)
    with pytest.raises(ConfigError, match=r'model.cp = 3 with 1 ranks(.|\n)*no architecture "qwen33"'):
        check_sft(sft, CPU)
