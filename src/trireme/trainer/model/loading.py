"""Loading a sharded model: each rank reads the parts that it holds and never the whole model. A model that begins with
random weights is whole on each rank for a moment, in CPU memory.

A model is built on meta, without memory. `ModelTensors` records where its tensors are before adapters and sharding
change the model, so that they are found afterwards.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from trireme.base.errors import ConfigError
from trireme.config.model.folder import quantization_of, read_config
from trireme.messages import TensorSpec
from trireme.trainer.model.hub_names import sources_of
from trireme.trainer.model.layouts import Region, TensorLayout
from trireme.trainer.parallel.shards import Shard, shard_of
from trireme.transport.weights.published_files import PublishedFiles

PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
READ_BYTES = 64 << 20  # read at once: the memory that loading needs besides the model itself


def find_files(name: str) -> PublishedFiles:
    """Open the files of a folder, or of a hub name after downloading them.

    Raises:
        ConfigError: there are none, they are damaged, or the hub cannot be reached.
    """
    options, low_bit = {"_raise_exceptions_for_missing_entries": False}, quantization_of(read_config(name))
    try:
        if index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **options):
            return PublishedFiles([Path(file) for file in get_checkpoint_shard_files(name, index)[0]], low_bit)
        if single := cached_file(name, SAFE_WEIGHTS_NAME, **options):
            return PublishedFiles([Path(single)], low_bit)
        raise OSError(f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    except (OSError, ValueError, KeyError) as error:
        raise cannot_be_loaded(name, error) from error
    except SafetensorError as error:
        raise ConfigError(
            f"The weights of {name!r} cannot be read: {error} - whole safetensors files were expected. "
            "Copy or download the model again."
        ) from error


def cannot_be_loaded(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"The model {name!r} cannot be loaded: {error}\n"
        "Expected a folder with config.json and safetensors, or a hub name that this machine can reach. "
        "Set `model.name` to one."
    )


class ModelTensors:
    """The places of a model's tensors, recorded before adapters and sharding change the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tied = dict(model.all_tied_weights_keys)  # name -> name of the tensor that it is tied to
        self._modules = list(_modules(model, model))
        self._held = {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in model.named_modules()
            for name in (*module._parameters, *(set(module._buffers) - module._non_persistent_buffers_set))
            if getattr(module, name) is not None
        }

    @property
    def names(self) -> list[str]:
        """The names that checkpoints hold; tied tensors have several."""
        return list(self._held)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor that the model holds now."""
        module, attribute = self._held[name]
        return getattr(module, attribute)

    @torch.no_grad()
    def read(self, layouts: dict[str, TensorLayout], files: PublishedFiles) -> None:
        """Fill every tensor from files. Buffers that no file holds get the values that the model computes.

        Args:
            layouts: what `find_layouts` found.

        Raises:
            ConfigError: two tensors of the files differ that are one in the model.
        """
        for name in self.names:
            if name in layouts and name not in self.tied:
                tensor = self.tensor(name)
                for region, part in _rows(shard_of(tensor)):
                    layouts[name].at(region).read_into(part, files.read)
                tensor._is_hf_initialized = True  # as transformers marks it
        for name, other in self.tied.items():
            rows = _rows(shard_of(self.tensor(name))) if name in layouts else ()
            if not all(torch.equal(layouts[name].at(at).tensor(files.read).to(part), part) for at, part in rows):
                raise ConfigError(
                    f"The weights hold {name} and {other}, which differ, and `tie_word_embeddings` in config.json says "
                    "that they are one - expected them to agree. Set it to false there if both are meant."
                )
        self._compute_others()

    @torch.no_grad()
    def draw(self, whole: PreTrainedModel) -> None:
        """Fill every tensor with this rank's part of the same tensor of a whole model with random weights."""
        values = whole.state_dict()
        for name in self.names:
            tensor = self.tensor(name)
            shard = shard_of(tensor)
            shard.tensor.copy_(values[name][shard.region])
            tensor._is_hf_initialized = True
        self._compute_others()

    def _compute_others(self) -> None:
        """Give buffers that no checkpoint holds the values that the model computes."""
        with guard_torch_init_functions():  # which leave alone what is marked as initialized
            for module, owner in self._modules:
                owner._initialize_weights(module, owner.is_custom_code())

    def require_values(self) -> None:
        """Check that every buffer has values.

        Raises:
            ConfigError: the model's own code does not compute some buffer.
        """
        forgotten = [name for name, buffer in self.model.named_buffers() if bool(buffer.isnan().any())]
        if forgotten:
            raise ConfigError(
                f"{type(self.model).__name__}: no file has values for {_some(forgotten)} - expected "
                "`_init_weights` of the model to compute them. Choose a model that transformers itself has."
            )


