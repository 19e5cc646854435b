"""Adapters in files, as PEFT has them: `adapter_model.safetensors` and `adapter_config.json`.

`PeftModel.from_pretrained`, transformers and vLLM (`--lora-modules`) load such a folder beside the base model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from transformers import PreTrainedModel

from trireme.messages import TensorSpec
from trireme.trainer.checkpoint.export_layout import Layout
from trireme.trainer.model.layouts import identity_layout
from trireme.trainer.model.lora import Adapters, peft_name, to_peft, trained_tensors

TRAINED_WITH = "trained_with.json"
"""Beside PEFT's files, which have no place for it."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_layout(model: PreTrainedModel) -> Layout:
    """All that is trained, in the precision in which it is."""
    trained = {name: tuple(tensor.shape) for name, tensor in trained_tensors(model).items()}
    return Layout(
        tuple(TensorSpec(name=peft_name(name), dtype="float32", shape=list(shape)) for name, shape in trained.items()),
        tuple(identity_layout(name, shape) for name, shape in trained.items()),
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


MAX_FILE_BYTES = 5 * 10**9
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Specs = Sequence[TensorSpec]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def num_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(_size(spec) for spec in specs)


def write_model(
    folder: Path,
    specs: Specs,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """
    Args:
        tensors: exactly those of `specs`, in their order; each is let go of before the next is asked for.
        max_file_bytes: of a file's tensors; a larger tensor has a file of its own.
    """
    files = split(specs, max_file_bytes)
    coming = iter(tensors)
    for name, part in files.items():
        with open(folder / name, "wb") as file:
            _write_header(file, part)
            for spec in part:
                _write_tensor(file, spec, coming)
    assert next(coming, None) is None, "more tensors than were announced"
    if len(files) > 1:
        _write_index(folder / INDEX, files)


def split(specs: Specs, max_file_bytes: int) -> dict[str, list[TensorSpec]]:
    """By file, in order."""
    parts: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if parts[-1] and num_bytes(parts[-1]) + _size(spec) > max_file_bytes:
            parts.append([])
        parts[-1].append(spec)
    if len(parts) == 1:
        return {WHOLE: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _write_header(file: IO[bytes], specs: Specs) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + _size(spec)
        header[spec.name] = {"dtype": _DTYPES[_dtype(spec)], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file, and want numbers where they can be loaded from
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(file: IO[bytes], spec: TensorSpec, coming: Iterator[tuple[str, torch.Tensor]]) -> None:
    name, tensor = next(coming)
    found = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
    assert found == (spec.name, spec.dtype, list(spec.shape)), f"{found} came where {spec} was announced"
    file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _write_index(path: Path, files: Mapping[str, Specs]) -> None:
    total = sum(num_bytes(part) for part in files.values())
    places = {spec.name: name for name, part in files.items() for spec in part}
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")


def _size(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * _dtype(spec).itemsize


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype
