"""A model's tensors in safetensors files as Hugging Face has them, written one tensor at a time.

The format is a length, a header of JSON that says where each tensor lies, and their bytes. It is written here, and not
by `safetensors`, because that takes all tensors of a file at once: of a large model some gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from trireme.messages import TensorSpec

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