@dataclass(frozen=True)
class Untrained:
    """Parts of a checkpoint that the model leaves out. Exports contain them to the bit."""

    files: PublishedFiles
    names: list[str]
    processors: list[Path]  # files that describe how pictures are read

    def describe(self, folder: Path) -> None:
        """Copy the files of processors into a folder."""
        for file in self.processors:
            shutil.copyfile(file, folder / file.name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them, one at a time."""
        return ((name, self.files.read(name, ())) for name in self.names)

    def specs(self) -> list[TensorSpec]:
        """Return the specs of `tensors`."""
        return self.files.specs(self.names)


def processor_files(name: str) -> list[Path]:
    """Return the files of a model that describe how pictures are read."""
    found = (cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in PROCESSORS)
    return [Path(file) for file in found if file]


def untrained_of(model: PreTrainedModel) -> Untrained:
    """Return what `find_layouts` recorded; for a model with random weights, at most files of processors."""
    return getattr(model, "trireme_untrained", Untrained(PublishedFiles([]), [], []))


def find_layouts(places: ModelTensors, files: PublishedFiles, name: str) -> dict[str, TensorLayout]:
    """Find each tensor of a model in its files. Records in the model what else they hold.

    Raises:
        ConfigError: the files lack tensors of the model, hold others, or have them in other shapes.
    """
    model = places.model
    sources = sources_of(model, files.shapes)
    model.trireme_untrained = Untrained(files, sources.untrained, processor_files(name))
    layouts = dict(sources.layouts)
    for tied, other in places.tied.items():
        if other not in layouts and tied in layouts:
            layouts[other] = layouts.pop(tied)
    optional = model._keys_to_ignore_on_load_missing or ()
    missing = [key for key in places.names if key not in layouts and key not in places.tied]
    missing = [key for key in missing if not any(re.search(pattern, key) for pattern in optional)]
    misshaped = [
        f"{key} ({list(laid.shape)} for {list(places.tensor(key).shape)})"
        for key, laid in layouts.items()
        if laid.shape != places.tensor(key).shape
    ]
    faults = {"missing": missing, "without a place in the model": sources.unexpected, "of another shape": misshaped}
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise ConfigError(
            f"The weights of {name!r} are not those of {type(model).__name__}, which its config.json describes. "
            f"{listed} - expected every tensor of the model, and no other. "
            "Set `model.name` to a folder whose config.json and safetensors belong together."
        )
    return layouts


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _modules(module: torch.nn.Module, owner: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, PreTrainedModel]]:
    """Yield all modules, each with the model whose rules initialize it: children first, as transformers does."""
    for child in module.children():
        yield from _modules(child, child if isinstance(child, PreTrainedModel) else owner)
    yield module, owner


def _rows(piece: Shard) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield a shard in parts of some MiB: the region of each in the whole tensor, and its memory."""
    if not piece.shape:
        yield (), piece.tensor
    elif piece.tensor.numel():
        first, *others = piece.region
        step = max(1, READ_BYTES // (piece.tensor[0].numel() * piece.tensor.element_size()))
        for begin in range(first.start, first.stop, step):
            end = min(begin + step, first.stop)
            yield (slice(begin, end), *others), piece.tensor[begin - first.start : end - first.start]
