"""Whether a process of a run is well, as an exit code, for health checks of containers. The standard library alone.

    healthy.py URL             it answers
    healthy.py URL PROCESS     the orchestrator, whose `/status` this is, has heard of PROCESS within the last minute

The run's token is taken from TRIREME_TOKEN.
"""

from __future__ import annotations

import json
import os
import sys
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT_S = 8
SILENCE_S = 60


def main(url: str, process: str | None = None) -> str | None:
    """Returns what is wrong, if something is."""
    try:
        answer = _ask(url)
        return _silent(json.loads(answer), process) if process else None
    except (OSError, ValueError) as error:  # no connection, a status of 400 or more, no JSON
        return f"{url}: {error}"


def _ask(url: str) -> bytes:
    request = Request(url, headers={"Authorization": f"Bearer {os.environ.get('TRIREME_TOKEN', '')}"})
    with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content


def _silent(status: dict[str, dict[str, dict[str, float]]], process: str) -> str | None:
    heard = [row["heard_s_ago"] for name, row in status["processes"].items() if name.partition(".")[0] == process]
    if not heard:
        return f"{process} has not been heard of yet"
    return f"{process} has not been heard of for {max(heard):.0f} s" if max(heard) > SILENCE_S else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
