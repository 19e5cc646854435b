"""Adapters in files, as PEFT has them: `adapter_model.safetensors` and `adapter_config.json`.

`PeftModel.from_pretrained`, transformers and vLLM (`--lora-modules`) load such a folder beside the base model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from trireme.messages import TensorSpec
from trireme.trainer.checkpoint.export_layout import Layout
from trireme.trainer.model.layouts import lay
from trireme.trainer.model.lora import Adapters, peft_name, to_peft, trained_tensors
from trireme.trainer.model.model_files import WHOLE

TRAINED_WITH = "trained_with.json"
"""Beside PEFT's files, which have no place for it."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_layout(model: PreTrainedModel) -> Layout:
    """All that is trained, in the precision in which it is."""
    trained = {name: tuple(tensor.shape) for name, tensor in trained_tensors(model).items()}
    return Layout(
        tuple(TensorSpec(name=peft_name(name), dtype="float32", shape=list(shape)) for name, shape in trained.items()),
        tuple(lay(name, shape) for name, shape in trained.items()),
    )


def describe_adapters(folder: Path, adapters: Adapters) -> None:
    """Writes what `adapter_config.json` is to say."""
    settings = to_peft(adapters)
    settings.inference_mode = True
    base = Path(adapters.base_model)
    if base.is_dir():  # whoever loads the adapters may be elsewhere
        settings.base_model_name_or_path = str(base.resolve())
    settings.save_pretrained(str(folder))
    (folder / TRAINED_WITH).write_text(json.dumps({"frozen": adapters.frozen}) + "\n")


def frozen_dtype(folder: Path) -> torch.dtype:
    """What the base model was held in while its adapters were trained: only so rounded is it the model that was."""
    path = folder / TRAINED_WITH
    said = json.loads(path.read_text()) if path.is_file() else {}
    dtype: torch.dtype = getattr(torch, said.get("frozen", "float32"))
    return dtype


def holds_adapters(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def name_as_adapters(folder: Path) -> None:
    """After a folder's tensors were written as those of a model, in one file."""
    (folder / WHOLE).rename(folder / WEIGHTS)
