"""Your own harness drives, Trireme trains: open a session, call the model, post the reward (docs/agents.md).

uv run rl @ configs/agent/own-harness.toml --model.name MODEL     # in another terminal
uv run python examples/own_harness.py                             # ends half a minute after the run
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from openai import OpenAI, OpenAIError

http = httpx.Client(base_url="http://127.0.0.1:8090", timeout=600, transport=httpx.HTTPTransport(retries=7))
TOKEN = Path("outputs/own-harness/.token")  # `rl --resume` writes a new one


def play() -> None:
    token = os.environ.get("TRIREME_TOKEN") or TOKEN.read_text()
    opened = http.post("/sessions", json={"env": "shout"}, headers={"Authorization": f"Bearer {token}"})
    session = opened.raise_for_status().json()
    policy = OpenAI(base_url=session["base_url"], api_key=session["api_key"])
    answer = policy.chat.completions.create(model="policy", messages=session["prompt"])
    reward = float(session["example"]["answer"] in (answer.choices[0].message.content or ""))
    key = {"Authorization": f"Bearer {session['api_key']}"}
    http.post(f"/sessions/{session['id']}/reward", json={"reward": reward}, headers=key)


def work(_: int) -> None:
    while True:
        try:
            play()
        except httpx.ConnectError:  # the run is over
            return
        except (httpx.HTTPError, OpenAIError):  # no rollout is wanted, the session has ended, or the run restarts
            time.sleep(1)


with ThreadPoolExecutor(16) as pool:
    list(pool.map(work, range(16)))
