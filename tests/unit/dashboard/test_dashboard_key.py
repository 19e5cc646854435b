"""Who is let in to the dashboard, and how it is opened."""

import ast
import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tiny_pictures import picture_file
from trireme.base.errors import ConfigError
from trireme.base.token import TOKEN
from trireme.cli.runs.dashboard import dashboard, listen, require_key
from trireme.journal.pictures import PictureFiles
from trireme.tools.dashboard.pictures import serve_pictures
from trireme.tools.dashboard.runs import Library
from trireme.transport.dashboard_key import KEY, RequireKey, address_of, key_of

SECRET = "0123456789abcdef0123456789abcdef"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"rollouts"})


def ask(key: str | None, *steps: dict[str, Any], app: Any = hello) -> list[httpx.Response]:
    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=RequireKey(app, key))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8050") as browser:
            return [await browser.get(step.pop("url", "/"), **step) for step in steps]

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8050"}, 200),
        ({"host": "evil.example:8050"}, 401),  # a name that was made to stand for this machine
        ({"origin": "http://127.0.0.1:8050"}, 200),
        ({"origin": "http://evil.example"}, 401),
        ({"origin": "null"}, 401),
    ],
)
def test_on_loopback_only_this_machines_own_pages_are_answered(headers, status):
    (answer,) = ask(None, {"headers": headers})
    assert answer.status_code == status


def test_the_key_of_the_address_opens_and_is_remembered():
    key = key_of(SECRET)
    first, with_key, afterwards = ask(key, {}, {"url": f"/?{KEY}={key}"}, {})
    assert [answer.status_code for answer in (first, with_key, afterwards)] == [401, 200, 200]
    assert "HttpOnly" in with_key.headers["set-cookie"]
    for word in ("frame-ancestors 'self'", "connect-src 'self'"):  # what it may talk to, and who may embed it
        assert word in with_key.headers["content-security-policy"]
    assert with_key.headers["x-content-type-options"] == "nosniff"
    assert b"rollouts" not in first.content
    for wrong in ("", "x", key[:-1], SECRET, "%ff"):
        assert [answer.status_code for answer in ask(key, {"url": f"/?{KEY}={wrong}"})] == [401]


def test_where_others_reach_it_a_token_is_a_must_and_the_key_tells_nothing_of_it(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN, raising=False)
    assert require_key("127.0.0.1") is None
    with pytest.raises(ConfigError, match="no token - expected"):
        dashboard([str(tmp_path), "--host", "0.0.0.0"])
    monkeypatch.setenv(TOKEN, SECRET)
    key = require_key("0.0.0.0")
    address = address_of("127.0.0.1", 8050, key)
    assert address.endswith(f"?{KEY}={key}")
    assert SECRET not in address


def test_a_websocket_without_the_key_is_closed():
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"127.0.0.1:1")], "query_string": b""}
    asyncio.run(RequireKey(hello, key_of(SECRET))(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_port_that_is_taken_is_refused_where_it_was_asked_for_and_else_another_does(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
        monkeypatch.setattr("trireme.cli.runs.dashboard.PORT", port)
        with listen("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] != port


def test_pictures_are_served_by_their_digests_and_no_other_file(tmp_path: Path) -> None:
    files = PictureFiles(tmp_path / "run" / "journal" / "pictures")
    good, changed = (files.add(picture_file(4, 4, shade)) for shade in (0, 1))
    files.path(changed).write_bytes(b"another picture")
    app, library = FastAPI(), Library([tmp_path])
    library.search()
    serve_pictures(app, library)
    addresses = [f"{good}?run=run", good, f"{good}?run=other", f"{changed}?run=run", f"..%2f{good}?run=run", "a" * 64]
    first, *others = ask(None, *({"url": f"/pictures/{each}"} for each in addresses), app=app)
    assert (first.status_code, first.headers["content-type"]) == (200, "image/png")
    assert first.content == files.read(good)
    assert {answer.status_code for answer in others} == {404}


def test_no_name_out_of_a_run_is_formatted_into_properties_that_are_parsed() -> None:
    """NiceGUI parses text for `props()`, and takes a property that begins with `:` for JavaScript."""
    found = set()
    for file in Path("src/trireme/tools/dashboard").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "props":
                parts = [part for each in node.args for part in ast.walk(each) if isinstance(part, ast.FormattedValue)]
                found |= {ast.unparse(part.value) for part in parts}
    assert found == {"MOST_RUNS", "ROWS"}, "constants of ours and numbers"
