"""The model in Hugging Face format: what `transformers` and vLLM load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoTokenizer, PreTrainedModel

from trireme.base.log import get_logger
from trireme.base.paths import sync_folder
from trireme.trainer.mesh import World
from trireme.trainer.model import full_tensors

log = get_logger("export")


def save_pretrained(
    model: PreTrainedModel, folder: Path, *, tokenizer: str, dtype: torch.dtype, world: World, trust_remote_code: bool
) -> None:
    """A collective; rank 0 writes. The folder appears under its name only when whole."""
    tensors = {name: tensor.cpu() for name, tensor in full_tensors(model, dtype) if world.is_main}
    if world.is_main:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_torch_state_dict(tensors, partial, metadata={"format": "pt"})
        model.config.save_pretrained(partial)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(partial)
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code).save_pretrained(partial)
        _correct_config(partial, dtype, architecture_of(model))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync_folder(folder.parent)
        log.info("weights %s", folder)
    world.barrier()


def architecture_of(model: PreTrainedModel) -> str:
    """The class's own name: FSDP2 puts a subclass of its own in front."""
    return type(model).__name__.removeprefix("FSDP")


def _correct_config(folder: Path, dtype: torch.dtype, architecture: str) -> None:
    """`config.json` describes the saved file, not the model as it was trained."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["use_cache"] = True
    config["architectures"] = [architecture]  # a model built from a configuration alone may not name its own
    path.write_text(json.dumps(config, indent=2) + "\n")
