"""Reduce an example configuration for several sizes of machine to one size.

As it stands, a file is for a CPU. A line may have values for GPUs in a comment, `#|`: for one GPU, then for eight. `-`
leaves the key out; a line that has no value for a CPU is a comment itself. A comment may be for one size alone.

Example:
    # One GPU: of 80 GB.
    lr = 5e-4 # a tiny model needs a large rate #| 1e-5 | 1e-6
    # tp = - #| - | 4
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from trireme.base.devices import Devices

Size = Literal["cpu", "one-gpu", "eight-gpus"]
SIZES: tuple[Size, ...] = get_args(Size)

NO_KEY = "-"
_COMMENTS: dict[Size, str] = {"cpu": "# CPU: ", "one-gpu": "# One GPU: ", "eight-gpus": "# Eight GPUs: "}

_SIZED = re.compile(r"(?:# )?(?P<key>[\w.-]+) = (?P<cpu>.*?)(?: # .*?)? #\| (?P<others>.*)")
_EMPTY_TABLE = re.compile(r"\[[^\[\n]+\](?: #.*)?")  # a paragraph of which only the heading is left
_ABOUT_SIZES = "# `#|` "  # begins the line of a file's head that explains the notation


def size_of(devices: Devices) -> Size:
    """Return the size of the examples that this machine can run."""
    return "cpu" if not devices.gpus else "one-gpu" if devices.num_gpus < 8 else "eight-gpus"


def sized(text: str, size: Size) -> str:
    """Return the file for one size, without the values of the others."""
    others = (_ABOUT_SIZES, *(comment for other, comment in _COMMENTS.items() if other != size))
    lines = []
    for line in text.splitlines():
        found = _SIZED.fullmatch(line)
        if line.startswith(others):
            continue
        if found is None:
            lines.append(line)
        elif size == "cpu":
            lines += [] if found["cpu"] == NO_KEY else [line[: line.index(" #| ")]]
        else:
            values = found["others"].split(" | ")
            assert len(values) == len(SIZES) - 1, f"{line!r} has {len(values)} values after `#|`, expected 2"
            value = values[SIZES.index(size) - 1].strip()
            lines += [] if value == NO_KEY else [f"{found['key']} = {value}"]
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return "\n\n".join(paragraph for paragraph in paragraphs if not _EMPTY_TABLE.fullmatch(paragraph)) + "\n"
