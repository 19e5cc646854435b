"""A user's own harness plays rollouts: its clients open sessions, call the policy, and post rewards."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from toy_environments import open_toy, running, says, write
from trireme.base.errors import ConfigError
from trireme.base.processes import free_port
from trireme.config.run import RunConfig
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.wire import RunTask
from whole_run import SAY, WholeRun, build_config, run

DATASET = SAY.partition("    def reward")[0]
REWARD = {"reward": 0.25, "metrics": {"steps": 2}}


class Client:
    """What a harness does, on one connection."""

    def __init__(self, port: int, **headers: str) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, headers=headers, verify=False)

    async def open(self, **wanted: Any) -> httpx.Response:
        answer = await self.http.post("/sessions", json={"env": "say"} | wanted)
        self.session = answer.json()
        self.key = {"Authorization": f"Bearer {self.session.get('api_key')}"}
        return answer

    async def ask(self, *messages: dict[str, str]) -> httpx.Response:
        url = f"{self.session['base_url']}/chat/completions"
        return await self.http.post(url, json={"messages": self.session["prompt"] + list(messages)}, headers=self.key)

    async def end(self, **outcome: Any) -> httpx.Response:
        url = f"/sessions/{self.session['id']}/reward"
        return await self.http.post(url, json=outcome, headers=self.key)

    async def state(self) -> dict[str, Any]:
        return (await self.http.get(f"/sessions/{self.session['id']}", headers=self.key)).json()


def table(port: int, **settings: Any) -> dict[str, Any]:
    return {"name": "say", "agent": {"external": True, "port": port}, "max_concurrent": 4} | settings


def config_of(folder: Path, port: int, code: str = SAY, **settings: Any) -> RunConfig:
    env = [{"id": str(folder / "toy.py")} | table(port, **settings)]
    return build_config(folder, code, max_steps=1, max_async_level=0, resume=True, orchestrator={"env": env})


async def play_on(whole: WholeRun, port: int, outcome: dict[str, Any] = REWARD) -> None:
    """Play rollouts of two turns until the run is over."""
    client = Client(port)
    with suppress(httpx.HTTPError):
        while not whole.records:
            if (await client.open()).status_code == 200:
                said = (await client.ask()).json()["choices"][0]["message"]
                await client.ask(said, {"role": "user", "content": "and?"})
                assert (await client.end(**outcome)).status_code == 200


def test_what_clients_play_at_the_same_time_is_trained_on_with_the_rewards_that_they_post(tmp_path):
    port = free_port()

    async def meanwhile(whole: WholeRun) -> None:
        client, odd = Client(port), Client(port)
        await client.open()
        split, index, example = (client.session[name] for name in ("split", "index", "example"))
        assert (split, example) == ("train", {"prompt": f"say {index}", "answer": str(index)})
        assert (await client.end(reward=1)).status_code == 400  # without a turn
        await client.ask()
        for wrong in ({"reward": "1"}, {"reward": 1e31}, {"rewrd": 1}, {"reward": 1, "metrics": {"<b>": 1}}):
            refused = await client.end(**wrong)
            assert (refused.status_code, bool(refused.json()["error"]["message"])) == (400, True)
        assert await client.state() == {"state": "open", "num_turns": 1}
        assert (await odd.open(example=10_000)).status_code == (await odd.open(env="x")).status_code == 404
        await odd.open()
        assert (await Client.end(odd, error="the sandbox broke")).status_code == 200
        assert (await client.end(reward=0.75)).status_code == 200
        assert (await client.ask()).status_code == (await client.end(reward=1)).status_code == 403
        assert (await client.state())["state"] == "ended"
        scored_here = play_on(whole, port, outcome={})
        await asyncio.gather(play_on(whole, port), play_on(whole, port), scored_here)

    outcome = run(config_of(tmp_path, port), meanwhile=meanwhile)
    assert outcome.error is None
    rollouts = [rollout for record in outcome.records for rollout in record.rollouts]
    assert len(rollouts) == 8
    assert {(len(rollout.samples), rollout.stop) for rollout in rollouts} == {(1, "client_ended")}
    seen = {rollout.reward: rollout for rollout in rollouts}
    assert seen[0.75].num_turns == 1
    assert (seen[0.25].num_turns, seen[0.25].metrics["steps"], len(seen[0.25].completion)) == (2, 2.0, 3)
    assert len(seen) > 2  # the environment's own
    reasons = [dropped.reason for record in outcome.records for dropped in record.dropped]
    assert any("the sandbox broke" in reason for reason in reasons)


def test_a_client_that_goes_silent_costs_its_rollout_alone(tmp_path):
    port = free_port()

    async def meanwhile(whole: WholeRun) -> None:
        client = Client(port)
        await client.open()
        await client.ask()
        await whole.until(lambda: whole.orchestrator.scheduler.num_failures)
        refused = await client.ask()
        assert (refused.status_code, "rollout_timeout_s" in refused.text) == (403, True)
        await play_on(whole, port)

    outcome = run(config_of(tmp_path, port, DATASET, rollout_timeout_s=2.0), meanwhile=meanwhile)
    (dropped,) = [dropped for record in outcome.records for dropped in record.dropped]
    assert "rollout_timeout_s" in dropped.reason
    assert len(outcome.records[0].rollouts) == 8


def test_a_client_repeats_its_session_after_a_restart_and_no_turn_is_sampled_again(tmp_path):
    port = free_port()

    async def meanwhile(whole: WholeRun) -> None:
        client = Client(port)
        await client.open()
        first = (await client.ask()).json()["choices"]
        index, num_sampled = client.session["index"], len(whole.engine.requests)
        await whole.kill_orchestrator()
        whole.start_orchestrator()
        await whole.until(lambda: whole.orchestrator.scheduler and whole.orchestrator.scheduler.num_under_way)
        assert (await client.ask()).status_code == (await client.end(reward=1)).status_code == 401
        assert (await client.open(example=index)).status_code == 200
        assert (await client.ask()).json()["choices"] == first
        assert len(whole.engine.requests) == num_sampled
        await client.end(reward=0.5)
        await play_on(whole, port)

    outcome = run(config_of(tmp_path, port), meanwhile=meanwhile)
    assert outcome.error is None
    assert 0.5 in [rollout.reward for rollout in outcome.records[0].rollouts]


async def post_plainly(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 13\r\n\r\n"
    writer.write(head.encode() + b'{"env":"say"}')
    return await reader.read()


def test_a_thousand_clients_are_answered_or_told_to_come_again(tmp_path):
    port = free_port()

    async def flood(environment: Any) -> None:
        runs = [asyncio.create_task(environment.run(RunTask(task=f"{i}.0", index=i), says("x"))) for i in range(9)]
        client = Client(port)
        await client.open()
        answers = await asyncio.gather(*(post_plainly(port) for _ in range(1000)))
        given = Counter(answer[9:12] for answer in answers)
        assert given == {b"200": 3, b"429": 997}  # `max_concurrent`
        assert all(b"retry-after" in answer for answer in answers if answer[9:12] == b"429")
        await client.ask()
        assert (await client.end()).status_code == 400  # neither the client nor the environment has a reward
        await client.end(error="enough")
        assert (await client.open()).status_code == 200
        (done, *_), _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(done.exception(), RolloutFailed)
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    with running(open_toy(tmp_path, write(tmp_path, DATASET), **table(port))) as on:
        on(flood)


@pytest.mark.parametrize(("token", "headers", "status"), [("t" * 40, {}, 401), ("", {"Origin": "http://x"}, 403)])
def test_a_session_is_for_those_who_know_the_token_and_for_no_browser(tmp_path, monkeypatch, token, headers, status):
    monkeypatch.setenv("TRIREME_TOKEN", token)
    port = free_port()
    with running(open_toy(tmp_path, write(tmp_path, DATASET), **table(port))) as on:
        assert on(lambda _: Client(port, **headers).open()).status_code == status


def test_sessions_beyond_this_machine_need_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("TRIREME_TOKEN", raising=False)
    everywhere = {"external": True, "port": free_port(), "host": "0.0.0.0"}
    opening = open_toy(tmp_path, write(tmp_path, DATASET), name="say", agent=everywhere)
    with pytest.raises(ConfigError, match="TRIREME_TOKEN"), running(opening):
        pass
