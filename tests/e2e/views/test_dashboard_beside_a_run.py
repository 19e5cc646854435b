"""`rl --dashboard`: what is opened beside a run is there while the run is, says no word of other machines, and is gone
with it, however that ends.
"""

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from trireme.base.processes import free_port
from trireme.base.token import TOKEN
from trireme.config.run import RunConfig
from trireme.launch.dashboard import run_dashboard

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
SECRET = "0123456789abcdef0123456789abcdef"

LAUNCHER = """
import sys
from pathlib import Path
from trireme.config.run import Ports, RunConfig
from trireme.launch.dashboard import run_dashboard
ports = Ports(dashboard=int(sys.argv[2]))
with run_dashboard(RunConfig(name="run", output_dir=Path(sys.argv[1]), dashboard=True, ports=ports)):
    sys.stdin.read()
"""


def answer_of(url: str) -> httpx.Response:
    give_up = time.monotonic() + DEADLINE_S
    while True:
        try:
            return httpx.get(url, trust_env=False, timeout=DEADLINE_S)
        except httpx.ConnectError:
            assert time.monotonic() < give_up, f"{url} does not answer within {DEADLINE_S} s"
            time.sleep(0.01)


@pytest.mark.parametrize("is_killed", [False, True])
def test_it_answers_beside_the_run_and_ends_with_it(is_killed, tmp_path):
    port = free_port()
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), str(port)]
    pipe, env = subprocess.PIPE, os.environ | {TOKEN: SECRET}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as launcher:
        assert launcher.stdin
        assert launcher.stdout
        (address,) = re.findall(r"http://\S+", launcher.stdout.readline())
        assert f":{port}/" in address
        page, (dashboard,) = answer_of(address), psutil.Process(launcher.pid).children()
        assert httpx.get(address.partition("?")[0], trust_env=False).status_code == 401
        if is_killed:
            launcher.send_signal(signal.SIGKILL)
        else:
            launcher.stdin.close()
    _, alive = psutil.wait_procs([dashboard], timeout=DEADLINE_S)
    assert alive == []
    assert page.status_code == 200
    assert SECRET not in page.text
    linked = re.findall(r"""(?:src|href|url\(|from|import)\s*[=(]?\s*["'](?:https?:)?//[^"']+""", page.text)
    assert linked == []
    key = address.partition("=")[2]
    written = [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    assert len(key) > 16
    assert not [text for text in written if key in text or SECRET in text], "the key is for the terminal"


def test_one_that_cannot_start_ends_no_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("a file in the place of the folder")
    with run_dashboard(RunConfig(name="run", output_dir=tmp_path, dashboard=True)):
        pass
    assert "the run continues without it" in capsys.readouterr().out
