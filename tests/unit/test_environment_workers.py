"""Environment workers: real processes, with plain environments in this interpreter and verifiers in one of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from trireme.base.errors import ConfigError, PeerDied
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments import pool
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.wire import Ask, Done, Reply, RunTask, ToolCall
from trireme.orchestrator.environments.worker_process import RolloutFailed

REPOSITORY = Path(__file__).parents[2]
ECHO = """
    def dataset(size=20):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def reward(completion, answer):
        return float(completion == answer)
"""


def write(folder: Path, code: str, name: str = "toy.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


def says(text: str) -> Callable[[Ask], Awaitable[Reply]]:
    async def ask(question: Ask) -> Reply:
        return Reply(content=text, finish_reason="stop", prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])

    return ask


def with_environment(
    folder: Path, id: str, use: Callable[[Environment], Awaitable[Any]], *, load_timeout_s: float = 60, **config: Any
) -> Any:
    """Opens the environment, runs `use` on it, and closes it, in an event loop of its own."""

    async def main() -> Any:
        settings = EnvironmentConfig(id=id, **config)
        async with open_environment(settings, logs=folder / "logs", load_timeout_s=load_timeout_s) as environment:
            return await asyncio.wait_for(use(environment), 60)

    return asyncio.run(main())


async def run_all(environment: Environment, ask: Callable[[Ask], Awaitable[Reply]], count: int) -> list[Any]:
    tasks = [environment.run(RunTask(task=f"r{i}", index=i), ask) for i in range(count)]
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_rollout_comes_back_scored_under_its_own_name(tmp_path):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (5, 0)
        return await environment.run(RunTask(task="g1-r3", index=4), says("4"))

    done = with_environment(tmp_path, write(tmp_path, ECHO), use, args={"size": 5})
    assert isinstance(done, Done)
    assert (done.task, done.reward, done.answer, done.stop, done.truncated) == ("g1-r3", 1.0, "4", "stop", False)
    assert done.prompt == [{"role": "user", "content": "say 4"}]
    assert done.completion == [{"role": "assistant", "content": "4"}]


def test_rewards_may_be_async_with_named_metrics_and_any_field_of_the_example(tmp_path):
    code = """
        def load_environment(bonus):
            async def reward(completion, answer, level):
                return {"reward": bonus + level, "length": len(completion)}
            messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
            return {"dataset": [{"prompt": messages, "answer": 7, "level": 2}], "reward": reward,
                    "eval_dataset": [{"prompt": "eval", "answer": None, "level": 0}]}
    """

    async def use(environment):
        train = await environment.run(RunTask(task="t", index=0), says("four"))
        held_out = await environment.run(RunTask(task="e", split="eval", index=0), says("four"))
        return train, held_out

    train, held_out = with_environment(tmp_path, write(tmp_path, code), use, args={"bonus": 0.5})
    assert (train.reward, train.metrics, train.answer, len(train.prompt)) == (2.5, {"length": 4.0}, "7", 2)
    assert (held_out.reward, held_out.answer, held_out.prompt[0]["content"]) == (0.5, None, "eval")


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


@pytest.mark.parametrize(
    "value", ["float('nan')", "-float('inf')", "None", "'1.0'", "[1.0]", "{'reward': 1, 'm': None}"]
)
def test_a_reward_that_is_no_finite_number_is_an_error_and_never_a_zero(tmp_path, value):
    code = f"def dataset(): return [{{'prompt': 'p'}}]\ndef reward(completion): return {value}\n"

    async def use(environment):
        with pytest.raises(RolloutFailed, match=r"Reward function `(reward|m)` returned .* expected a finite number"):
            await environment.run(RunTask(task="r", index=0), says("x"))

    with_environment(tmp_path, write(tmp_path, code), use)


def test_a_reward_function_that_no_example_can_feed_is_found_at_load(tmp_path):
    code = "def dataset(): return [{'prompt': 'p', 'answer': 'a'}]\ndef reward(completion, truth): return 0.0\n"
    with pytest.raises(ConfigError, match="`reward` asks for truth - expected parameters among answer, completion"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None)


def test_what_an_environment_prints_goes_to_its_log_and_not_into_the_wire(tmp_path):
    code = "import os\nprint('{\"type\":\"done\"}', flush=True)\nos.system('echo from a child')\n" + textwrap.dedent(
        ECHO
    )

    async def use(environment):
        return await environment.run(RunTask(task="r", index=1), says("1"))

    assert with_environment(tmp_path, write(tmp_path, code), use, name="toy").reward == 1.0
    assert "from a child" in (tmp_path / "logs/environment-toy-0.stdout").read_text()


def test_text_that_json_cannot_hold_arrives_all_the_same(tmp_path):
    code = """
        def dataset():
            return [{"prompt": "half a pair: \\ud83d", "answer": "é", "info": {"x": float("nan"), 3: {1, 2}}}]
        def reward(completion, answer):
            return 1.0
    """

    async def use(environment):
        return await environment.run(RunTask(task="r", index=0), says("\u2028 line \r\n separator"))

    done = with_environment(tmp_path, write(tmp_path, code), use)
    assert done.completion[0]["content"] == "\u2028 line \r\n separator"
    assert (done.answer, done.info["x"], done.reward) == ("é", "nan", 1.0)


def test_a_worker_killed_in_mid_rollout_costs_no_rollout(tmp_path):
    asked: list[str] = []

    async def use(environment):
        everyone_asked = asyncio.Event()

        async def ask(question: Ask) -> Reply:
            asked.append(question.task)
            if len(asked) == 10:
                everyone_asked.set()
            if len(asked) <= 10:
                await asyncio.sleep(30)  # the engine is slow; the worker's death must end this wait
            return Reply(content="x", finish_reason="stop")

        running = asyncio.create_task(run_all(environment, ask, 10))
        await everyone_asked.wait()
        start = time.monotonic()
        os.kill(environment._workers[0].pid, signal.SIGKILL)
        outcomes = await running
        return outcomes, time.monotonic() - start, environment.num_restarts

    outcomes, seconds, num_restarts = with_environment(tmp_path, write(tmp_path, ECHO), use)
    assert [outcome.task for outcome in outcomes] == [f"r{i}" for i in range(10)]
    assert sorted(asked) == sorted(2 * [f"r{i}" for i in range(10)])
    assert num_restarts == 1
    assert seconds < 10


@pytest.mark.parametrize("point", ["environment.asked", "environment.scored"])
def test_a_worker_that_dies_at_a_point_of_the_protocol_costs_no_rollout(tmp_path, monkeypatch, point):
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={tmp_path}")

    async def use(environment):
        first = environment._workers[0].pid
        (tmp_path / point).write_text("kill")
        outcomes = await run_all(environment, says("x"), 8)
        while not environment.num_restarts:  # its last rollout may have been in before it died
            await asyncio.sleep(0.01)
        return outcomes, first, environment.num_restarts

    outcomes, first, num_restarts = with_environment(tmp_path, write(tmp_path, ECHO), use)
    assert (tmp_path / f"{point}.reached").read_text() == str(first)
    assert [outcome.task for outcome in outcomes] == [f"r{i}" for i in range(8)]
    assert num_restarts == 1


def test_rollouts_without_a_worker_wait_by_one_name_and_with_a_deadline(tmp_path):
    waits = Waits("orchestrator", tmp_path / "logs")
    code = """
        import pathlib, time
        marker = pathlib.Path(__file__).with_name("loaded")
        if marker.exists():
            time.sleep(1)
        marker.touch()
    """

    async def main():
        settings = EnvironmentConfig(id=write(tmp_path, textwrap.dedent(code) + textwrap.dedent(ECHO)), name="slow")
        async with open_environment(settings, logs=tmp_path / "logs", load_timeout_s=60, waits=waits) as environment:
            os.kill(environment._workers[0].pid, signal.SIGKILL)
            while environment._workers[0].is_ready:
                await asyncio.sleep(0.01)
            running = asyncio.create_task(run_all(environment, says("x"), 5))
            await asyncio.sleep(0.2)
            return [(wait.what, wait.deadline_s, wait.log) for wait in waits.now()], await running

    named, outcomes = asyncio.run(main())
    assert named == [("a worker of environment 'slow'", 6 * 90.0, tmp_path / "logs/environment-slow-0.stdout")]
    assert all(isinstance(outcome, Done) for outcome in outcomes)
    assert waits.now() == []


def test_an_environment_whose_workers_never_come_back_says_so_at_the_deadline(tmp_path):
    async def use(environment):
        environment._longest_absence_s = 0.2
        os.kill(environment._workers[0].pid, signal.SIGKILL)
        while environment._workers[0].is_ready:
            await asyncio.sleep(0.01)
        return await run_all(environment, says("x"), 3)

    code = """
        import pathlib, time
        marker = pathlib.Path(__file__).with_name("loaded")
        if marker.exists():
            time.sleep(30)
        marker.touch()
    """
    outcomes = with_environment(tmp_path, write(tmp_path, textwrap.dedent(code) + textwrap.dedent(ECHO)), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert "orchestrator waits 0 s for a worker of environment" in str(outcomes[0])


def test_a_rollout_that_kills_its_worker_is_dropped_and_those_beside_it_are_not(tmp_path):
    code = (
        ECHO
        + """
    import os
    async def reward(completion, answer):
        import asyncio
        if answer == "3":
            os._exit(7)
        await asyncio.sleep(0.3)
        return 1.0
    """
    )

    async def use(environment):
        alone = await asyncio.gather(environment.run(RunTask(task="a", index=3), says("x")), return_exceptions=True)
        return alone + await run_all(environment, says("x"), 8)

    alone, *together = with_environment(tmp_path, write(tmp_path, code), use)
    assert isinstance(alone, RolloutFailed)
    assert alone.stage == "worker"
    assert "worker died twice" in alone.error
    assert "exited with code 7" in alone.error
    assert [i for i, outcome in enumerate(together) if isinstance(outcome, RolloutFailed)] == [3]
    assert all(outcome.reward == 1.0 for i, outcome in enumerate(together) if i != 3)


def test_an_environment_that_cannot_be_restarted_says_so_to_all_who_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "MAX_RESTARTS", 1)
    marker = tmp_path / "loaded"
    code = f"""
        import pathlib
        marker = pathlib.Path({str(marker)!r})
        if marker.exists():
            raise RuntimeError("no memory left")
        marker.touch()
    """

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            os.kill(environment._workers[0].pid, signal.SIGKILL)
            return await asyncio.sleep(30)

        return await run_all(environment, ask, 3)

    outcomes = with_environment(tmp_path, write(tmp_path, textwrap.dedent(code) + textwrap.dedent(ECHO)), use)
    assert [type(outcome) for outcome in outcomes] == [PeerDied] * 3
    assert "All 1 workers" in str(outcomes[0])


def test_an_environment_that_raises_on_load_is_a_configuration_error_that_names_it(tmp_path):
    code = "def load_environment(level): raise KeyError('no such level')\n"
    with pytest.raises(ConfigError) as raised:
        with_environment(tmp_path, write(tmp_path, code, "broken.py"), lambda environment: None, args={"level": 9})
    message = str(raised.value)
    assert "broken.py" in message
    assert "KeyError: 'no such level'" in message
    assert "load_environment(**{'level': 9})" in message
    assert str(tmp_path / "logs") in message


def test_an_environment_that_ends_its_process_on_load_is_a_configuration_error(tmp_path):
    code = "import os, sys\nprint('licence expired', file=sys.stderr, flush=True)\nos._exit(3)\n"
    with pytest.raises(ConfigError, match=r"exited with code 3(.|\n)*licence expired"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None)


def test_an_environment_that_hangs_on_load_meets_its_deadline_and_its_log_is_named(tmp_path):
    code = "import time\nprint('fetching the data', flush=True)\ntime.sleep(60)\n"
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"not loaded after 1 s(.|\n)*fetching the data(.|\n)*environment-slow-0"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None, name="slow", load_timeout_s=1)
    assert time.monotonic() - start < 5


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


def test_workers_that_load_different_examples_are_refused(tmp_path):
    code = ECHO + "\n    import os\n    def dataset(): return [{'prompt': 'p', 'answer': ''}] * os.getpid()\n"
    with pytest.raises(ConfigError, match="data sets of different sizes"):
        with_environment(tmp_path, write(tmp_path, code), lambda environment: None, num_workers=2)


def test_examples_drawn_without_a_seed_are_the_same_in_every_worker(tmp_path):
    code = ECHO + "\n    import random\n    def dataset(): return [{'prompt': 'p', 'answer': str(random.random())}]\n"

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            await asyncio.sleep(0.05)  # both at once, so that each worker gets one
            return Reply(content="x", finish_reason="stop")

        return await asyncio.gather(*(environment.run(RunTask(task=f"{i}", index=0), ask) for i in range(2)))

    first, second = with_environment(tmp_path, write(tmp_path, code), use, num_workers=2)
    assert first.answer == second.answer


def test_no_worker_and_no_child_of_it_outlives_an_orchestrator_that_is_killed(tmp_path):
    environment = write(
        tmp_path,
        ECHO
        + """
    import multiprocessing, os, pathlib, time
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    child.start()
    time.sleep(0.2)
    """
        + f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n",
    )
    orchestrator = write(
        tmp_path,
        f"""
        import asyncio
        from pathlib import Path
        from trireme.config.orchestrator import Environment
        from trireme.orchestrator.environments.pool import open_environment

        async def main():
            async with open_environment(Environment(id={environment!r}), logs=Path({str(tmp_path / "logs")!r})):
                print("open", flush=True)
                await asyncio.sleep(300)

        asyncio.run(main())
        """,
        "orchestrator.py",
    )
    with subprocess.Popen([sys.executable, orchestrator], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"open\n"
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        process.kill()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.05)
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- verifiers, in a virtual environment of its own -------------------------------------------------------------------

TOYS = """
import verifiers as vf
from datasets import Dataset


