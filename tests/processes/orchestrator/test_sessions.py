"""A user's own harness plays rollouts: its clients open sessions, call the policy, and post rewards."""

import asyncio
import re
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import pytest

from support.runs.toy_environments import open_toy, running, says, write
from support.runs.whole_run import SAY, WholeRun, build_config, run
from trireme.base.errors import ConfigError
from trireme.base.processes import free_port
from trireme.orchestrator.session.session import Session, cancel_all
from trireme.orchestrator.session.wire import RunTask

AGENT = {"external": True, "port": 0}
DATASET = SAY.partition("    def reward")[0]


@pytest.fixture(autouse=True)
def _own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the port when the test begins: one that was free when tests were collected may be taken by now."""
    monkeypatch.setitem(AGENT, "port", free_port())


class Client:
    def __init__(self, **headers: str) -> None:
        patient = httpx.AsyncHTTPTransport(verify=False, retries=6)
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{AGENT['port']}", timeout=30, headers=headers, transport=patient
        )

    async def open(self, **wanted: Any) -> int:
        for _ in range(60):  # of half a second each, in which no rollout may have begun yet
            answer = await self.http.post("/sessions", json={"env": "say"} | wanted)
            if answer.status_code != 429:
                break
        self.session = answer.json()
        self.key = {"Authorization": f"Bearer {self.session.get('api_key')}"}
        return answer.status_code

    async def ask(self, *messages: dict[str, str]) -> httpx.Response:
        body = {"messages": [*self.session["prompt"], *messages]}
        return await self.http.post(f"{self.session['base_url']}/chat/completions", json=body, headers=self.key)

    async def end(self, **outcome: Any) -> int:
        url = f"/sessions/{self.session['id']}/reward"
        return (await self.http.post(url, json=outcome, headers=self.key)).status_code


def table(**more: Any) -> dict[str, Any]:
    return {"name": "say", "agent": dict(AGENT), "max_concurrent": 4} | more


async def play_on(whole: WholeRun, **outcome: Any) -> None:
    client = Client()
    with suppress(httpx.HTTPError):
        while not whole.records:
            if await client.open() == 200:
                said = (await client.ask()).json()["choices"][0]["message"]
                await client.ask(said, {"role": "user", "content": "and?"})
                assert await client.end(**outcome) == 200


async def repeat_after_a_restart(whole: WholeRun) -> None:
    """A client has its session again after a restart, and no turn is sampled again."""
    client = Client()
    await client.open()
    await client.ask()
    await client.end(error="the sandbox broke")
    rollout = client.session["rollout"].removesuffix("0") + "1"  # the second attempt
    assert await client.open(rollout=rollout) == 200
    first = (await client.ask()).json()["choices"]
    num_sampled = len(whole.engine.requests)
    await whole.kill_orchestrator()
    whole.start_orchestrator()
    assert (await client.ask()).status_code == await client.end(reward=1) == 401
    assert await client.open(rollout=rollout) == 200
    assert (await client.ask()).json()["choices"] == first
    assert len(whole.engine.requests) == num_sampled
    await client.end(reward=0.55)


def test_client_sessions_are_trained_on_with_the_rewards_they_post(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.orchestrator.gateway.sessions.WAIT_S", 0.5)

    async def meanwhile(whole: WholeRun) -> None:
        await repeat_after_a_restart(whole)
        client, odd, silent = Client(), Client(), Client()
        assert await odd.open(example=10_000) == await odd.open(env="x") == 404
        await silent.open()
        await silent.ask()
        await client.open()
        index = client.session["index"]
        assert client.session["example"] == {"prompt": f"say {index}", "answer": str(index)}
        assert await client.end(reward=1) == 400  # without a turn
        await client.ask()
        for wrong in ({"reward": "1"}, {"reward": 1e31}, {"rewrd": 1}):
            assert await client.end(**wrong) == 400
        state = await client.http.get(f"/sessions/{client.session['id']}", headers=client.key)
        assert state.json() == {"state": "open", "num_turns": 1}
        await odd.open()
        assert await odd.end(error="the sandbox broke") == await client.end(reward=0.75) == 200
        assert (await client.ask()).status_code == await client.end(reward=1) == 403
        await asyncio.gather(play_on(whole, reward=0.25, metrics={"steps": 2}), play_on(whole))

    env = [{"id": str(tmp_path / "toy.py")} | table(rollout_timeout_s=6.0)]
    outcome = run(
        build_config(tmp_path, max_steps=1, max_async_level=0, resume=True, orchestrator={"env": env}),
        meanwhile=meanwhile,
    )
    assert outcome.error is None
    (batch,) = outcome.records
    assert len(batch.rollouts) == 8
    assert {(len(rollout.samples), rollout.stop) for rollout in batch.rollouts} == {(1, "client_ended")}
    seen = {rollout.reward: rollout for rollout in batch.rollouts}
    assert (seen[0.75].num_turns, seen[0.25].num_turns, len(seen[0.25].completion)) == (1, 2, 3)
    assert seen[0.25].metrics["steps"] == 2
    assert (len(seen) > 3, seen[0.55].attempt) == (True, 1)  # others are the environment's own
    reasons = str([dropped.reason for dropped in batch.dropped])
    assert sorted(re.findall("sandbox|timeout_s|failed before", reasons)) == ["failed before", "sandbox", "timeout_s"]


def test_hundreds_of_clients_are_answered_or_told_to_come_again(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.orchestrator.gateway.sessions.WAIT_S", 0.5)

    async def post() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", AGENT["port"])
        writer.write(b"POST /sessions HTTP/1.0\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n" + b'{"env":"say"}')
        return await reader.read()

    async def flood(environment: Any) -> None:
        sessions = [Session(RunTask(task=f"{i}.0", index=i), says("x")) for i in range(9)]
        runs = [asyncio.create_task(environment.run(session)) for session in sessions]
        answers = await asyncio.gather(*(post() for _ in range(400)))
        assert Counter(answer[9:12] for answer in answers) == {b"200": 4, b"429": 396}  # `max_concurrent`
        assert sum(b"retry-after" in answer for answer in answers) == 396
        await cancel_all(runs)

    with running(open_toy(tmp_path, write(tmp_path, DATASET), **table())) as on:
        on(flood)


@pytest.mark.parametrize(("token", "headers", "status"), [("t" * 40, {}, 401), ("", {"Origin": "http://x"}, 403)])
def test_a_session_is_for_those_who_know_the_token_and_for_no_browser(tmp_path, monkeypatch, token, headers, status):
    monkeypatch.setenv("TRIREME_TOKEN", token)
    with running(open_toy(tmp_path, write(tmp_path, DATASET), **table())) as on:
        assert on(lambda _: Client(**headers).open()) == status
    if not token:
        agent = AGENT | {"host": "0.0.0.0"}
        everywhere = open_toy(tmp_path, str(tmp_path / "toy.py"), agent=agent)
        with pytest.raises(ConfigError, match="TRIREME_TOKEN"), running(everywhere):
            pass
