"""One rollout in a worker: its time, its cancelling, what it may not spoil for others."""

from __future__ import annotations

import asyncio

import pytest

from toy_environments import ECHO, run_all, says, with_environment, write
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask
from trireme.orchestrator.environments.worker_process import RolloutFailed


def test_a_reward_that_raises_on_one_in_ten_costs_only_those_rollouts(tmp_path):
    code = (
        ECHO
        + """
    def reward(completion, answer):
        return 1 / (int(answer) % 10)
    """
    )

    async def use(environment):
        return await run_all(environment, says("x"), 50)

    outcomes = with_environment(tmp_path, write(tmp_path, code), use, args={"size": 50})
    failed = [outcome for outcome in outcomes if isinstance(outcome, RolloutFailed)]
    assert [isinstance(outcome, RolloutFailed) for outcome in outcomes] == [i % 10 == 0 for i in range(50)]
    assert {(f.stage, f.error) for f in failed} == {("score", "ZeroDivisionError: division by zero")}
    assert "1 / (int(answer) % 10)" in failed[0].traceback
    said = next((tmp_path / "logs").glob("*.stdout")).read_text()
    assert [f"of train example {i} failed (score):" in said for i in range(50)] == [i % 10 == 0 for i in range(50)]


def test_a_rollout_past_its_time_is_cancelled_and_the_next_one_runs(tmp_path):
    async def use(environment):
        async def never(question: Ask) -> Reply:
            return await asyncio.sleep(60)

        with pytest.raises(RolloutFailed, match=r"timeout: not finished after 0.3 s"):
            await environment.run(RunTask(task="slow", index=0), never)
        return await environment.run(RunTask(task="quick", index=0), says("0"))

    assert with_environment(tmp_path, write(tmp_path, ECHO), use, rollout_timeout_s=0.3).reward == 1.0


def test_cancelling_the_caller_cancels_the_rollout_in_the_worker(tmp_path):
    noted = tmp_path / "noted"
    code = f"""
        import asyncio, pathlib
        def dataset(): return [{{"prompt": "p"}}]
        async def reward(completion):
            pathlib.Path({str(noted)!r}).write_text("scoring")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pathlib.Path({str(noted)!r}).write_text("cancelled")
                raise
    """

    async def until(words: str) -> None:
        while not noted.exists() or noted.read_text() != words:
            await asyncio.sleep(0.02)

    async def use(environment):
        running = asyncio.create_task(environment.run(RunTask(task="r", index=0), says("x")))
        await until("scoring")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(until("cancelled"), 5)

    with_environment(tmp_path, write(tmp_path, code), use)


def test_a_name_used_again_never_gets_the_answer_of_its_cancelled_first_attempt(tmp_path):
    async def use(environment):
        first_asked = asyncio.Event()

        async def ask_first(question: Ask) -> Reply:
            first_asked.set()
            return await asyncio.sleep(60)

        first = asyncio.create_task(environment.run(RunTask(task="same", index=1), ask_first))
        await first_asked.wait()
        first.cancel()
        return await environment.run(RunTask(task="same", index=2, attempt=1), says("2"))

    assert with_environment(tmp_path, write(tmp_path, ECHO), use).answer == "2"


def test_what_ask_raises_comes_out_of_run(tmp_path):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            raise TimeoutError("all engines are gone")

        with pytest.raises(TimeoutError, match="all engines are gone"):
            await environment.run(RunTask(task="r", index=0), ask)

    with_environment(tmp_path, write(tmp_path, ECHO), use)


@pytest.mark.parametrize("kind", ["engine", "overlong_prompt", "cancelled"])
def test_a_turn_that_the_orchestrator_refuses_fails_the_rollout_with_its_words(tmp_path, kind):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return Reply(error="the words", error_kind=kind)

        with pytest.raises(RolloutFailed, match="the words") as raised:
            await environment.run(RunTask(task="r", index=0), ask)
        assert raised.value.stage == "rollout"

    with_environment(tmp_path, write(tmp_path, ECHO), use)


def test_no_more_rollouts_run_at_once_than_allowed_and_workers_share_them(tmp_path):
    async def use(environment):
        running = most = 0

        async def ask(question: Ask) -> Reply:
            nonlocal running, most
            running += 1
            most = max(most, running)
            assert {worker.num_running for worker in environment._workers} <= {0, 1, 2}
            await asyncio.sleep(0.02)
            running -= 1
            return Reply(content="x", finish_reason="stop")

        await run_all(environment, ask, 20)
        return most

    assert with_environment(tmp_path, write(tmp_path, ECHO), use, max_concurrent=4, num_workers=2) == 4
