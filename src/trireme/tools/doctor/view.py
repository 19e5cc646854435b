"""An answer in lines: verdict and question, what was found, and what to do."""

from __future__ import annotations

import textwrap

from trireme.tools.doctor.finding import Answer

MARGIN = 9  # columns of the verdict


def text_of(answer: Answer, width: int) -> str:
    """
    Example:
        ok       Is this a Python that Trireme runs with?  Python 3.11.14 on Linux x86_64
        problem  Are the run's ports free?
                 port 8000 on 127.0.0.1 is in use, wanted for the inference server - expected a free one
                 -> `lsof -i :8000` shows who has it
    """
    finding = answer.finding
    first = f"{finding.verdict:{MARGIN}}{answer.question}"
    if not finding.fix and "\n" not in finding.found and len(first) + 2 + len(finding.found) <= width:
        return f"{first}  {finding.found}"
    lines = [line for part in finding.found.splitlines() for line in _wrapped(part, width, "")]
    if finding.fix:
        lines += _wrapped(finding.fix, width, "-> ")
    return "\n".join([first, *lines])


def _wrapped(text: str, width: int, mark: str) -> list[str]:
    margin = " " * MARGIN
    return textwrap.wrap(
        text,
        width,
        initial_indent=margin + mark,
        subsequent_indent=margin + " " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [""]
