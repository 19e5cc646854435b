"""v1 environments of verifiers 0.4, unmodified, in a virtual environment of their own."""

import asyncio

import pytest

from support.runs.toy_environments import (
    asked_and_done,
    fills_up,
    in_turn,
    never,
    noting,
    open_package,
    packages_folder,
    refuses,
    run_all,
    run_one,
    says,
    talk,
)
from trireme.algo.data.order import ENDLESS
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments import pool
from trireme.orchestrator.session.session import RolloutFailed
from trireme.orchestrator.session.wire import Ask, Done, Load, Reply

pytestmark = pytest.mark.xdist_group("packages")  # one process, so that tests share workers
WORD, LONGER, OFTEN, UNJUDGEABLE, NAN, TWICE = range(6)


async def echo(question: Ask) -> Reply:
    text = question.messages[-1]["content"].removeprefix("say: ")
    return Reply(content=text, finish_reason="stop", prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1.0, -1.0])


@pytest.mark.usefixtures("on")  # workers are forked
def test_a_v1_environment_runs_beside_a_v0_one(tmp_path_factory):
    folder = packages_folder(tmp_path_factory)

    async def main() -> tuple[dict, dict, list, Done]:
        opening = open_package(folder, "v1-echo", system="be brief")
        async with opening as new, open_package(folder, "trireme-toys", which="raising") as old:
            assert (new.num_train, old.num_train, new.group_rewards) == (6, 20, False)
            of_new = [run_one(new, echo, i % 2, task=f"r{i}") for i in range(8)]
            *new_outcomes, old_outcome = await asyncio.gather(*of_new, run_one(old, echo, 3))
            return new.versions, old.versions, new_outcomes, old_outcome

    new_versions, old_versions, outcomes, old_outcome = asyncio.run(main())
    assert (new_versions["verifiers"], old_versions["verifiers"]) == ("0.4.0", "0.2.0")
    assert [outcome.reward for outcome in outcomes] == [1.5, 1.0] * 4
    assert old_outcome.reward == pytest.approx(1 / 3)
    assert outcomes[1].metrics == {"echoes": 1.0, "is_short": 0.0, "length": 18.0, "num_turns": 1.0}
    first = outcomes[0]
    assert first.prompt == [{"role": "system", "content": "be brief"}, *talk("say: word")]
    assert first.completion == [{"role": "assistant", "content": "word"}]
    assert (first.task, first.answer, first.example_id, first.truncated) == ("r0", "word", 0, False)


def test_verifiers_v1_turns_carry_the_sampling_of_the_rollout(on):
    noted, questions = noting(echo)

    cut_off = in_turn(Reply(content="", finish_reason="length", completion_ids=[1] * 7))

    async def use(environment):
        sampling = {"temperature": 0.5, "top_k": 3, "max_tokens": 7}
        full, cut = await run_one(environment, fills_up(echo), OFTEN), await run_one(environment, cut_off, WORD)
        return full, cut, await run_one(environment, noted, OFTEN, max_turns=3, sampling=sampling)

    full, cut, limited = on("v1-echo", use)
    assert [len(question.messages) for question in questions] == [1, 3, 5]
    assert questions[2].messages == talk("say: often", "often", "again", "again", "again")
    assert all(question.sampling == {"temperature": 0.5, "top_k": 3, "max_tokens": 7} for question in questions)
    assert (limited.stop, limited.truncated, limited.metrics["num_turns"]) == ("max_turns", True, 3.0)
    assert (full.stop, full.truncated, full.reward, len(full.completion)) == ("prompt_too_long", True, 1.5, 1)
    assert (cut.truncated, cut.reward, cut.completion[0]["content"]) == (True, 0.5, "")


def test_a_picture_of_the_package_is_shown_and_one_outside_is_not_read(on):
    asked, done = on("v1-echo", asked_and_done, picture="shown.png")
    assert asked[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert (done.reward, done.prompt) == (1.5, asked)
    with pytest.raises(RolloutFailed, match="expected data:image"):
        on("v1-echo", asked_and_done, picture="../trireme_toys/shown.png")


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_programs_of_v1_ask_in_the_dialect_of_their_sdk(on, dialect):
    noted, questions = noting(echo)
    agent = {"harness": {"id": "v1_harness", "dialect": dialect}}
    done = on("v1-echo", lambda environment: run_one(environment, noted, WORD), system="be brief", agent=agent)
    said = [{"role": "system", "content": "be brief"}, *talk("say: word")]
    assert (done.reward, done.prompt, questions[0].messages) == (1.5, said, said)


def test_trouble_in_v1_costs_its_rollout_and_is_no_zero(on):
    async def use(environment):
        outcomes = await run_all(environment, says("word"), 6)
        engine = run_one(environment, refuses("the engine died"), WORD)
        outcomes += await asyncio.gather(engine, return_exceptions=True)
        slow = asyncio.create_task(run_one(environment, never, WORD))
        await asyncio.sleep(0)
        slow.cancel()
        return outcomes, await run_one(environment, echo, WORD)

    outcomes, after = on("v1-echo", use)
    failed = {place: each for place, each in enumerate(outcomes) if isinstance(each, RolloutFailed)}
    stages = {UNJUDGEABLE: "score", NAN: "score", 6: "rollout"}
    assert {place: each.stage for place, each in failed.items()} == stages
    assert "ValueError: this cannot be judged" in failed[UNJUDGEABLE].error
    assert 'raise ValueError("this cannot be judged")' in failed[UNJUDGEABLE].traceback
    assert "`echoes` returned nan - expected a finite number" in failed[NAN].error
    assert "the engine died" in failed[6].error
    assert after.reward == 1.5


def test_each_run_of_an_agent_asks_on_its_own_and_has_its_own_reward(on):
    replies = [Reply(content=text, finish_reason="stop") for text in ("twice", "something else")]
    ask, questions = noting(in_turn(*replies))
    done = on("v1-echo", lambda environment: run_one(environment, ask, TWICE))
    assert sorted((run.agent, run.reward) for run in done.runs) == [("agent", 0.0), ("agent", 1.5)]
    assert {run.trace for run in done.runs} == {question.trace for question in questions}
    assert (done.reward, done.metrics["agent/reward"], done.metrics["agent/echoes"]) == (0.75, 0.75, 0.5)


def test_tasks_of_an_infinite_taskset_are_the_same_wherever_they_are_drawn(on, tmp_path_factory):
    async def ask_for(environment, places) -> list[str]:
        assert environment.num_train == ENDLESS
        return [(await run_one(environment, echo, place)).answer for place in places]

    drawn = on("v1-echo", lambda environment: ask_for(environment, [0, 1, 4200, 2]), endless=True)

    async def in_another_worker() -> list[str]:
        async with open_package(packages_folder(tmp_path_factory), "v1-echo", endless=True) as environment:
            return await ask_for(environment, [2, 4200])

    assert len(set(drawn)) == 4
    assert asyncio.run(in_another_worker()) == [drawn[3], drawn[2]]


def test_a_model_without_an_endpoint_is_refused_at_load(on):
    with pytest.raises(ConfigError, match="Agent 'agent' names the model 'gpt' and no endpoint"):
        on("v1-echo", lambda environment: None, agent={"model": "gpt"})


def test_a_harness_is_refused_as_an_environment(on, monkeypatch):
    monkeypatch.setattr(pool, "Load", lambda **how: Load(**how | {"module": "v1_harness"}))  # it is installed there
    with pytest.raises(ConfigError, match=r'v1_harness is a harness of verifiers v1.*harness = \{ id = "v1_harness"'):
        on("v1-echo", lambda environment: None, harness="alone")