def load_environment(which, **args):
    return globals()[which](**args)


def rows(count=20):
    return Dataset.from_list([{"question": f"q{i}", "answer": str(i)} for i in range(count)])


def raising():
    def one_in_ten(completion, answer):
        return 1 / (int(answer) % 10)
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[one_in_ten]))


def returning(value):
    def judge(completion, **kwargs):
        return {"none": None, "nan": float("nan"), "text": "1.0"}[value]
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[judge], weights=[0.0]))


def group_reward():
    def best(completions) -> list[float]:
        return [0.0 for _ in completions]
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[best]))


class Counting(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = [message for message in messages if message.role == "assistant"]
        if len(said) == 3:
            state["final_env_response"] = [vf.UserMessage(content="enough")]
            return state["final_env_response"]
        return [vf.UserMessage(content=f"again {len(said)}")]


def multi_turn(**args):
    def tokens(state):
        steps = [step["tokens"] for step in state["trajectory"]]
        return sum(sum(step["completion_logprobs"]) + len(step["prompt_ids"]) for step in steps)
    return Counting(dataset=rows(), rubric=vf.Rubric(funcs=[tokens]), **args)


def tools():
    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b
    def right(completion, answer):
        return float(completion[-1].content == "3")
    return vf.ToolEnv(dataset=rows(), tools=[add], rubric=vf.Rubric(funcs=[right]))


def group():
    def one(completion): return 1.0
    def two(completion): return 2.0
    members = [vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric(funcs=[func])) for func in (one, two)]
    return vf.EnvGroup(envs=members, env_names=["first", "second"])


