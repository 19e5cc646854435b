"""Loading a sharded model: each rank reads, or draws at random, the parts that it holds and never the whole model.

A model is built on meta, without memory. `ModelTensors` records where its tensors are before adapters and sharding
change the model, so that they are found afterwards.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from trireme.base.errors import ConfigError
from trireme.config.model.folder import quantization_of, read_config
from trireme.config.model.weights import find_weights, not_finite
from trireme.trainer.model.hub_names import sources_of
from trireme.trainer.model.layouts import Region, TensorLayout
from trireme.trainer.parallel.shards import Shard, shard_of
from trireme.transport.weights.published_files import PublishedFiles

PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
READ_BYTES = 64 << 20  # read at once: the memory that loading needs besides the model itself


def find_files(name: str) -> PublishedFiles:
    """Open the files of a folder, or of a hub name after downloading them.

    Raises:
        ConfigError: there are none, several sets could be meant, they are damaged, or the hub cannot be reached.
    """
    # A folder is checked here, as its errors can say more than those of transformers.
    if Path(name).is_dir():
        find_weights(Path(name))

    options, low_bit = {"_raise_exceptions_for_missing_entries": False}, quantization_of(read_config(name))
    try:
        # A large model has an index of several files, a small one a single file.
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


class Step(NamedTuple):
    """One step of what transformers does to initialize a new model."""

    module: torch.nn.Module
    owner: PreTrainedModel | None  # the model whose rules initialize the module; None for the module's constructor

    def is_done(self) -> bool:
        """Return whether the module has tensors of its own, and all of them are marked as initialized."""
        own = [each for held in (self.module._parameters, self.module._buffers) for each in held.values()]
        own = [tensor for tensor in own if tensor is not None]
        return bool(own) and all(getattr(tensor, "_is_hf_initialized", False) for tensor in own)

    def take(self) -> None:
        """Initialize the module, except for tensors that are marked as initialized."""
        if self.owner is None:
            self.module.reset_parameters()
        else:
            self.owner._initialize_weights(self.module, self.owner.is_custom_code())


class ModelTensors:
    """The places of a model's tensors, recorded before adapters and sharding change the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tied = dict(model.all_tied_weights_keys)  # name -> name of the tensor that it is tied to
        self._steps = list(dict.fromkeys(_steps(model)))
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
        """Fill every tensor from files, by what `find_layouts` found. Buffers that no file holds get the values that
        the model computes.

        Raises:
            ConfigError: a parameter has a value that is not finite, or two tensors of the files differ that are one in
                the model.
        """
        for name in self.names:
            # A part at a time, so that loading needs little memory besides the model.
            if name in layouts and name not in self.tied:
                tensor = self.tensor(name)
                for region, part in _rows(shard_of(tensor)):
                    layouts[name].at(region).read_into(part, files.read)
                    if isinstance(tensor, torch.nn.Parameter) and not _is_finite(part):
                        raise ConfigError(not_finite(name, f"the model's files, read as {part.dtype},"))
                tensor._is_hf_initialized = True  # the mark by which transformers knows loaded tensors

        # Tied tensors are one in the model. A file with two different ones would lose one of them.
        for name, other in self.tied.items():
            rows = _rows(shard_of(self.tensor(name))) if name in layouts else ()
            if not all(torch.equal(layouts[name].at(at).tensor(files.read).to(part), part) for at, part in rows):
                raise ConfigError(
                    f"The weights hold {name} and {other}, which differ, and `tie_word_embeddings` in config.json says "
                    "that they are one - expected them to agree. Set it to false there if both are meant."
                )

        # All tensors from files are marked as initialized, so this computes the other buffers only. Modules that have
        # all of theirs are left out: some rules write into a part of a tensor, which its mark does not prevent (Zaya)
        # and which is not possible for a sharded one (Hy 4).
        with guard_torch_init_functions():
            for step in self._steps:
                if step.owner is not None and not step.is_done():
                    step.take()

    @torch.no_grad()
    def draw(self) -> None:
        """Initialize at random from torch's global generator, module by module, each one whole for a moment.

        The values are those of `AutoModelForCausalLM.from_config`, on any number of ranks. Exception: if the rules
        of a module change modules within it, as GPT-2's scale some weights down, the inner modules' own rules win.
        Inner modules without rules, such as the routers of Qwen3-Next, are drawn with the module around them.
        """
        tied = {self._held[name] for name in self.tied}
        for name in self.names:
            if isinstance(tensor := self.tensor(name), torch.nn.Parameter):
                tensor._is_hf_initialized = True  # it is drawn on a whole tensor below
        undrawn: dict[torch.nn.Module, list[str]] = {}  # parameters without rules so far
        with guard_torch_init_functions():
            for step in self._steps:
                parameters = [name for name, tensor in step.module._parameters.items() if tensor is not None]
                drawn = [name for name in parameters if step.owner is not None and (step.module, name) not in tied]

                # The step gets whole parameters: its module's, and those of inner modules that no rule has drawn yet.
                around = set(step.module.modules())
                lent = {step.module: drawn} | {each: undrawn.pop(each) for each in [*undrawn] if each in around}
                with ExitStack() as stack:
                    for module, names in lent.items():
                        held = parameters if module is step.module else names
                        stack.enter_context(_whole_parameters(module, held, kept=names))
                    step.take()
                    # NaN shows what the rules left out: a module around this one may draw it.
                    for module, names in lent.items():
                        if left := [name for name in names if module._parameters[name].isnan().any()]:
                            undrawn[module] = left

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
    # Checkpoints may hold a tied pair under either of its names.
    for tied, other in places.tied.items():
        if other not in layouts and tied in layouts:
            layouts[other] = layouts.pop(tied)

    # Some models say which tensors their checkpoints may lack.
    optional = model._keys_to_ignore_on_load_missing or ()
    missing = [key for key in places.names if key not in layouts and key not in places.tied]
    missing = [key for key in missing if not any(re.search(pattern, key) for pattern in optional)]

    misshaped = [
        f"{key} ({list(laid.shape)} for {list(places.tensor(key).shape)})"
        for key, laid in layouts.items()
        if laid.shape != places.tensor(key).shape
    ]

    # All faults are listed at once, as they have one cause: files of another model.
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


def _steps(module: torch.nn.Module, owner: PreTrainedModel | None = None) -> Iterator[Step]:
    """Yield steps in the order of constructors: children first, and a model inside the model once it is complete."""
    inner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        yield from _steps(child, inner)
    if hasattr(module, "reset_parameters"):
        yield Step(module, None)
    if isinstance(module, PreTrainedModel):
        yield from (Step(part, part_owner) for part, part_owner in _in_order(module, module))


def _in_order(module: torch.nn.Module, owner: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, PreTrainedModel]]:
    for child in module.children():
        yield from _in_order(child, child if isinstance(child, PreTrainedModel) else owner)
    yield module, owner


@contextmanager
def _whole_parameters(module: torch.nn.Module, names: list[str], *, kept: list[str]) -> Iterator[None]:
    """Lend the module whole parameters on CPU, all NaN. Afterwards copy this rank's part of those in `kept`."""
    held = {name: module._parameters[name] for name in names}

    # Values that a rule does not draw stay NaN and are noticed.
    for name, tensor in held.items():
        whole = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)  # until it is drawn
        module._parameters[name] = torch.nn.Parameter(whole, requires_grad=False)
    try:
        yield
        for name in kept:
            shard = shard_of(held[name])
            shard.tensor.copy_(module._parameters[name][shard.region])
    finally:
        module._parameters.update(held)


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, at the speed of memory: so is their sum, unless it overflows."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


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
