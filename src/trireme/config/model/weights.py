"""Look at a model's safetensors files by their headers: which of them are meant, whether they are whole, and how many
tokens they have room for. The values are read to find those that are not finite."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trireme.base.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (SINGLE, INDEX)

CHUNK = 4 << 20  # bytes that are looked at together: few enough for a processor's cache
QUICK_BYTES = 2 << 30
"""Weights that are looked at before a run starts, which takes 2 s; those of larger models when they are loaded."""

_INFINITE = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7, "F8_E5M2": 0x1F << 2}
"""Bits of the exponent, which are all set in infinities and NaN."""

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings?)\.weight$")
_OTHER_EMBEDDING = re.compile(r"vision|visual|image|audio|speech|position")

AGAIN = "Copy or download the model again."


class Tensor(NamedTuple):
    file: Path
    dtype: str  # a name of safetensors: "BF16"
    shape: tuple[int, ...]
    begin: int  # offset in the file, in bytes
    end: int


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file. Raises: ConfigError if the file is no safetensors file, or cut off."""
    try:
        # Eight bytes with the header's length, the header as JSON, then the values. Offsets count from the header's
        # end.
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError("it does not begin with the length of its header")
            header = json.loads(opened.read(length))

        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(file, each["dtype"], tuple(each["shape"]), *(8 + length + at for at in each["data_offsets"]))
            for name, each in header.items()
        }

        # A download that was cut off has a whole header, and too few bytes after it.
        if (end := max((tensor.end for tensor in tensors.values()), default=8 + length)) > size:
            raise ValueError(f"it has {size} bytes of {end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}), so it is missing, cut off or a pointer of Git LFS - expected "
            f"safetensors as Hugging Face writes them. {AGAIN}"
        ) from error
    return tensors


def find_weights(folder: Path) -> list[Path]:
    """Return the files of the weights that are meant, which are all there; none if there are none.

    Files in other formats (`consolidated.safetensors`, `*.bin`) are left alone: neither trainer nor transformers reads
    them if these are there.

    Raises: ConfigError if several sets could be meant, or a part of one is missing.
    """
    single, index = folder / SINGLE, folder / INDEX

    # An index names the files of its set. A single file next to it would be another set.
    named = _files_of_index(index) if index.exists() else []
    if single.exists() and named and named != [SINGLE]:
        raise _ambiguous(folder, INDEX, f"{named[0]} and others" if len(named) > 1 else named[0])
    if missing := [name for name in named if not (folder / name).exists()]:
        raise ConfigError(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(named)} files are missing) - "
            f"expected all files that it names. {AGAIN}"
        )
    if named:
        return [folder / name for name in named]

    others = sorted(file for file in folder.glob("*.safetensors") if file != single)
    if not single.exists():
        if shards := [file for file in others if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file.name)]:
            raise ConfigError(
                f"{folder} has {shards[0].name} and no {INDEX} - expected the list of its {len(shards)} files with "
                f"them. {AGAIN}"
            )
        return []

    # Engines read every file if there is no index, so another one must not hold the same tensors.
    tensors = read_header(single).keys()
    for file in others:
        if not tensors.isdisjoint(_names_in(file)):
            raise _ambiguous(folder, file.name, "other values for the same tensors")
    return [single]


def _files_of_index(index: Path) -> list[str]:
    try:
        return sorted({*json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read ({error}) - expected a `weight_map`. {AGAIN}") from error


def _names_in(file: Path) -> set[str]:
    try:
        return {*read_header(file)}
    except ConfigError:  # it may be anything
        return set()


def _ambiguous(folder: Path, other: str, holds: str) -> ConfigError:
    return ConfigError(
        f"{folder} has two sets of weights: {SINGLE}, and {other} ({holds}) - expected one, as only one can be meant, "
        f"and programs differ in which they read. Move {SINGLE} or the other files out of the folder."
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model's files. Raises: ConfigError, see `find_weights` and `read_header`."""
    return {name: tensor for file in find_weights(folder) for name, tensor in read_header(file).items()}


def embedding_rows(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the number of tokens that a model has room for; None if no tensor looks like its embedding."""
    rows = [
        tensor.shape[0]
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and _EMBEDDING.search(name) and not _OTHER_EMBEDDING.search(name)
    ]
    return min(rows, default=None)


def rows_of(folder: Path, config: Mapping[str, Any], *, reads: bool = True) -> int | None:
    """Return the number of tokens that a model has room for: by its weights, or else by its config.json.

    Args:
        reads: whether the weights are those of the run; it may begin with random ones.
    """
    try:
        rows = embedding_rows(read_tensors(folder)) if reads else None
    except ConfigError:  # other checks report it
        rows = None
    said = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return rows or (said if isinstance(said, int) else None)


def weights_problems(folder: Path, *, most_bytes: int | None = QUICK_BYTES) -> Iterator[str]:
    """Yield what is wrong with a model's weights.

    Args:
        most_bytes: values are looked at only if they take no more than this.
    """
    try:
        tensors = read_tensors(folder)
    except ConfigError as error:
        yield str(error)
        return
    size = sum(tensor.end - tensor.begin for tensor in tensors.values())
    if most_bytes is not None and size > most_bytes:
        return

    # Masks may hold infinities by design.
    if odd := next((name for name, tensor in tensors.items() if "mask" not in name and not _is_finite(tensor)), None):
        yield not_finite(odd, tensors[odd].file)


def not_finite(tensor: str, where: Path | str) -> str:
    """Return the message about a tensor that spoils everything that is computed with it."""
    return (
        f"{tensor} in {where} holds values that are not finite (infinite or NaN) - expected a number in each place. "
        "Copy the model again, or take an earlier export."
    )


def _is_finite(tensor: Tensor) -> bool:
    import numpy as np  # 0.1 s that no import of this module should take

    bits = _INFINITE.get(tensor.dtype)
    if bits is None or tensor.begin == tensor.end:
        return True

    # Infinities and NaN have all bits of the exponent set. The file is mapped and read in chunks, as it may not fit
    # into memory.
    width = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E5M2": 1}[tensor.dtype]
    kind = np.dtype(f"<u{width}")
    values = np.memmap(tensor.file, np.uint8, "r")[tensor.begin : tensor.end].view(kind)
    step = CHUNK // width
    return all(
        int(np.bitwise_and(values[at : at + step], kind.type(bits)).max()) < bits for at in range(0, len(values), step)
    )
