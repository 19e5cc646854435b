"""Where conversations are read from: files, folders, programs and hubs, one entry after the other."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.rules_sft import data_files, is_on_a_hub
from trireme.config.sft import Source
from trireme.trainer.sft.conversations import Completion, Conversation, to_conversation

Entry = tuple[str, Any]  # where it stands, and what it says


def read_conversations(source: Source) -> Iterator[Conversation | Completion]:
    """In the order in which they stand there.

    Raises:
        ConfigError: names the file and line that is no conversation, or says that there is none.
    """
    is_empty = True
    for where, entry in _entries(source):
        is_empty = False
        yield to_conversation(entry, where)
    if is_empty:
        raise ConfigError(f"{source.data} holds no conversation - at least one was expected. Set `data` to another.")


def _entries(source: Source) -> Iterator[Entry]:
    if is_on_a_hub(source.data):
        yield from _from_hub(source)
        return
    path = Path(source.data)
    files = data_files(path) if path.is_dir() else [path]
    if not files or not path.exists():
        raise ConfigError(f"{path} does not exist, or holds no data - conversations were expected. Set `data`.")
    for file in files:
        read = _READERS.get(file.suffix, _from_lines)
        yield from read(file)


def _from_lines(file: Path) -> Iterator[Entry]:
    """Lines end at a line feed only: JSON allows other separators, such as U+2028, inside a text."""
    with open(file, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, _parse(line, where)


def _from_json(file: Path) -> Iterator[Entry]:
    content = _parse(file.read_text(encoding="utf-8"), str(file))
    if isinstance(content, dict) and len(content) == 1:  # {"data": […]}
        (content,) = content.values()
    if not isinstance(content, list):
        raise ConfigError(f"{file} holds no list - a list of conversations was expected. Correct it, or use .jsonl.")
    yield from ((f"{file}, entry {number}", entry) for number, entry in enumerate(content))


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'{where} is not JSON ({error}) - expected {{"messages": [{{"role": "user", "content": "…"}}, …]}}. '
            "Correct it, or leave it out."
        ) from error


def _from_parquet(file: Path) -> Iterator[Entry]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            entries = (entry for batch in table.iter_batches(batch_size=1024) for entry in batch.to_pylist())
            for number, entry in enumerate(entries):
                yield f"{file}, row {number}", _without_nulls(entry)
    except ArrowException as error:
        raise ConfigError(f"{file} is no parquet file ({error}) - one was expected. Write it again.") from error


def _from_program(file: Path) -> Iterator[Entry]:
    functions = runpy.run_path(str(file))
    if "conversations" not in functions:
        raise ConfigError(f"{file} has no function `conversations` - one that returns a list was expected. Add it.")
    for number, entry in enumerate(functions["conversations"]()):
        yield f"{file}, conversation {number}", entry


def _from_hub(source: Source) -> Iterator[Entry]:
    from datasets import load_dataset

    try:
        found = load_dataset(source.data, source.subset, split=source.split)
    except Exception as error:  # of the library, of its network, of the hub: all mean the same to whoever typed it
        raise ConfigError(
            f"The data set {source.data!r} (subset {source.subset or 'none'}, split {source.split}) cannot be loaded: "
            f"{error}\nExpected one that this machine can reach, or a file or folder here (looked in {Path.cwd()}). "
            "Check name, `subset` and `split`; or download its parquet files elsewhere, copy the folder, and set "
            "`data` to it."
        ) from error
    for number, entry in enumerate(found):
        yield f"{source.data}, {source.split}, row {number}", _without_nulls(entry)


def _without_nulls(value: Any) -> Any:
    """Columns hold one shape of table: keys that an entry never had come as None."""
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    if isinstance(value, list):
        return [_without_nulls(inside) for inside in value]
    return value


_READERS = {".jsonl": _from_lines, ".json": _from_json, ".parquet": _from_parquet, ".py": _from_program}
