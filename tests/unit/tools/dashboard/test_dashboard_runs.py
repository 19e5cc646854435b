"""What the dashboard reads from the folders of runs, as they grow and if they are damaged, and how it draws it."""

import ast
import errno
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from support.engines.answering import answering_http
from support.models.tiny_pictures import picture_file
from support.runs.viewing import Reader
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.token import TOKEN
from trireme.journal.pictures import PictureFiles
from trireme.launch.folder import hold_folder
from trireme.monitor.metrics import MetricsFile, read_metrics
from trireme.tools.dashboard import runs as module
from trireme.tools.dashboard.dashboard import command as dashboard
from trireme.tools.dashboard.dashboard import listen, require_key
from trireme.tools.dashboard.logs import TAIL_BYTES, log_files, tail, to_html
from trireme.tools.dashboard.overview import differences, figures
from trireme.tools.dashboard.rollouts import nothing_found, serve_pictures
from trireme.tools.dashboard.runs import Library, RunFolder, RunSet
from trireme.transport.dashboard_key import KEY, RequireKey, address_of, key_of


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", -1.0)
    monkeypatch.setattr(module, "SEARCH_S", -1.0)


def write(run: Path, steps: range, *, reward: float = 0.5, config: Any = None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    trainer, orchestrator = (MetricsFile(run / "metrics.jsonl", name) for name in ("trainer", "orchestrator"))
    for step in steps:
        orchestrator.append(step, {"reward/mean": reward + step, "time/step": 1.0})
        trainer.append(step, {"loss": -0.1 * step, "time/step": 2.0, "grad_norm": math.nan if step == 1 else 1.0})
    if config is not None:
        (run / "configs").mkdir()
        (run / "configs" / "run.json").write_text(json.dumps(config))
    return run


def opened(run: Path) -> RunFolder:
    folder = RunFolder(run, run.name)
    folder.refresh()
    return folder


def shown(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    series = {name: run.metrics.series(name) for name in run.metrics.names()}
    return {name: list(zip(steps.tolist(), map(repr, values), strict=True)) for name, (steps, values) in series.items()}


def test_metrics_are_those_of_the_file_however_it_grows(tmp_path):
    """A name of several processes is the trainer's."""
    whole = write(tmp_path / "whole", range(5))
    MetricsFile(whole / "metrics.jsonl", "orchestrator").append(0, {"eval/e/reward": 0.25})
    expected: dict[str, list[tuple[int, Any]]] = {}
    for row in read_metrics(whole / "metrics.jsonl")[0]:
        for name in row.keys() - {"step", "process", "time_s"}:
            value = np.float64(math.nan if row[name] is None else row[name])
            if (name, row["process"]) != ("time/step", "orchestrator"):
                expected.setdefault(name, []).append((row["step"], repr(value)))
    data = (whole / "metrics.jsonl").read_bytes()
    folder = opened(write(tmp_path / "run", range(0)))
    for begin in range(0, len(data), 97):
        with open(folder.path / "metrics.jsonl", "ab") as file:
            file.write(data[begin : begin + 97])
        folder.refresh()
    assert shown(folder) == shown(opened(whole)) == expected


def test_a_folder_that_comes_later_or_is_used_again_is_shown_as_it_is_now(tmp_path):
    library = Library([tmp_path / "later"])
    library.search()
    (folder,) = library.runs()
    folder.refresh()
    assert folder.state == "not there yet"
    run = write(tmp_path / "later", range(9))
    library.search()
    folder.refresh()
    assert library.runs() == [folder]
    assert (folder.metrics.num_done, folder.state) == (9, "stopped")
    (run / "metrics.jsonl").rename(tmp_path / "aside")
    write(run, range(2), reward=7.0)
    folder.refresh()
    assert folder.metrics.num_done == 2
    assert folder.metrics.series("reward/mean").values.tolist() == [7.0, 8.0]


def test_damaged_files_cost_what_is_damaged_and_no_more(tmp_path):
    run = write(tmp_path / "run", range(2), config={})
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\x00\xff{"step": 2, "process"\n[1, 2]\n{"step": "x", "process": "trainer"}\n')
    (write(run, range(2, 4)) / "configs" / "run.json").write_text("{ not json")
    folder = opened(run)
    assert folder.metrics.series("reward/mean").steps.tolist() == [0, 1, 2, 3]
    assert folder.config == {}


def test_dashboard_lists_runs_below_a_folder_without_reading_them(tmp_path):
    for name in ("a/wordle", "b/wordle", "plain", "deep/er/still", *(f"many/run-{n}" for n in range(9))):
        write(tmp_path / name, range(1))
    (tmp_path / "only-planned" / "configs").mkdir(parents=True)
    write(tmp_path / "plain" / "checkpoints" / "inside", range(1))
    library = Library([tmp_path])
    library.search()
    paths = {run.name: run.path.relative_to(tmp_path) for run in library.runs()}
    found = {"a/wordle": "a/wordle", "b/wordle": "b/wordle", "plain": "plain", "still": "deep/er/still"}
    assert (len(paths), {name: str(paths[name]) for name in found}) == (13, found)
    assert library.named("b/wordle") in library.runs()
    assert all(not run.metrics.names() for run in library.runs())
    chosen = [RunFolder(tmp_path, name) for name in ("a/b", "c & d")]
    assert RunSet(Library([]), chosen).link("/tokens", step=3, find=None) == "/tokens?run=a%2Fb&run=c+%26+d&step=3"


def test_a_folder_that_cannot_be_entered_takes_no_other_run_down(tmp_path, monkeypatch):
    """Root may enter all folders, so the calls of the system refuse."""
    write(tmp_path / "mine", range(1))
    theirs = write(tmp_path / "theirs", range(1)) / "run"

    def refuse(call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any = ".", *args: Any, **named: Any) -> Any:
            if theirs.parent in Path(path).parents or (call is not os.stat and Path(path) == theirs.parent):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *args, **named)

        return refusing

    for name in ("stat", "scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    for roots, names in (([tmp_path], ["mine"]), ([tmp_path / "mine", theirs], ["mine", "run"])):
        library = Library(roots)
        library.search()
        assert sorted(run.name for run in library.runs()) == names
    library.runs()[-1].refresh()
    assert library.runs()[-1].state == "not there yet"


def test_run_is_live_while_a_launcher_or_its_orchestrator_runs(tmp_path):
    said = {"state": "running", "version": 3}
    with answering_http(lambda *_: (200, json.dumps(said).encode())) as port:
        server = {"orchestrator": {"server": {"host": "127.0.0.1", "port": port}}, "max_steps": 5}
        run = write(tmp_path / "run", range(1))
        folder = opened(run)
        assert not folder.is_live
        with hold_folder(RunPaths(run)):
            folder.refresh()
            assert folder.is_live
        write(run, range(0), config=server)
        for name, state in ((run, "running"), (tmp_path / "another", "stopped")):
            said["run"] = str(name)
            folder = opened(run)
            assert (folder.status is not None, folder.state) == (name == run, state)


def test_figures_are_what_one_works_out_by_hand(tmp_path):
    run = write(tmp_path / "run", range(10), config={"max_steps": 10})
    said = {name: value for name, value, _ in figures(opened(run))}
    reward = f"{0.5 + (5 + 6 + 7 + 8 + 9) / 5:.3f}"
    assert said | {"Steps trained": "10 of 10", "Reward": reward, "Seconds a step": "2"} == said


def test_what_differs_between_runs_is_listed_by_key(tmp_path):
    for name, lr in (("a", 1e-5), ("b", 1e-5), ("c", 1e-4)):
        write(tmp_path / name, range(1), config={"name": name, "trainer": {"optim": {"lr": lr}}})
    rows = differences([opened(tmp_path / name) for name in "abc"])
    assert rows == [{"key": "trainer.optim.lr", "a": "1e-05", "b": "1e-05", "c": "0.0001"}]


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_whatever_a_process_wrote_is_shown_as_text(line):
    page = Reader(to_html([line]))
    assert page.tags == {"span"}
    assert "".join(page.texts) == line


def test_dashboard_shows_the_newest_whole_lines_of_a_long_log(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("environment-x-0", "trainer", "inference-1", "orchestrator"):
        (tmp_path / "logs" / f"{name}.stdout").touch()
    assert list(log_files(tmp_path / "logs")) == ["orchestrator", "trainer", "inference-1", "environment-x-0"]
    log = log_files(tmp_path / "logs")["trainer"]
    lines = [f"line {number:06}" for number in range(TAIL_BYTES // 6)]
    log.write_text("\n".join(lines) + "\n")
    shown = tail(log, most=10)
    assert (shown.lines, shown.is_whole, shown.num_found) == (lines[-10:], False, (TAIL_BYTES - 1) // 12)
    lines[7], lines[9] = "01:02:03 WARNING trainer | Low Memory", "ValueError: low"
    log.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe broken\n")
    assert tail(log, words="MEMORY low").lines == [lines[7]]
    assert tail(log, level="errors").lines == [lines[9]]
    assert tail(log, level="trouble").lines == [lines[7], lines[9]]
    assert tail(tmp_path / "none").lines == []


def test_warnings_that_persist_come_before_those_that_were(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    for step in range(40):
        metrics.append(step, {"policy/entropy": 1.0 if step < 20 else 0.0001, "grad_norm": 500.0 if step == 30 else 1})
    found = [(warned.name, is_lasting) for warned, is_lasting in opened(tmp_path).warnings()]
    assert found == [("entropy_collapse", True), ("grad_norm_spike", False)]


SECRET = "0123456789abcdef0123456789abcdef"
PAGE = PlainTextResponse("rollouts")


def browser(key: str | None, app: Any = PAGE) -> TestClient:
    return TestClient(RequireKey(app, key), base_url="http://127.0.0.1:8050")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("host", "127.0.0.1:8050", 200),
        ("host", "localhost:8050", 200),
        ("host", "evil.example:8050", 401),  # a name that was made to stand for this machine
        ("origin", "http://127.0.0.1:8050", 200),
        ("origin", "http://evil.example", 401),
        ("origin", "null", 401),
    ],
)
def test_on_loopback_only_this_machines_own_pages_are_answered(name, value, status):
    assert browser(None).get("/", headers={name: value}).status_code == status


def test_the_key_of_the_address_opens_and_is_remembered():
    key = key_of(SECRET)
    user = browser(key)
    first, with_key, afterwards = (user.get(address) for address in ("/", f"/?{KEY}={key}", "/"))
    assert [answer.status_code for answer in (first, with_key, afterwards)] == [401, 200, 200]
    assert "HttpOnly" in with_key.headers["set-cookie"]
    for word in ("frame-ancestors 'self'", "connect-src 'self'"):  # what it may talk to, and who may embed it
        assert word in with_key.headers["content-security-policy"]
    assert with_key.headers["x-content-type-options"] == "nosniff"
    assert b"rollouts" not in first.content
    for wrong in ("", "x", key[:-1], SECRET, "%ff"):
        assert browser(key).get(f"/?{KEY}={wrong}").status_code == 401


def test_dashboard_needs_a_token_if_other_machines_reach_it(monkeypatch, tmp_path):
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
    connection = browser(key_of(SECRET)).websocket_connect("ws://127.0.0.1:8050/")
    with pytest.raises(WebSocketDisconnect) as closed, connection:
        pass
    assert closed.value.code == 1008


def test_dashboard_refuses_a_requested_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
        monkeypatch.setattr("trireme.tools.dashboard.dashboard.PORT", port)
        with listen("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] != port


def test_pictures_are_served_by_their_digests_and_no_other_file(tmp_path):
    files = PictureFiles(tmp_path / "run" / "journal" / "pictures")
    good, changed = (files.add(picture_file(4, 4, shade)) for shade in (0, 1))
    files.path(changed).write_bytes(b"another picture")
    app, library = FastAPI(), Library([tmp_path])
    library.search()
    serve_pictures(app, library)
    addresses = [f"{good}?run=run", good, f"{good}?run=other", f"{changed}?run=run", f"..%2f{good}?run=run", "a" * 64]
    first, *others = (browser(None, app).get(f"/pictures/{each}") for each in addresses)
    assert (first.status_code, first.headers["content-type"]) == (200, "image/png")
    assert first.content == files.read(good)
    assert {answer.status_code for answer in others} == {404}


def test_no_name_out_of_a_run_is_formatted_into_properties_that_are_parsed():
    """NiceGUI parses text for `props()`, and takes a property that begins with `:` for JavaScript."""
    files = Path("src/trireme/tools/dashboard").glob("*.py")
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    props = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "props"]
    parts = [part for call in props for each in call.args for part in ast.walk(each)]
    found = {ast.unparse(part.value) for part in parts if isinstance(part, ast.FormattedValue)}
    assert found == {"MOST_RUNS", "ROWS"}, "constants of ours and numbers"


@pytest.mark.parametrize(
    ("done", "total", "searched", "said"),
    [(3, 20, True, "being built: 3 of 20"), (0, 0, False, "No batch"), (20, 20, True, "Shorten the search")],
)
def test_an_empty_list_of_rollouts_says_why(done, total, searched, said):
    assert said in nothing_found(done, total, searched=searched)
