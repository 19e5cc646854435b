"""Your own harness drives, Trireme trains: open a session, call the model, post the reward (docs/agents.md).

uv run rl @ configs/agent/own-harness.toml --model.name MODEL     # in another terminal
uv run python examples/own_harness.py
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

TOKEN = os.environ.get("TRIREME_TOKEN") or Path("outputs/own-harness/.token").read_text()
http = httpx.Client(base_url="http://127.0.0.1:8090", timeout=600)


def play(_: int) -> None:
    """Play rollouts until the run is over. Any SDK will do: give it `base_url` and `api_key` of the session."""
    while True:
        opened = http.post("/sessions", json={"env": "shout"}, headers={"Authorization": f"Bearer {TOKEN}"})
        if opened.status_code == 429:  # no rollout is wanted: the trainer is busy
            time.sleep(float(opened.headers["retry-after"]))
            continue
        session = opened.raise_for_status().json()
        key = {"Authorization": f"Bearer {session['api_key']}"}
        answer = http.post("/v1/chat/completions", json={"messages": session["prompt"]}, headers=key)
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        reward = float(session["example"]["answer"] in text)
        http.post(f"/sessions/{session['id']}/reward", json={"reward": reward}, headers=key)


with ThreadPoolExecutor(16) as pool:
    list(pool.map(play, range(16)))
