"""The wiki-search environment: its index and pages, and the whole of it in a worker, with and without a judge."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask, ToolCall
from trireme.orchestrator.environments.worker_process import RolloutFailed

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


@pytest.fixture(scope="module", autouse=True)
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS / "wiki_search")
        yield


@pytest.fixture
def index():
    return importlib.import_module("wiki_search_index")


@pytest.fixture
def wiki():
    return importlib.import_module("wiki_search_pages")


def test_a_score_worked_by_hand(index):
    pages = [index.Page("a", "x", (("y", "cat dog"),)), index.Page("b", "x", (("y", "dog dog dog dog"),))]
    found = index.WikiIndex(pages)
    # lengths: the title counts three times, the heading once: 3 + 1 + 2 = 6 and 3 + 1 + 4 = 8, 7 on average
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert found._score("cat", "a") == pytest.approx(rarity * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 6 / 7)))
    assert [page.id for page in found.search("the DOG, please", 5)] == ["b", "a"]
    assert [page.id for page in found.search("cat", 5)] == ["a"]
    assert found.search("bird", 5) == []


def test_a_page_is_found_by_its_title_before_those_that_mention_it(index, wiki):
    found = index.WikiIndex(wiki.build_pages())
    for page in found.pages.values():
        assert found.search(page.title, 1)[0].title == page.title


def test_every_section_of_every_page_can_be_read(index, wiki):
    found = index.WikiIndex(wiki.build_pages())
    for page in found.pages.values():
        sections = found.sections(page.id)
        assert [found.section(section_id) for section_id, _ in sections] == [text for _, text in page.sections]


def test_sections_of_one_name_are_told_apart(index):
    page = index.Page("p", "P", (("Works", "one"), ("Works", "two")))
    found = index.WikiIndex([page])
    assert found.sections("p") == [("p:works", "Works"), ("p:works_2", "Works")]
    assert found.section("p:works_2") == "two"


@pytest.mark.parametrize("ask", [lambda i: i.sections("nowhere"), lambda i: i.section("sull:nowhere")])
def test_an_id_that_there_is_not_says_where_to_find_one(index, wiki, ask):
    with pytest.raises(index.UnknownId, match=r"There is no (page|section) '.*'\. Take an id that \w+ shows"):
        ask(index.WikiIndex(wiki.build_pages()))


def test_markdown_becomes_sections(index):
    text = "# Ada\n\n**Ada** was a poet.\n\n## Life\n\nBorn.\n### Youth\nYoung.\n## Empty\n"
    page = index.page_from_markdown("ada", "Ada", text)
    assert page.sections == (("Introduction", "**Ada** was a poet."), ("Life", "Born."), ("Youth", "Young."))


def test_every_answer_stands_on_a_page(wiki):
    text = "\n".join(page.text for page in wiki.build_pages())
    train, evaluation = wiki.build_questions(-1, -1, seed=0)
    assert len(train) > 200
    assert len(evaluation) > 40
    for question in train + evaluation:
        assert question.answer in text, question


def section(wiki, title: str, heading: str) -> str:
    page = next(page for page in wiki.build_pages() if page.title == title)
    return dict(page.sections)[heading]


def test_a_question_of_two_steps_is_answered_by_following_its_pages(wiki):
    questions = [question for part in wiki.build_questions(-1, -1, seed=0) for question in part]
    steps = "In which year was the town founded where the inventor of the "
    asked = [question for question in questions if question.text.startswith(steps)]
    assert len(asked) == 16
    for question in asked:
        work = question.text.removeprefix(steps).removesuffix(" was born?").capitalize()
        inventor = section(wiki, work, "Invention").removeprefix("It was made by ").partition(",")[0]
        town = section(wiki, inventor, "Life").partition(" was born in ")[2].split()[0]
        assert section(wiki, town, "History") == f"{town} was founded in the year {question.answer}."


def test_no_question_is_in_both_sets_whatever_the_seed(wiki):
    sets = [wiki.build_questions(-1, -1, seed=seed) for seed in range(2)]
    train = {question.text for some, _ in sets for question in some}
    evaluation = {question.text for _, some in sets for question in some}
    assert not train & evaluation
    assert sets[0] != sets[1]
    assert [len(part) for part in wiki.build_questions(7, 3, seed=0)] == [7, 3]


def test_questions_have_one_text_each_and_pages_one_id(wiki):
    questions = [question.text for part in wiki.build_questions(-1, -1, seed=0) for question in part]
    ids = [page.id for page in wiki.build_pages()]
    assert len(set(questions)) == len(questions)
    assert len(set(ids)) == len(ids) > 50


# --- in a worker ------------------------------------------------------------------------------------------------------


class Judge(BaseHTTPRequestHandler):
    """Says yes where the response repeats the reference answer's first word, or what it is told to say."""

    fixed: str | None = None
    heard: list[dict] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append({"model": body["model"], "key": self.headers["Authorization"], **body["messages"][0]})
        prompt = body["messages"][0]["content"]
        reference, _, response = prompt.partition("Reference answer: ")[2].partition("\n\nResponse: ")
        verdict = self.fixed or ("Yes." if reference.split()[0] in response else "No, it does not.")
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": verdict}}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_) -> None:
        """Silent."""


@pytest.fixture
def judge() -> Iterator[tuple[str, type[Judge]]]:
    class Mine(Judge):
        heard: list[dict] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", Mine
        server.shutdown()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def in_worker(folder: Path, cache: Path, use, **args):
    async def main():
        config = EnvironmentConfig(id="wiki-search", args=args)
        async with open_environment(
            config, logs=folder / "logs", root=ENVIRONMENTS, cache=cache, load_timeout_s=300
        ) as environment:
            return await use(environment)

    return asyncio.run(main())


