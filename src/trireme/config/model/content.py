"""Digests of what a model's folder holds: a resumed run must find the same content, in whatever folder.

Nothing is imported for this but the standard library. The weights of a model of up to `READ_WHOLE` bytes are read
whole; of a larger one the beginning, the middle and the end of each tensor, in which training leaves its traces.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.model.folder import config_file
from trireme.config.model.weights import find_weights, read_header

READ_WHOLE = 1 << 30
PART = 1 << 16  # bytes at each of three places of a tensor of a larger model
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a config.json that say nothing about what the model computes in a run."""
TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")

Content = dict[str, str]
"""Digests of `weights`, `config.json`, `tokenizer` and `chat template`, of those that are on this disk."""


def content_of(model: str, tokenizer: str, *, from_scratch: bool = False) -> Content:
    """Return the digests of a model and its tokenizer. A file that cannot be read is left to those who load it.

    Args:
        from_scratch: the run starts from random weights, so those in the folder are not read.
    """
    parts = {
        "weights": None if from_scratch else _digest_of_weights(model),
        "config.json": _digest_of_json(model, "config.json", without=VOLATILE),
        "tokenizer": _digest_of_tokenizer(tokenizer),
        "chat template": _digest_of_template(tokenizer),
    }
    return {name: digest for name, digest in parts.items() if digest is not None}


def _digest_of_weights(model: str) -> str | None:
    """Return a digest of names, types, shapes and values, however they are split into files."""
    described = config_file(model)
    try:
        files = find_weights(described.parent) if described else []
        stats = [file.stat() for file in files]
        reads_all = sum(stat.st_size for stat in stats) <= READ_WHOLE
        lines = [
            line
            for file, stat in zip(files, stats, strict=True)
            for line in _lines(file, stat.st_size, stat.st_mtime_ns, reads_all)
        ]
    except (OSError, ConfigError):  # others report it
        return None
    return _digest("\n".join(sorted(lines)).encode()) if lines else None


@lru_cache(maxsize=256)
def _lines(path: Path, size: int, changed_ns: int, reads_all: bool) -> tuple[str, ...]:
    """Return a line for each tensor of a safetensors file, which is read again once it has changed."""
    found = []
    with open(path, "rb") as file:
        for name, tensor in read_header(path).items():
            begin, end = tensor.begin, tensor.end
            digest = hashlib.sha256()
            # Training leaves traces all over a tensor, so three places tell two large models apart.
            places = (begin, (begin + end) // 2, max(begin, end - PART))
            for start, stop in ((begin, end),) if reads_all else ((at, min(end, at + PART)) for at in places):
                file.seek(start)
                # In parts of 16 MiB, as a whole tensor may not fit into memory.
                while start < stop and (part := file.read(min(1 << 24, stop - start))):
                    digest.update(part)
                    start += len(part)
            found.append(f"{name} {tensor.dtype} {list(tensor.shape)} {digest.hexdigest()}")
    return tuple(found)


def _digest_of_tokenizer(tokenizer: str) -> str | None:
    # How rows are padded or cut is a setting of the last program that used the tokenizer.
    if digest := _digest_of_json(tokenizer, TOKENIZERS[0], without=("padding", "truncation")):
        return digest
    found = [path for name in TOKENIZERS[1:] if (path := config_file(tokenizer, name))]
    return _digest(b"".join(path.read_bytes() for path in found)) if found else None


def _digest_of_template(tokenizer: str) -> str | None:
    """Return a digest of the templates, and of the special tokens that they are given."""
    described = _read_json(tokenizer, "tokenizer_config.json")
    parts: list[Any] = [
        [name, path.read_text(errors="replace")] for name in TEMPLATES if (path := config_file(tokenizer, name))
    ]
    parts += [
        [key, value] for key, value in sorted(described.items()) if key == "chat_template" or key.endswith("_token")
    ]
    parts += sorted(_read_json(tokenizer, "special_tokens_map.json").items())
    return _digest(json.dumps(parts).encode()) if parts else None


def _digest_of_json(name: str, file: str, *, without: tuple[str, ...]) -> str | None:
    table = _read_json(name, file)
    kept = {key: value for key, value in table.items() if key not in without}
    return _digest(json.dumps(kept, sort_keys=True).encode()) if table else None


def _read_json(name: str, file: str) -> dict[str, Any]:
    path = config_file(name, file)
    try:
        table = json.loads(path.read_bytes()) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
