"""Read a model from its files, one tensor at a time, and the settings of adapters.

`merging.py` reads adapters together with their base model. It imports transformers, which takes seconds and which whole
models do not need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trireme.base.errors import ConfigError
from trireme.config.model.folder import config_file, quantization_of, read_config
from trireme.config.model.weights import WEIGHTS
from trireme.messages import TensorSpec
from trireme.transport.weights.published_files import PublishedFiles

WHOLE, INDEX = WEIGHTS
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Shapes = dict[str, tuple[int, ...]]

_COMPUTED = ("rotary_emb.inv_freq", "position_ids")
"""Buffers that some files hold and others leave to the model."""


@dataclass(frozen=True)
class Source:
    """A model as it can be read from files, one tensor at a time."""

    specs: list[TensorSpec]
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    folder: Path | None = None  # folder in which an engine can read the same tensors itself

    @property
    def shapes(self) -> Shapes:
        return {spec.name: tuple(spec.shape) for spec in self.specs}


def has_adapters(folder: Path) -> bool:
    """Return whether a folder holds adapters in PEFT's form, not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def open_model(folder: Path) -> Source:
    """Read the headers of a model as Hugging Face has it. Low-bit weights are those that they mean."""
    # several files have an index, a single one has none
    index = folder / INDEX
    try:
        parts = json.loads(index.read_text())["weight_map"].values() if index.is_file() else [WHOLE]
        paths = [folder / name for name in sorted(set(parts))]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{index} is damaged: {error!r} - expected the list of a model's files. Copy the folder again."
        ) from None
    quantization = quantization_of(read_config(str(folder)))
    files = open_files(paths, quantization)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, files.read(name, ()).contiguous()) for name in files.shapes)

    # an engine that reads the folder itself would also read files that the index does not name
    is_all = sorted(folder.glob("*.safetensors")) == sorted(paths)
    return Source(files.specs(), tensors, folder.resolve() if is_all and not quantization else None)


def require_readable(folder: Path) -> None:
    """Read headers. Raises: ConfigError if files are missing or damaged."""
    if has_adapters(folder):
        read_settings(folder)
        open_files([folder / ADAPTER_WEIGHTS])
    else:
        open_model(folder)


def find_model(name: str) -> Path | None:
    """Return the folder with a model's weights on this machine: `name` itself, or downloaded files of a hub name."""
    config = None if Path(name).is_dir() else config_file(name)
    folder = config.parent if config else Path(name)
    return folder if any((folder / name).is_file() for name in WEIGHTS) else None


def shape_difference(expected: Shapes, found: Shapes) -> str | None:
    """Return the first difference that matters. A head that is the embedding too may be in one of two files only."""
    tied = {"lm_head.weight"} if "lm_head.weight" not in expected or "lm_head.weight" not in found else set()
    # buffers that can be computed may be in either file
    for name, shape in expected.items():
        if name not in found and name not in tied and not name.endswith(_COMPUTED):
            return f"{name} is missing"
        if found.get(name, shape) != shape:
            return f"{name} has shape {list(found[name])}, expected {list(shape)}"
    extra = [name for name in found if name not in expected and name not in tied and not name.endswith(_COMPUTED)]
    return f"{extra[0]} is no tensor of it" if extra else None


def open_files(paths: list[Path], quantization: dict[str, Any] | None = None) -> PublishedFiles:
    """Raises: ConfigError if one is no whole safetensors file."""
    for path in paths:
        try:
            with safe_open(path, framework="pt"):
                pass
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is missing - expected the weights there. Copy them again, or leave its step out."
            ) from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is damaged: {error} - expected a whole safetensors file. Make it again (`trireme export RUN "
                "--step N --to FOLDER`) or copy it again, or leave its step out: `--steps`."
            ) from None
    return PublishedFiles(paths, quantization)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json`. Raises: ConfigError if it is damaged."""
    path = folder / ADAPTER_CONFIG
    try:
        settings: dict[str, Any] = json.loads(path.read_text())
        needed = ("r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "base_model_name_or_path")
        missing = [key for key in needed if key not in settings]
    except (ValueError, OSError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error} - expected what PEFT writes. Copy the folder again.") from None
    if missing:
        raise ConfigError(
            f"{path} does not say {', '.join(missing)} - expected what PEFT writes. Copy the folder again."
        )
    return settings
