"""Lists what stands in the reference documents, for the test that `docs/coming-from.md` leaves nothing out.

    python scripts/names_of_documents.py FOLDER > tests/data/documents.json

Of each document: the names (keys, flags, commands, quoted words) of each line, and the TOML blocks by their first line.
Names and values alone; no sentence of a document is kept.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCUMENTS = {"000": "tutorial", "001": "vf-rl guide", "002": "RLTrainer", "003": "prime-rl guide", "004": "RL guide"}
SHELLS = ("bash", "sh")
IGNORED = {"uv", "run", "bash", "|", "\\", "@"}


@dataclass
class Block:
    """What stands between two fences."""

    language: str
    first: int  # number of its first line
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return textwrap.dedent("\n".join(self.lines))

    def names(self) -> Iterator[tuple[int, str]]:
        if self.language == "toml":
            yield from _each_line(self, _toml_names)
        elif self.language in SHELLS:
            yield from _each_line(self, _shell_names)
        elif self.language == "python":
            yield from _each_line(self, _python_names)


def _each_line(block: Block, names: Any) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(block.lines, block.first):
        for name in names(line):
            yield number, name


def _toml_names(line: str) -> Iterator[str]:
    code = line.split("#")[0].strip()
    if header := re.fullmatch(r"\[+([\w.-]+)\]+", code):
        yield header[1]
    elif "=" in code:
        yield code.split("=")[0].strip()


def _shell_names(line: str) -> Iterator[str]:
    """The words of a command, without values of flags that are only examples."""
    code = line.split(" #")[0].strip().removesuffix("\\").strip()
    if not code or code.startswith("#"):
        return
    for word in shlex.split(code):
        if word not in IGNORED and "://" not in word and not re.fullmatch(r"[\d.,]+", word):
            yield re.sub(r"^([A-Z_]+)=.*", r"\1", word)


def _python_names(line: str) -> Iterator[str]:
    yield from re.findall(r"args\.(\w+) =", line)
    yield from re.findall(r"vf\.(\w+)", line)
    yield from re.findall(r'"(\w+)": ', line)
    yield from re.findall(r'r\["(\w+)"\]', line)


def blocks_of(lines: list[str]) -> Iterator[Block]:
    block: Block | None = None
    for number, line in enumerate(lines, 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and block is None:
            block = Block(fence[1], number + 1)
        elif fence and block is not None:
            yield block
            block = None
        elif block is not None:
            block.lines.append(line)


def tables_of(block: Block) -> Iterator[tuple[int, dict[str, Any]]]:
    """The block's content; each part by itself where it shows a wrong and a right way (the same table twice)."""
    try:
        yield block.first, tomllib.loads(block.text)
    except tomllib.TOMLDecodeError:
        for part in re.split(r"\n\n", block.text):
            yield block.first + block.text[: block.text.index(part)].count("\n"), tomllib.loads(part)


def list_document(text: str) -> dict[str, Any]:
    lines = text.splitlines()
    blocks = list(blocks_of(lines))
    inside = {number for block in blocks for number in range(block.first - 1, block.first + len(block.lines) + 1)}
    names: dict[int, list[str]] = {}
    for block in blocks:
        for number, name in block.names():
            names.setdefault(number, []).append(name)
    for number, line in enumerate(lines, 1):
        if number not in inside:
            names.setdefault(number, []).extend(re.findall(r"`([^`]+)`", line))
    return {
        "names": {number: list(dict.fromkeys(found)) for number, found in sorted(names.items()) if found},
        "toml": {first: table for block in blocks if block.language == "toml" for first, table in tables_of(block)},
    }


def main(folder: Path) -> None:
    documents = {file.name[:3]: file.read_text() for file in sorted(folder.glob("*.txt"))}
    listed = {DOCUMENTS[key]: list_document(text) for key, text in documents.items() if key in DOCUMENTS}
    print(_one_line_each(listed))


def _one_line_each(listed: dict[str, Any]) -> str:
    """JSON in which a line of a document is a line."""
    documents = []
    for title, document in listed.items():
        parts = []
        for key in ("names", "toml"):
            entries = (f"   {json.dumps(str(line))}: {json.dumps(found)}" for line, found in document[key].items())
            parts.append(f'  "{key}": {{\n' + ",\n".join(entries) + "\n  }")
        documents.append(f" {json.dumps(title)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(documents) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
