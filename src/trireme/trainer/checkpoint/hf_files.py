"""Files in Hugging Face format: a model's safetensors, and adapters as PEFT has them.

`PeftModel.from_pretrained`, transformers and vLLM (`--lora-modules`) load a folder with `adapter_model.safetensors` and
`adapter_config.json` together with the base model.

The layout of an export says which tensors it has, and where the values of each are in a checkpoint of the trainer. It
is written into the checkpoint as JSON, so that an export needs neither the model's code nor a trainer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.messages import TensorSpec
from trireme.trainer.checkpoint.state import MODEL
from trireme.trainer.model.hub_names import hub_names
from trireme.trainer.model.layouts import Part, TensorLayout, identity_layout
from trireme.trainer.model.loading import untrained_of
from trireme.trainer.model.lora import Adapters, peft_name, trained_tensors
from trireme.trainer.parallel.shards import StoredShards
from trireme.transport.weights.buckets import dtype_of, num_bytes, split_into_buckets

TRAINED_WITH = "trained_with.json"  # a file of our own next to PEFT's, which have no field for this
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class LaidTensor(TensorSpec, frozen=True):
    """A tensor of an export, and which parts of the trainer's tensors it consists of."""

    parts: tuple[Part, ...]


Layout: TypeAlias = Sequence[LaidTensor]  # the tensors of an export, in the order in which they are written


def laid_tensor(name: str, dtype: torch.dtype, place: TensorLayout) -> LaidTensor:
    text = str(dtype).removeprefix("torch.")
    return LaidTensor(name=name, dtype=text, shape=list(place.shape), parts=place.parts)


def layout_of(model: PreTrainedModel, dtype: torch.dtype) -> Layout:
    """Return the layout of the whole model under the names of published checkpoints, untrained parts last."""
    names, tensors, untrained = hub_names(model), model.state_dict(keep_vars=True), untrained_of(model)
    trained = [
        laid_tensor(name, dtype if tensors[own].is_floating_point() else tensors[own].dtype, place)
        for own, laid in names.layouts.items()
        for name, place in laid.items()
    ]
    return trained + [
        laid_tensor(spec.name, getattr(torch, spec.dtype), identity_layout(spec.name, spec.shape))
        for spec in untrained.files.specs(untrained.names)
    ]


def adapter_layout(model: PreTrainedModel) -> Layout:
    """Return the layout of all that is trained, in float32."""
    return [
        laid_tensor(peft_name(name), torch.float32, identity_layout(name, tensor.shape))
        for name, tensor in trained_tensors(model).items()
    ]


def read_layout(path: Path) -> Layout:
    """
    Raises:
        JournalCorrupt: the file is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LaidTensor])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalCorrupt(f"{path} is no layout of an export: {error}. Export another step.") from error


def in_dtype(layout: Layout, dtype: str) -> Layout:
    """Return the layout with floating-point tensors in `dtype`; integers keep their type."""
    return [replace(each, dtype=dtype) if dtype_of(each).is_floating_point else each for each in layout]


def stored_tensors(layout: Layout, stored: StoredShards) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an export, one at a time."""
    for each in layout:
        laid = TensorLayout(torch.Size(each.shape), each.parts)
        whole = laid.tensor(lambda name, region: stored.read(f"{MODEL}.{name}", region))
        yield each.name, whole.to(getattr(torch, each.dtype))


def describe_adapters(folder: Path, adapters: Adapters) -> None:
    """Write `adapter_config.json`."""
    settings = copy.copy(adapters.peft)
    settings.inference_mode = True
    base = Path(settings.base_model_name_or_path or "")
    if base.is_dir():  # the folder may be loaded from another working directory
        settings.base_model_name_or_path = str(base.resolve())
    settings.save_pretrained(str(folder))
    (folder / TRAINED_WITH).write_text(json.dumps({"frozen": adapters.frozen}) + "\n")


def require_same_scale(folder: Path, adapters: Adapters | None) -> None:
    """
    Raises:
        ConfigError: the adapters that are described there are multiplied by another number than these.
    """
    path = folder / CONFIG
    if adapters is None or not path.is_file():
        return
    saved = json.loads(path.read_text())
    for key, ours in (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        then, now = saved.get(key), getattr(adapters.peft, key)
        if then != now:
            raise ConfigError(
                f"The adapters in {folder.parent} were trained with `lora.{ours}` = {then}, and it is {now} now - "
                f"expected the same, as adapters are multiplied by a number that follows from it. Set it to {then}."
            )


def frozen_dtype(folder: Path) -> torch.dtype:
    """Return the precision of the base model while its adapters were trained, to which it must be rounded again."""
    path = folder / TRAINED_WITH
    settings = json.loads(path.read_text()) if path.is_file() else {}
    return getattr(torch, settings.get("frozen", "float32"))


MAX_FILE_BYTES = 5 * 10**9
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {  # their names in headers
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_model(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model's tensors to safetensors files, one tensor at a time.

    The format is a length, a JSON header that says where each tensor is, and the tensors' bytes. `safetensors` itself
    takes all tensors of a file at once, which is several gigabytes of a large model.

    Args:
        tensors: exactly those of `specs`, in their order; each is released before the next is asked for.
        max_file_bytes: most bytes of a file's tensors; a larger tensor gets a file of its own.
    """
    # A model of one file has the plain name, and no index.
    parts = split_into_buckets(specs, max_file_bytes)
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    files = dict(zip(names, parts, strict=True)) if len(parts) > 1 else {WHOLE: specs}

    stream = iter(tensors)
    for name, part in files.items():
        with open(folder / name, "wb") as file:
            _write_header(file, part)
            for spec in part:
                tensor_name, tensor = next(stream)
                found = (tensor_name, tensor.dtype, [*tensor.shape])
                assert found == (spec.name, dtype_of(spec), [*spec.shape]), f"{found} came instead of {spec}"
                file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    assert next(stream, None) is None, "more tensors than specs"

    # Readers find a tensor's file by the index.
    if len(files) > 1:
        total = sum(map(num_bytes, specs))
        places = {spec.name: name for name, part in files.items() for spec in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_header(file: IO[bytes], specs: Sequence[TensorSpec]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + num_bytes(spec)
        header[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file and need aligned numbers
    file.write(len(text).to_bytes(8, "little") + text)
