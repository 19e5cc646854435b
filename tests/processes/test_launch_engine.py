"""One server for as long as it is needed: waited for by name, and gone afterwards whatever happened."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stage import SLEEP, Stage
from trireme.base.errors import DeadlineExceeded, PeerDied
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.launch.engine import open_server
from trireme.launch.plan import ProcessSpec

SERVES = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

grandchild("import time; time.sleep(600)", start_new_session=True)
all_are_here(2)
HTTPServer(("127.0.0.1", {port}), Well).serve_forever()
"""


def spec_of(stage: Stage, body: str) -> ProcessSpec:
    port = free_port()
    spec = stage.plan(inference=body.replace("{port}", str(port))).process("inference")
    return replace(spec, health=f"http://127.0.0.1:{port}/health")


def use(stage: Stage, body: str, *, deadline_s: float = 60, fail: Exception | None = None) -> str:
    async def main() -> str:
        waits = Waits("the check", stage.config.paths.logs)
        async with open_server(spec_of(stage, body), waits, deadline_s=deadline_s, grace_s=0.2) as url:
            assert len(stage.alive()) == 2
            if fail:
                raise fail
            return url

    return asyncio.run(main())


@pytest.mark.parametrize("fail", [None, KeyError("in the check"), asyncio.CancelledError()])
def test_a_server_is_there_while_it_is_needed_and_no_longer(tmp_path: Path, fail: Exception | None) -> None:
    stage = Stage(tmp_path)
    if fail is None:
        assert use(stage, SERVES).startswith("http://127.0.0.1:")
    else:
        with pytest.raises(type(fail)):
            use(stage, SERVES, fail=fail)
    assert len(stage.pids()) == 2
    assert stage.alive() == []


def test_a_server_that_dies_while_it_comes_up_is_told_with_its_last_words(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(PeerDied, match=r"(?s)ended while it came up \(exit code 3\).*no such model.*inference.stdout"):
        use(stage, "print('no such model'); sys.exit(3)")


def test_a_server_that_never_comes_up_is_named_when_the_time_is_up_and_ended(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(
        DeadlineExceeded, match=r"the check waits .* for it to come up from inference, .*inference.stdout"
    ):
        use(stage, SLEEP, deadline_s=1.0)
    assert stage.alive() == []