def picture():
    prompt = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": prompt}]), rubric=vf.Rubric(funcs=[lambda **k: 1.0]))


class Parallel(vf.SingleTurnEnv):
    async def setup_state(self, state):
        import asyncio
        prompts = [[vf.UserMessage(content=f"side {i}")] for i in range(3)]
        replies = await asyncio.gather(*(self.get_model_response(state, prompt) for prompt in prompts))
        state["sides"] = [reply.message.content for reply in replies]
        return state


def parallel():
    def count(state): return float(len(state["sides"]))
    return Parallel(dataset=rows(), rubric=vf.Rubric(funcs=[count]))


def hasty():
    def fixed(completion): return 0.25
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[fixed]), timeout_seconds=0.3)
"""
TOY_PROJECT = """
[build-system]
requires = ["hatchling==1.33.0"]
build-backend = "hatchling.build"
[project]
name = "trireme-toys"
version = "0"
requires-python = ">=3.11"
dependencies = ["verifiers==0.2.0"]
[tool.hatch.build.targets.wheel]
include = ["trireme_toys.py"]
"""


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Callable[..., Any]:
    """Runs `use` on one of the toy environments; the first call installs them, with uv."""
    folder = tmp_path_factory.mktemp("toys")
    package = folder / "environments" / "trireme_toys"
    package.mkdir(parents=True)
    (package / "pyproject.toml").write_text(TOY_PROJECT)
    (package / "trireme_toys.py").write_text(TOYS)

    def run(which: str, use: Callable[[Environment], Awaitable[Any]], **args: Any) -> Any:
        async def main() -> Any:
            config = EnvironmentConfig(id="trireme-toys", args={"which": which, **args})
            async with open_environment(
                config, logs=folder / "logs", root=folder / "environments", cache=folder / "cache", load_timeout_s=120
            ) as environment:
                return await asyncio.wait_for(use(environment), 60)

        return asyncio.run(main())

    return run


@pytest.mark.e2e
def test_verifiers_swallows_what_a_reward_raises_and_we_do_not(toys):
    async def use(environment):
        return await run_all(environment, says("x"), 20)

    outcomes = toys("raising", use)
    assert [isinstance(outcome, RolloutFailed) for outcome in outcomes] == [i % 10 == 0 for i in range(20)]
    assert (outcomes[0].stage, outcomes[0].error) == ("score", "ZeroDivisionError: division by zero")
    assert outcomes[3].reward == pytest.approx(1 / 3)


@pytest.mark.e2e
@pytest.mark.parametrize("value", ["none", "nan", "text"])
def test_a_verifiers_reward_that_is_no_number_is_an_error_even_with_weight_zero(toys, value):
    async def use(environment):
        with pytest.raises(RolloutFailed, match=r"score: RewardError: Reward function `judge` returned"):
            await environment.run(RunTask(task="r", index=0), says("x"))

    toys("returning", use, value=value)


@pytest.mark.e2e
def test_a_verifiers_reward_over_a_group_is_refused_at_load(toys):
    with pytest.raises(ConfigError, match="A reward function among best scores a whole group"):
        toys("group_reward", lambda environment: None)


@pytest.mark.e2e
def test_a_multi_turn_environment_runs_unmodified_and_sees_tokens_and_logprobs(toys):
    questions: list[Ask] = []

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            questions.append(question)
            turn = len(questions)
            return Reply(
                content=f"turn {turn}",
                finish_reason="stop",
                prompt_ids=[7] * (10 * turn),
                completion_ids=[8, 9],
                logprobs=[-0.5, -0.25],
            )

        return await environment.run(RunTask(task="r", index=2, sampling={"temperature": 0.7}), ask)

    done = toys("multi_turn", use)
    assert [len(question.messages) for question in questions] == [1, 3, 5]
    assert questions[2].messages == [
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "turn 1"},
        {"role": "user", "content": "again 1"},
        {"role": "assistant", "content": "turn 2"},
        {"role": "user", "content": "again 2"},
    ]
    assert {question.sampling["temperature"] for question in questions} == {0.7}
    assert [message["role"] for message in done.completion] == ["assistant", "user"] * 3
    assert done.reward == 10 + 20 + 30 - 3 * 0.75
    assert (done.metrics["num_turns"], done.stop, done.truncated) == (3.0, "has_final_env_response", False)


@pytest.mark.e2e
def test_the_runs_own_turn_limit_ends_and_scores_a_rollout(toys):
    async def use(environment):
        return await environment.run(RunTask(task="r", index=0, max_turns=2), says("x"))

    done = toys("multi_turn", use)
    assert (done.metrics["num_turns"], done.stop) == (2.0, "max_turns_reached")


@pytest.mark.e2e
def test_a_conversation_that_outgrows_the_context_is_truncated_and_scored(toys):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            if len(question.messages) > 1:
                return Reply(error="530 tokens, the model takes 512", error_kind="overlong_prompt")
            return Reply(content="x", finish_reason="stop", prompt_ids=[1], completion_ids=[2], logprobs=[-1.0])

        return await environment.run(RunTask(task="r", index=0), ask)

    done = toys("multi_turn", use)
    assert (done.stop, done.truncated, done.reward, len(done.completion)) == ("prompt_too_long", True, 0.0, 1)


@pytest.mark.e2e
def test_an_engine_error_in_verifiers_fails_the_rollout_unscored(toys):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return Reply(error="the engine died", error_kind="engine")

        with pytest.raises(RolloutFailed, match="ModelError: the engine died") as raised:
            await environment.run(RunTask(task="r", index=0), ask)
        assert raised.value.stage == "rollout"

    toys("multi_turn", use)


@pytest.mark.e2e
@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_cancelled_turn_ends_a_verifiers_rollout(toys, limit):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return Reply(error="too old", error_kind="cancelled")

        with pytest.raises(RolloutFailed, match="rollout: "):
            await environment.run(RunTask(task="r", index=0), ask)

    toys("multi_turn", use, timeout_seconds=limit)


@pytest.mark.e2e
def test_an_empty_completion_is_scored(toys):
    async def use(environment):
        return await environment.run(RunTask(task="r", index=3), says(""))

    assert toys("raising", use).reward == pytest.approx(1 / 3)


@pytest.mark.e2e
def test_tool_calls_are_converted_both_ways(toys):
    questions: list[Ask] = []

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            questions.append(question)
            if len(questions) == 1:
                call = ToolCall(id="c1", name="add", arguments='{"a": 1, "b": 2}')
                return Reply(tool_calls=[call], finish_reason="tool_calls")
            return Reply(content=question.messages[-1]["content"], finish_reason="stop")

        return await environment.run(RunTask(task="r", index=0), ask)

    done = toys("tools", use)
    assert questions[0].tools[0]["function"]["name"] == "add"
    assert set(questions[0].tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert questions[1].messages[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert (done.reward, done.metrics["add_calls"], done.stop) == (1.0, 1.0, "no_tools_called")


@pytest.mark.e2e
def test_a_group_of_environments_scores_each_example_with_its_own_rubric(toys):
    async def use(environment):
        assert environment.num_train == 4
        return await run_all(environment, says("x"), 4)

    outcomes = toys("group", use)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 2.0, 2.0]
    assert [outcome.info["env_id"] for outcome in outcomes] == ["first", "first", "second", "second"]


@pytest.mark.e2e
def test_an_image_in_a_prompt_is_refused_in_words(toys):
    async def use(environment):
        with pytest.raises(RolloutFailed, match="a part of type 'image_url' - expected text only"):
            await environment.run(RunTask(task="r", index=0), says("x"))

    toys("picture", use)


@pytest.mark.e2e
def test_turns_that_an_environment_asks_for_at_once_are_answered_at_once(toys):
    running = most = 0

    async def use(environment):
        async def ask(question: Ask) -> Reply:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1
            return Reply(content=question.messages[-1]["content"], finish_reason="stop")

        return await environment.run(RunTask(task="r", index=0), ask)

    assert toys("parallel", use).reward == 3.0
    assert most == 3


@pytest.mark.e2e
def test_an_environment_that_stops_waiting_for_a_turn_ends_the_turn(toys):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            return await asyncio.sleep(60)

        return await asyncio.wait_for(environment.run(RunTask(task="r", index=0), ask), 10)

    done = toys("hasty", use)
    assert (done.stop, done.reward) == ("timeout_reached", 0.25)


@pytest.mark.e2e
def test_the_reverse_text_package_rewards_the_reversed_text(tmp_path):
    async def use(environment):
        async def ask(question: Ask) -> Reply:
            text = question.messages[-1]["content"]
            return Reply(content=f"<reversed_text>{text[::-1]}</reversed_text>", finish_reason="stop")

        assert (environment.num_train, environment.num_eval) == (50, 10)
        right = await environment.run(RunTask(task="right", index=49), ask)
        wrong = await environment.run(RunTask(task="wrong", split="eval", index=9), says("<reversed_text>"))
        return right, wrong

    async def main():
        config = EnvironmentConfig(id="primeintellect/reverse-text", args={"num_train": 50, "num_eval": 10})
        root = REPOSITORY / "environments"
        async with open_environment(config, logs=tmp_path / "logs", root=root, cache=tmp_path / "cache") as environment:
            return await use(environment)

    right, wrong = asyncio.run(main())
    assert (right.reward, right.metrics["exact_match"], right.answer) == (1.0, 1.0, right.prompt[-1]["content"][::-1])
    assert wrong.reward == 0.0
