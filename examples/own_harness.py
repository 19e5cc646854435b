"""Your own harness drives, Trireme trains: open a session, call the model, post the reward (docs/agents.md).

uv run rl @ configs/agent/own-harness.toml --model.name MODEL     # in another terminal
uv run python examples/own_harness.py
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx

patient = httpx.HTTPTransport(retries=7)  # for half a minute, while the orchestrator restarts
http = httpx.Client(base_url="http://127.0.0.1:8090", timeout=600, transport=patient)


def read_token() -> str:
    """Return the run's token. The file has another one when `rl` is started again."""
    return os.environ.get("TRIREME_TOKEN") or Path("outputs/own-harness/.token").read_text()


def play() -> bool:
    """Play one rollout, and return whether the run goes on. An SDK can call the model at the session's `base_url`."""
    token = read_token()
    opened = http.post("/sessions", json={"env": "shout"}, headers={"Authorization": f"Bearer {token}"})
    if opened.status_code == 401 and read_token() != token:  # the run was resumed meanwhile
        return True
    if opened.status_code == 429:  # no rollout is wanted: the trainer is busy
        time.sleep(float(opened.headers["retry-after"]))
        return True
    if opened.status_code == 403:  # the run is over
        return False
    session = opened.raise_for_status().json()
    key = {"Authorization": f"Bearer {session['api_key']}"}
    answer = http.post("/v1/chat/completions", json={"messages": session["prompt"]}, headers=key)
    if answer.status_code in (401, 403):  # the session has ended: it took too long, or the policy has moved on
        return True
    text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    reward = float(session["example"]["answer"] in text)
    http.post(f"/sessions/{session['id']}/reward", json={"reward": reward}, headers=key)
    return True


def work(_: int) -> None:
    goes_on = True
    with suppress(httpx.ConnectError):  # the run has been over for a while
        while goes_on:
            with suppress(httpx.ReadError, httpx.RemoteProtocolError):  # the orchestrator restarts
                goes_on = play()


with ThreadPoolExecutor(16) as pool:
    list(pool.map(work, range(16)))
