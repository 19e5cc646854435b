"""Adapters merged into their base model, one tensor at a time: written to a folder, or read to be sent to an engine.

The result has the bits that the trainer sends to engines: each parameter as it was held, plus its adapter's product in
float32, then rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trireme.base.errors import ConfigError
from trireme.config.trainer import Lora, TrainerModel, Vlm
from trireme.messages import TensorSpec
from trireme.tools.export.weights_folder import ADAPTER_WEIGHTS, Source, open_files, read_settings, shape_difference
from trireme.trainer.checkpoint.export import (
    DESCRIPTION,
    copy_description,
    describe_model,
    new_folder,
    require_undamaged,
)
from trireme.trainer.checkpoint.hf_files import CONFIG, TRAINED_WITH, frozen_dtype, write_model
from trireme.trainer.checkpoint.state import MODEL
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.loading import ModelTensors, find_files, find_layouts, untrained_of
from trireme.trainer.model.lora import base_name, inject_adapters, merge, peft_name, products
from trireme.trainer.model.model import build_model
from trireme.trainer.parallel.shards import open_shards, shard_files
from trireme.transport.weights.buckets import num_bytes


def export_merged(
    checkpoint: Path, folder: Path, *, dtype: str, base_model: str | None = None, trust_remote_code: bool = False
) -> None:
    """Write `folder` from a checkpoint of adapters and their base model.

    Args:
        base_model: folder or hub name, if it differs from the one that the adapters name.

    Raises:
        ConfigError: the checkpoint has no adapters, or their base model cannot be loaded.
        JournalCorrupt: the checkpoint is damaged.
        OSError: there is no room.
    """
    require_undamaged(checkpoint)
    if not (checkpoint / DESCRIPTION / CONFIG).is_file():
        raise ConfigError(
            f"{checkpoint} holds a whole model and no adapters - expected some, to merge them. Leave `--merge` out."
        )
    # shapes come from the base model's files and the adapters' settings; values are read one by one
    settings = read_settings(checkpoint / DESCRIPTION)
    merged = Merged(
        settings,
        base_model or settings["base_model_name_or_path"],
        frozen=frozen_dtype(checkpoint / DESCRIPTION),
        trust_remote_code=trust_remote_code,
    )

    specs = merged.specs(dtype)
    with new_folder(folder, room=sum(map(num_bytes, specs))) as partial:
        copy_description(checkpoint, partial, without=(CONFIG, TRAINED_WITH, "README.md"))
        merged.describe(partial, getattr(torch, dtype))
        # the checkpoint's own names of trained tensors, without the prefix that tells them from those of the reference
        with open_shards(shard_files(checkpoint)) as stored:
            prefix = f"{MODEL}."
            names = {name.removeprefix(prefix): name for name in stored.names() if name.startswith(prefix)}
            trained = {own: functools.partial(stored.read_whole, name) for own, name in names.items()}
            write_model(partial, specs, merged.tensors(trained, getattr(torch, dtype)))


def open_merged(folder: Path, *, base: str | None, dtype: str) -> Source:
    """Read the headers of adapters of PEFT's form, and of the base model that they are added into.

    Args:
        base: folder or hub name of the adapters' base model, if it differs from the one that they name.
        dtype: of the merged model.

    Raises: ConfigError if files are missing or damaged, or adapters are for another model.
    """
    settings = read_settings(folder)
    base_model = base or settings["base_model_name_or_path"]
    merged = Merged(settings, base_model, frozen=frozen_dtype(folder), trust_remote_code=False)

    # The adapters' file may leave out modules that are trained as a whole, but no adapter.
    path = folder / ADAPTER_WEIGHTS
    files, shapes = open_files([path]), merged.trained_shapes
    names = {own: peft_name(own) for own in shapes}
    expected = {name: shapes[own] for own, name in names.items() if ".lora_" in own or name in files.shapes}
    if difference := shape_difference(expected, files.shapes):
        raise ConfigError(
            f"{path} does not fit {base_model}: {difference} - expected adapters of this very model. Name the one "
            "that they are for: `--model.base FOLDER`."
        )
    trained = {own: functools.partial(files.read, name, ()) for own, name in names.items() if name in files.shapes}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.contiguous()) for name, tensor in merged.tensors(trained, getattr(torch, dtype)))

    return Source(merged.specs(dtype), tensors)


class Merged:
    """A base model in its files, and the shapes of its adapters. Values are read on demand."""

    def __init__(
        self, settings: dict[str, Any], base_model: str, *, frozen: torch.dtype, trust_remote_code: bool
    ) -> None:
        """Open the base model's files.

        Args:
            frozen: precision in which the base model was held.
        """
        # the model is built without memory: only its structure and shapes are needed
        self._frozen = frozen
        vlm = Vlm() if settings.get("auto_mapping") else None  # see `inject_adapters`
        self._model = build_model(TrainerModel(trust_remote_code=trust_remote_code, vlm=vlm), base_model)
        self._files = find_files(base_model)
        self._laid = find_layouts(ModelTensors(self._model), self._files, base_model)
        self._names = hub_names(self._model)
        self._untrained = untrained_of(self._model)

        lora = Lora(  # the inverse of `inject_adapters`, as far as shapes and scales depend on it
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            target_modules=(*(settings["target_modules"] or ()), *(settings.get("target_parameters") or ())),
            modules_to_save=tuple(settings["modules_to_save"] or ()),
            use_rslora=settings["use_rslora"],
        )
        inject_adapters(self._model, lora, base_model=base_model, seed=0, frozen="float32")
        # adapted layers have other names inside the model; these lead from the files' names to them
        self._own = {base_name(name): name for name in self._model.state_dict()}
        self._products = products(self._model)
        self._parameters = {id(parameter): name for name, parameter in self._model.named_parameters()}

    def specs(self, dtype: str) -> list[TensorSpec]:
        return [
            TensorSpec(name=name, dtype=dtype, shape=list(shape))
            for own in self._exported
            for name, shape in self._names.specs(own)
        ] + self._untrained.files.specs(self._untrained.names)

    @property
    def _exported(self) -> list[str]:
        """Return the exported tensors, without buffers that the base model's files lack."""
        return [name for name in self._names.layouts if name in self._laid]

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes of adapters, and of modules that are trained as a whole, by the model's own names."""
        return {name: tuple(each.shape) for name, each in self._model.named_parameters() if each.requires_grad}

    def tensors(
        self, trained: Mapping[str, Callable[[], torch.Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Args:
            trained: read the tensors that were trained, by the model's own names.
        """
        for own in self._exported:
            if (read := trained.get(self._own[own])) is not None:  # it was trained as a whole
                whole = read()
            else:
                whole = self._laid[own].tensor(self._files.read).to(self._frozen)
            if (product := self._products.get(own)) is not None:
                left, right = (trained[self._parameters[id(each)]]() for each in (product.left, product.right))
                whole = merge(whole, left, right, product)
            yield from self._names.to_hub(own, whole.to(dtype))
        yield from self._untrained.tensors()

    def describe(self, folder: Path, dtype: torch.dtype) -> None:
        describe_model(folder, self._model, dtype)
        self._untrained.describe(folder)
