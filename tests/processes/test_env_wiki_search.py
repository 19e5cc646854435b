"""The wiki-search environment: its index and pages, and rollouts in a worker, with and without a judge."""

from __future__ import annotations

import json
import math
import re

import pytest

from fake_chat import FakeChat, completion
from toy_environments import import_shipped, run_one, says, shared_packages
from trireme.orchestrator.environments.wire import Ask, Reply, ToolCall
from trireme.orchestrator.environments.worker_process import RolloutFailed

pytestmark = pytest.mark.xdist_group("wiki-search")
index, wiki = import_shipped("wiki_search", "wiki_search_index"), import_shipped("wiki_search", "wiki_search_pages")


def test_searches_score_as_worked_by_hand():
    pages = [index.Page("a", "x", (("y", "cat dog"),)), index.Page("b", "x", (("y", "dog dog dog dog"),))]
    found = index.WikiIndex(pages)
    # lengths: the title counts three times, the heading once: 3 + 1 + 2 = 6 and 3 + 1 + 4 = 8, 7 on average
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert found._score("cat", "a") == pytest.approx(rarity * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 6 / 7)))
    searches = ("the DOG, please", "cat", "bird")
    assert [[page.id for page in found.search(words, 5)] for words in searches] == [["b", "a"], ["a"], []]


def test_every_page_is_found_first_by_its_title_and_every_section_of_it_can_be_read():
    found = index.WikiIndex(wiki.build_pages())
    assert len(found.pages) == len({page.title for page in found.pages.values()}) > 50
    for page in found.pages.values():
        assert found.search(page.title, 1)[0].title == page.title
        sections = found.sections(page.id)
        assert [found.section(section_id) for section_id, _ in sections] == [text for _, text in page.sections]
    for ask in (lambda: found.sections("nowhere"), lambda: found.section("sull:nowhere")):
        with pytest.raises(index.UnknownId, match=r"There is no (page|section) '.*'\. Take an id that \w+ shows"):
            ask()


def test_markdown_becomes_sections_and_those_of_one_name_are_told_apart():
    text = "# Ada\n\n**Ada** was a poet.\n\n## Life\n\nBorn.\n### Youth\nYoung.\n## Empty\n"
    page = index.page_from_markdown("ada", "Ada", text)
    assert page.sections == (("Introduction", "**Ada** was a poet."), ("Life", "Born."), ("Youth", "Young."))
    found = index.WikiIndex([index.Page("p", "P", (("Works", "one"), ("Works", "two")))])
    assert found.sections("p") == [("p:works", "Works"), ("p:works_2", "Works")]
    assert found.section("p:works_2") == "two"


def test_questions_differ_have_answers_on_the_pages_and_are_never_in_both_sets():
    sets = [wiki.build_questions(-1, -1, seed=seed) for seed in range(2)]
    train, evaluation = ({question.text: question.answer for each in sets for question in each[p]} for p in (0, 1))
    assert not train.keys() & evaluation.keys()
    assert sets[0] != sets[1]
    assert sum(map(len, sets[0])) == len(train | evaluation) > 240
    assert [len(part) for part in wiki.build_questions(7, 3, seed=0)] == [7, 3]
    text = "\n".join(page.text for page in wiki.build_pages())
    assert [answer for answer in (train | evaluation).values() if answer not in text] == []


def test_a_question_of_two_steps_is_answered_by_following_its_pages():
    steps = "In which year was the town founded where the inventor of the "
    sections = {(page.title, heading): text for page in wiki.build_pages() for heading, text in page.sections}
    asked = [each for part in wiki.build_questions(-1, -1, seed=0) for each in part if each.text.startswith(steps)]
    assert len(asked) == 16
    for question in asked:
        work = question.text.removeprefix(steps).removesuffix(" was born?").capitalize()
        inventor = sections[work, "Invention"].removeprefix("It was made by ").partition(",")[0]
        town = sections[inventor, "Life"].partition(" was born in ")[2].split()[0]
        assert sections[town, "History"] == f"{town} was founded in the year {question.answer}."


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    with shared_packages(tmp_path_factory) as on:
        yield on


def calls(tool: str, **arguments: str) -> Reply:
    call = ToolCall(id="call00001", name=tool, arguments=json.dumps(arguments))
    return Reply(tool_calls=[call], finish_reason="tool_calls")


