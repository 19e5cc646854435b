"""An example configuration for several sizes of machine: one file, in which a line may have a value for each.

As it stands, a file is for a CPU. What differs on GPUs follows in a comment, `#|`: for one GPU, then for eight. `-`
leaves the key out; a line that has no value for a CPU is a comment itself. A remark may be for one size alone.

Example:
    # One GPU: of 80 GB.
    lr = 5e-4 # a tiny model likes a large rate #| 1e-5 | 1e-6
    # tp = - #| - | 4
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from trireme.base.devices import Devices

Size = Literal["cpu", "one-gpu", "eight-gpus"]
SIZES: tuple[Size, ...] = get_args(Size)

NO_KEY = "-"
_REMARKS: dict[Size, str] = {"cpu": "# CPU: ", "one-gpu": "# One GPU: ", "eight-gpus": "# Eight GPUs: "}

_SIZED = re.compile(r"(?:# )?(?P<key>[\w.-]+) = (?P<cpu>.*?)(?: # .*?)? #\| (?P<others>.*)")
_EMPTY_TABLE = re.compile(r"\[[^\[\n]+\](?: #.*)?")  # a paragraph of which nothing else is left
_ABOUT_SIZES = "# `#|` "  # begins the line of a file's head that explains the notation


def size_of(devices: Devices) -> Size:
    """Of the examples that this machine can run."""
    return "cpu" if not devices.gpus else "one-gpu" if devices.num_gpus < 8 else "eight-gpus"


def sized(text: str, size: Size) -> str:
    """The same file for one size alone, without the values of the others."""
    others = (_ABOUT_SIZES, *(remark for other, remark in _REMARKS.items() if other != size))
    lines = (_line(line, size) for line in text.splitlines() if not line.startswith(others))
    paragraphs = "\n".join(line for line in lines if line is not None).strip().split("\n\n")
    return "\n\n".join(paragraph for paragraph in paragraphs if not _EMPTY_TABLE.fullmatch(paragraph)) + "\n"


def _line(line: str, size: Size) -> str | None:
    """None where the key is left out."""
    found = _SIZED.fullmatch(line)
    if found is None:
        return line
    if size == "cpu":
        return None if found["cpu"] == NO_KEY else line[: line.index(" #| ")]
    others = found["others"].split(" | ")
    assert len(others) == len(SIZES) - 1, f"{line!r} has {len(others)} values after `#|`, expected {len(SIZES) - 1}"
    value = others[SIZES.index(size) - 1].strip()
    return None if value == NO_KEY else f"{found['key']} = {value}"
