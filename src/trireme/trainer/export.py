"""The model in Hugging Face format: what `transformers` and vLLM load."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from trireme.base.disk import require_room
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.paths import replace_folder, step_folder, sync_folder
from trireme.trainer.data import open_tokenizer
from trireme.trainer.mesh import World
from trireme.trainer.model import full_tensors
from trireme.trainer.staging import Staging

log = get_logger("export")


class Exporter:
    """Makes `weights/step_N/`, each of which appears under its name only when whole and on disk."""

    def __init__(
        self, folder: Path, world: World, *, tokenizer: str, dtype: torch.dtype, trust_remote_code: bool
    ) -> None:
        """
        Raises:
            ConfigError: the tokenizer cannot be loaded.
        """
        self.folder = folder
        self._world = world
        self._dtype = dtype
        self._staging = Staging(world.device)
        self._tokenizer = open_tokenizer(tokenizer, trust_remote_code) if world.is_main else None

    def gather(self, model: PreTrainedModel, version: int) -> Callable[[], None]:
        """Copies the model; what it returns writes the copy. A collective; only rank 0 copies and writes.

        What is returned may be called in another thread, and again after it failed.
        """
        tensors = {
            name: self._staging.copy(name, tensor)
            for name, tensor in full_tensors(model, self._dtype)
            if self._world.is_main
        }
        self._staging.finish()
        config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
        architecture = architecture_of(model)

        def write() -> None:
            if self._world.is_main:
                self._write(step_folder(self.folder, version), tensors, config, generation, architecture)

        return write

    def _write(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        config: PretrainedConfig,
        generation: GenerationConfig | None,
        architecture: str,
    ) -> None:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            require_room(self.folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
            partial.mkdir(parents=True)
            save_torch_state_dict(tensors, partial, metadata={"format": "pt"})
            config.save_pretrained(partial)
            if generation is not None:
                generation.save_pretrained(partial)
            assert self._tokenizer is not None, "only rank 0 writes"
            self._tokenizer.save_pretrained(partial)
            _correct_config(partial, self._dtype, architecture)
            _sync(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        reach("export.written")
        replace_folder(partial, folder)
        log.info("weights %s", folder)


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


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