def test_a_policy_that_searches_and_reads_finds_answers(on):
    """It reads every section of the best page for the question's words, and answers with the first year in them."""

    async def ask(question: Ask) -> Reply:
        said = [message["content"] for message in question.messages if message["role"] == "tool"]
        if not said:
            return calls("search_pages", query=question.messages[-1]["content"])
        if len(said) == 1:
            return calls("view_sections", page_id=said[0].partition(":")[0])
        ids = [line.rpartition(": ")[0] for line in said[1].splitlines()]
        if len(said) < 2 + len(ids):
            return calls("read_section", section_id=ids[len(said) - 2])
        years = re.findall(r"\b\d{4}\b", "\n".join(said[2:])) if "year" in question.messages[1]["content"] else []
        return Reply(content=f"I have read it.\n{[*years, 'unknown'][0]}", finish_reason="stop")

    async def use(environment):
        assert environment.num_eval > 40
        return [await run_one(environment, ask, i) for i in range(40)]

    done = on("wiki-search", use, num_train=40)
    assert [rollout.metrics["tool_errors"] for rollout in done] == [0.0] * 40
    assert all(rollout.metrics["read_section_calls"] >= 3 for rollout in done)
    assert sum(done.reward for done in done if done.prompt[-1]["content"].startswith("In which year was")) >= 3


def test_wrong_calls_are_answered_with_what_is_wrong_and_counted(on):
    replies = [calls("view_sections", page_id="nowhere"), calls("read_section", page="x"), calls("fly")]
    heard: list[str] = []

    async def ask(question: Ask) -> Reply:
        heard.append(question.messages[-1]["content"])
        return [*replies, Reply(content="x", finish_reason="stop")][len(heard) - 1]

    done = on("wiki-search", lambda environment: run_one(environment, ask), num_train=40)
    assert heard[1] == "Error: There is no page 'nowhere'. Take an id that search_pages shows."
    assert heard[2].startswith("Error: ")
    assert heard[3] == "Error: 'fly'"
    assert (done.metrics["tool_errors"], done.metrics["total_tool_calls"], done.reward) == (3.0, 3.0, 0.0)


def test_the_last_line_is_compared_word_by_word_and_a_list_of_everything_does_not_pay(on):
    async def use(environment):
        answer = (await run_one(environment, says("x"))).answer
        everything = " ".join([*map(str, range(3000, 3030)), answer])
        right = f"<think>maybe 7</think>So:\nThe answer is **{answer.upper()}**."
        texts = [right, answer + "\nor something else", f"{answer}x", everything, ""]
        return [(await run_one(environment, says(text))).reward for text in texts]

    assert on("wiki-search", use, num_train=40) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_judge_decides_and_is_asked_with_question_answer_and_response(on, monkeypatch):
    """It says yes where the response repeats the first word of the reference answer."""
    monkeypatch.setenv("JUDGE_KEY", "k-123")
    judge, verdicts = FakeChat(), ["No, it does not.", "Yes.", "Hmm."]
    judge.answers = lambda number: (200, completion(verdicts[number]))

    async def use(environment):
        wrong = await run_one(environment, says("no idea"))
        right = await run_one(environment, says("First one\nthen other words"))
        with pytest.raises(RolloutFailed, match=r"The judge answered 'Hmm.' - yes or no was expected"):
            await run_one(environment, says("x"))
        return wrong, right

    args = {"judge_model": "fair", "judge_base_url": judge.url, "judge_api_key_var": "JUDGE_KEY", "num_train": 3}
    with judge.running():
        wrong, right = on("wiki-search", use, **args)
    scores = [(done.reward, done.metrics["judge_reward"], done.metrics["right_answer"]) for done in (wrong, right)]
    assert scores == [(0.0, 0.0, 0.0), (1.0, 1.0, 0.0)]
    assert ({request["model"] for request in judge.requests}, judge.keys) == ({"fair"}, {"Bearer k-123"})
    asked = f"Question: {wrong.prompt[-1]['content']}\n\nReference answer: {wrong.answer}\n\nResponse: no idea"
    assert asked in judge.requests[0]["messages"][0]["content"]