def says(text: str):
    async def ask(question: Ask) -> Reply:
        return Reply(content=text, finish_reason="stop")

    return ask


@pytest.mark.e2e
def test_a_policy_that_searches_and_reads_finds_answers(tmp_path, cache):
    """Reads every section of the best page for the question's words, and answers with the last number or word."""

    async def ask(question: Ask) -> Reply:
        said = [message["content"] for message in question.messages if message["role"] == "tool"]
        called = len(said)
        if called == 0:
            return calls("search_pages", query=question.messages[-1]["content"])
        if called == 1:
            return calls("view_sections", page_id=said[0].partition(":")[0])
        ids = [line.rpartition(": ")[0] for line in said[1].splitlines()]
        if called < 2 + len(ids):
            return calls("read_section", section_id=ids[called - 2])
        answer = read_in("\n".join(said[2:]), question.messages[1]["content"])
        return Reply(content=f"I have read it.\n{answer}", finish_reason="stop")

    async def use(environment):
        assert environment.num_eval > 40
        return [await environment.run(RunTask(task=f"{i}", index=i), ask) for i in range(40)]

    done = in_worker(tmp_path, cache, use, num_train=40)
    founded = [rollout for rollout in done if rollout.prompt[-1]["content"].startswith("In which year was")]
    assert [rollout.metrics["tool_errors"] for rollout in done] == [0.0] * 40
    assert sum(rollout.reward for rollout in founded) >= 3
    assert all(rollout.metrics["read_section_calls"] >= 3 for rollout in done)


def calls(tool: str, **arguments: str) -> Reply:
    call = ToolCall(id="call00001", name=tool, arguments=json.dumps(arguments))
    return Reply(tool_calls=[call], finish_reason="tool_calls")


def read_in(text: str, question: str) -> str:
    years = [word.strip(".,") for word in text.split() if word.strip(".,").isdigit() and len(word.strip(".,")) == 4]
    return years[0] if "year" in question and years else "unknown"


@pytest.mark.e2e
def test_wrong_calls_are_answered_with_what_is_wrong_and_counted(tmp_path, cache):
    replies = [calls("view_sections", page_id="nowhere"), calls("read_section", page="x"), calls("fly"), None]
    heard: list[str] = []

    async def ask(question: Ask) -> Reply:
        heard.append(question.messages[-1]["content"])
        return replies[len(heard) - 1] or Reply(content="x", finish_reason="stop")

    async def use(environment):
        return await environment.run(RunTask(task="r", index=0), ask)

    done = in_worker(tmp_path, cache, use, num_train=2)
    assert heard[1] == "Error: There is no page 'nowhere'. Take an id that search_pages shows."
    assert heard[2].startswith("Error: ")
    assert heard[3] == "Error: 'fly'"
    assert (done.metrics["tool_errors"], done.metrics["total_tool_calls"], done.reward) == (3.0, 3.0, 0.0)


@pytest.mark.e2e
def test_the_last_line_is_compared_word_by_word_and_a_list_of_everything_does_not_pay(tmp_path, cache):
    async def use(environment):
        async def reward(text: str) -> float:
            return (await environment.run(RunTask(task="r", index=0), says(text))).reward

        answer = (await environment.run(RunTask(task="r", index=0), says("x"))).answer
        return [
            await reward(f"<think>maybe 7</think>So:\nThe answer is **{answer.upper()}**."),
            await reward(answer + "\nor something else"),
            await reward(f"{answer}x"),
            await reward(" ".join([*map(str, range(3000, 3030)), answer])),
            await reward(""),
        ]

    assert in_worker(tmp_path, cache, use, num_train=3) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.e2e
def test_a_judge_decides_and_is_asked_with_question_answer_and_response(tmp_path, cache, judge, monkeypatch):
    url, server = judge
    monkeypatch.setenv("JUDGE_KEY", "k-123")

    async def use(environment):
        wrong = await environment.run(RunTask(task="0", index=0), says("no idea"))
        right = await environment.run(RunTask(task="1", index=0), says(f"First {wrong.answer}\nthen other words"))
        server.fixed = "Hmm."
        with pytest.raises(RolloutFailed, match=r"The judge answered 'Hmm.' - yes or no was expected"):
            await environment.run(RunTask(task="2", index=0), says("x"))
        return wrong, right

    args = {"judge_model": "fair", "judge_base_url": url, "judge_api_key_var": "JUDGE_KEY", "num_train": 3}
    wrong, right = in_worker(tmp_path, cache, use, **args)
    assert [(done.reward, done.metrics["judge_reward"], done.metrics["right_answer"]) for done in (wrong, right)] == [
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 0.0),
    ]
    assert {(call["model"], call["key"]) for call in server.heard} == {("fair", "Bearer k-123")}
    question = wrong.prompt[-1]["content"]
    assert (
        f"Question: {question}\n\nReference answer: {wrong.answer}\n\nResponse: no idea" in server.heard[0]["content"]
    )


@pytest.mark.e2e
def test_a_judge_without_a_key_is_refused_at_load(tmp_path, cache, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(Exception, match="the environment variable NO_SUCH_KEY is not set"):
        in_worker(tmp_path, cache, None, judge_model="gpt-4.1-mini", judge_api_key_var="NO_SUCH_KEY", max_turns=10)
