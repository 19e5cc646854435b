"""The small environments that are shipped: their data and rules, and rollouts in a worker."""

import asyncio
import itertools
import json
import math
import re
import runpy
from collections.abc import Awaitable, Callable
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from support.runs.toy_environments import import_shipped, in_turn, noting, run_all, run_one, says
from trireme.journal.model_turn import ToolCall
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.session.wire import Ask, Reply

pytestmark = pytest.mark.xdist_group("packages")  # one process, so that tests share workers
ROOT = Path(__file__).parents[3]
index, wiki = import_shipped("wiki_search", "wiki_search_index"), import_shipped("wiki_search", "wiki_search_pages")
maths = import_shipped("math_python", "math_python_problems")
game = import_shipped("wordle", "wordle_game")
episodes = import_shipped("alphabet_sort", "alphabet_sort_episodes")
numbers, problems = import_shipped("gsm8k", "gsm8k_answers"), import_shipped("gsm8k", "gsm8k_problems")
ANY = {"word_length": 5, "alphabet": "", "num_words": None, "seed": 0}
BOUNDS = {"num_turns": (1, 3), "names_per_turn": (1, 4), "items": "names", "sort_by": "any", "seed": 0}
MARK = " // new name!"


@pytest.mark.parametrize(
    ("make", "arguments", "advice"),
    [
        (game.choose_secrets, ANY | {"word_length": 6}, "expected 5, the only length"),
        (episodes.make_episodes, BOUNDS | {"num_turns": (3, 2)}, "expected 1 <= min_turns <= max_turns"),
        (problems.make_problems, {"seed": 0}, r"num_train=-1, .* there is no `all` of them"),
        (maths.make_problems, {"difficulties": (0, 1), "seed": 0}, "expected one of 1 to 5"),
    ],
)
def test_arguments_that_allow_no_example_are_refused_with_advice(make, arguments, advice):
    with pytest.raises(ValueError, match=advice):
        make(-1 if make is problems.make_problems else 10, 1, **arguments)


def feedback_by_crossing_out(guess: str, secret: str) -> str:
    """The rules as one plays them on paper: cross out what is right, then look for each other letter in the rest."""
    paper, marks = list(secret), ["X"] * len(guess)
    for place, letter in enumerate(guess):
        if paper[place] == letter:
            marks[place], paper[place] = "G", "-"
    for place, letter in enumerate(guess):
        if marks[place] == "X" and letter in paper:
            marks[place] = "Y"
            paper[paper.index(letter)] = "-"
    return "".join(marks)


def test_wordle_feedback_is_right_for_every_guess_and_secret():
    assert game.feedback("eerie", "crepe") == "YXYXG"  # the last e is right, one more e is left for the other two
    for letters, length in [("abc", 4), ("abcd", 3)]:
        words = ["".join(word) for word in itertools.product(letters, repeat=length)]
        for guess, secret in itertools.product(words, repeat=2):
            assert game.feedback(guess, secret) == feedback_by_crossing_out(guess, secret), (guess, secret)


SEEDS = [{"seed": seed} for seed in range(3)]
SECRETS = [ANY, ANY | {"seed": 1}, ANY | {"num_words": 300, "seed": 2}, ANY | {"alphabet": "abcdef", "word_length": 3}]
EPISODES = [BOUNDS, BOUNDS | {"seed": 1, "num_turns": (1, 1)}, BOUNDS | {"seed": 2, "num_turns": (2, 5)}]
LETTERS = [choice | {"items": "letters"} for choice in EPISODES]


@pytest.mark.parametrize(
    ("make", "choices", "key"),
    [
        (partial(game.choose_secrets, 400, 50), SECRETS, str),
        (partial(episodes.make_episodes, 200, 50), EPISODES, lambda episode: frozenset(sum(episode.turns, ()))),
        (partial(episodes.make_episodes, 200, 50), LETTERS, lambda episode: frozenset(sum(episode.turns, ()))),
        (partial(problems.make_problems, 200, 40), SEEDS, attrgetter("question")),
        (partial(maths.make_problems, 200, 40, difficulties=(1, 5)), SEEDS, attrgetter("question")),
        (partial(wiki.build_questions, -1, -1), SEEDS, attrgetter("text")),
    ],
    ids=["wordle", "alphabet-sort", "alphabet-sort of letters", "gsm8k", "math-python", "wiki-search"],
)
def test_training_never_sees_what_is_evaluated_whatever_the_arguments(make, choices, key):
    sets = [make(**choice) for choice in choices]
    assert make(**choices[0]) == sets[0] != sets[1]
    train, evaluation = ([list(map(key, each[part])) for each in sets] for part in (0, 1))
    assert not set().union(*train) & set().union(*evaluation)
    for each in (*train, *evaluation):
        assert len(each) > 20
        assert len(set(each)) == len(each) or isinstance(each[0], frozenset)


async def play_by_the_feedback(question: Ask) -> Reply:
    """The first word that fits all that was said: it finds any secret that three letters out of four can make."""
    answers = [message["content"].split("\n")[:-1] for message in question.messages if message["role"] == "user"]
    told = [("".join(line[0] for line in lines), "".join(line[2] for line in lines)) for lines in answers[1:]]
    words = map("".join, itertools.product("abcd", repeat=3))
    guess = next(word for word in words if all(feedback_by_crossing_out(was, word) == marks for was, marks in told))
    return Reply(content=f"I try <guess>{guess}</guess>.", finish_reason="stop")


async def say_nothing_of_use(question: Ask) -> Reply:
    return Reply(content="<guess>abcd</guess>" if len(question.messages) == 2 else "a b c", finish_reason="stop")


def test_the_wordle_package_plays_whole_games_and_rewards_the_quicker_one(on):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (56, 8)
        won = [await run_one(environment, play_by_the_feedback, i) for i in range(56)]
        return won, await run_one(environment, say_nothing_of_use, split="eval")

    args = {"alphabet": "abcd", "word_length": 3, "max_turns": 9}
    won, lost = on("wordle", use, **args)
    for game in won:
        turns = game.metrics["num_turns"]
        assert (game.stop, len(game.completion)) == ("word_found", 2 * turns - 1)
        assert f"<guess>{game.answer}</guess>" in game.completion[-1]["content"]
        assert game.reward == pytest.approx(0.5 + 0.2 + 0.2 * (10 - turns) / 9 + 0.1)
    assert len({game.metrics["num_turns"] for game in won}) > 3
    assert (lost.stop, lost.reward, lost.metrics["num_turns"]) == ("max_turns_reached", 0.0, 9)


MARKED = [item for i in range(150) for item in (str(i), "// new name!")]


@pytest.mark.parametrize(
    ("given", "expected", "similarity"),
    [
        (["a", "c", "b"], ["a", "b", "c"], 2 * 2 / 6),
        (None, ["a"], 0),
        # `SequenceMatcher` leaves out what it takes for junk in lists of 200 and more, unless it is told not to.
        (MARKED, MARKED[:-1], 2 * 299 / 599),
    ],
)
def test_similarity_is_twice_the_items_in_common_blocks_over_all_items(given, expected, similarity):
    assert episodes.similarity(given, expected) == pytest.approx(similarity)


@pytest.mark.parametrize("choice", [*EPISODES, *LETTERS])
def test_episodes_keep_their_bounds_and_have_one_right_order(choice):
    least, most = choice["num_turns"]
    made, _ = episodes.make_episodes(200, 50, **choice)
    assert {len(episode.turns) for episode in made} == set(range(least, most + 1))
    assert {len(turn) for episode in made for turn in episode.turns} == {1, 2, 3, 4}
    for names in (sum(episode.turns, ()) for episode in made):
        for part in (0, -1):
            assert len({name.split()[part] for name in names}) == len(names)


def sorted_answer(question: Ask, *, marks: bool = True, combined: bool = True) -> str:
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    names = [re.search(r": (.*)", content)[1].split(", ") for content in asked]
    part = -1 if "by last name" in asked[0] else 0
    ordered = sorted((name for some in names for name in some), key=lambda name: name.split()[part])
    lines = [name + MARK * (marks and len(asked) > 1 and name in names[-1]) for name in ordered]
    tag = "combined_" * (combined and len(asked) > 1) + "alphabetical_sorted"
    return f"<{tag}>\n{chr(10).join(lines)}\n</{tag}>"


def answers(**options: Any) -> Callable[[Ask], Awaitable[Reply]]:
    async def ask(question: Ask) -> Reply:
        return Reply(content=f"Here you are:\n{sorted_answer(question, **options)}", finish_reason="stop")

    return ask


def test_alphabet_sort_rewards_each_turn_by_its_similarity_to_sorted(on):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (20, 5)
        policies = (answers(), answers(marks=False), answers(combined=False))
        return await asyncio.gather(*(run_all(environment, policy, 20) for policy in policies))

    args = {"min_turns": 2, "max_turns": 4, "num_train": 20, "num_eval": 5, "similarity_power": 2}
    done = on("alphabet-sort", use, **args)
    assert {len(rollout.info["expected"]) for rollout in done[0]} == {2, 3, 4}
    for right, unmarked, untagged in zip(*done, strict=True):
        turns = len(right.info["expected"])
        assert (right.reward, right.metrics["exact_turns"], right.stop) == (1.0, 1.0, "all_turns_answered")
        assert right.metrics["num_turns"] == len(right.completion) // 2 + 1 == turns
        assert {name for name in right.metrics if "turn_" in name} == {f"similarity_turn_{n + 1}" for n in range(turns)}
        assert untagged.reward == untagged.metrics["answered_turns"] == pytest.approx(1 / turns)
        assert unmarked.reward == pytest.approx(sum(map(worth_without_marks, right.info["expected"])) / turns)


def worth_without_marks(expected: list[str]) -> float:
    """By the formula: all names in common, no mark; squared, as `similarity_power` says."""
    names = sum(item != MARK.strip() for item in expected)
    return (2 * names / (len(expected) + names)) ** 2


def test_numbers_are_exact_and_read_in_all_their_spellings():
    spellings = ["1,234", "$1,234", r"\$1{,}234", "1234.", "1234.00", r"\frac{2468}{2}", "2468/2", "+1234"]
    assert {numbers.to_number(text) for text in [*spellings, r"1234 \text{ apples}"]} == {1234}
    assert numbers.is_same_number("1,234", "1234")
    assert (numbers.to_number("0.1"), numbers.to_number("-3/4")) == (Fraction(1, 10), Fraction(-3, 4))
    assert not numbers.is_same_number("0.3333333333333333", "1/3")
    nonsense = ["", "-", ".", "twelve", "1/0", "12 13x", "1,23", "1e9", "nan", "9" * 101, "١٢", "3/4/5"]
    assert {(numbers.to_number(text), numbers.is_same_number(text, text)) for text in nonsense} == {(None, False)}


def test_a_right_number_in_a_box_is_rewarded_in_a_real_worker(on):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (12, 4)
        silent = await run_one(environment, says("I do not know"), 3)
        right = await run_one(environment, says(f"so \\boxed{{${silent.answer}.0}}"), 3)
        return silent, right, await run_one(environment, says("\\boxed{-5}"), 3)

    outcomes = on("gsm8k", use, num_train=12, num_eval=4)
    assert [(done.reward, done.metrics["has_box"]) for done in outcomes] == [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    assert outcomes[0].prompt[0]["role"] == "system"


def test_searches_score_as_worked_by_hand():
    pages = [index.Page("a", "x", (("y", "cat dog"),)), index.Page("b", "x", (("y", "dog dog dog dog"),))]
    found = index.WikiIndex(pages)
    # lengths: the title counts three times, the heading once: 3 + 1 + 2 = 6 and 3 + 1 + 4 = 8, 7 on average
    rarity = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    assert found._score("cat", "a") == pytest.approx(rarity * 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 6 / 7)))
    searches = ("the DOG, please", "cat", "bird")
    assert [[page.id for page in found.search(words, 5)] for words in searches] == [["b", "a"], ["a"], []]


def test_wiki_search_finds_every_page_first_by_its_title():
    found = index.WikiIndex(wiki.build_pages())
    assert len(found.pages) == len({page.title for page in found.pages.values()}) > 50
    for page in found.pages.values():
        assert found.search(page.title, 1)[0].title == page.title
        sections = found.sections(page.id)
        assert [found.section(section_id) for section_id, _ in sections] == [text for _, text in page.sections]
    for ask in (lambda: found.sections("nowhere"), lambda: found.section("sull:nowhere")):
        with pytest.raises(index.UnknownId, match=r"There is no (page|section) '.*'\. Take an id that \w+ shows"):
            ask()


def test_questions_have_answers_on_the_pages():
    text = "\n".join(page.text for page in wiki.build_pages())
    assert [len(part) for part in wiki.build_questions(7, 3, seed=0)] == [7, 3]
    questions = [question for part in wiki.build_questions(-1, -1, seed=0) for question in part]
    assert len(questions) > 240
    assert [question.answer for question in questions if question.answer not in text] == []


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
    assert all(each.metrics["tool_errors"] == 0.0 and each.metrics["read_section_calls"] >= 3 for each in done)
    assert sum(each.reward for each in done if each.prompt[-1]["content"].startswith("In which year was")) >= 3


def test_wiki_search_compares_the_last_line_word_by_word(on):
    async def use(environment):
        answer = (await run_one(environment, says("x"))).answer
        everything = " ".join([*map(str, range(3000, 3030)), answer])
        right = f"<think>maybe 7</think>So:\nThe answer is **{answer.upper()}**."
        texts = [right, answer + "\nor something else", f"{answer}x", everything, ""]
        return [(await run_one(environment, says(text))).reward for text in texts]

    assert on("wiki-search", use, num_train=40) == [1.0, 0.0, 0.0, 0.0, 0.0]


def of_level(level: int) -> list[Any]:
    return maths.make_problems(150, 0, difficulties=(level, level), seed=3)[0]


def test_expressions_have_the_value_that_python_gives_them():
    for problem in of_level(1) + of_level(2):
        assert eval(problem.question.removeprefix("Compute ").removesuffix(".")) == problem.answer


WORDS = {
    r"buys (\d+) boxes with (\d+) .* gives (\d+) ": lambda a, b, c: a * b - c,
    r"(\d+) classes of (\d+) .* (\d+) teachers\. A bus has (\d+)": lambda n, p, t, s: -(-(n * p + t) // s),
    r"remainder of (\d+)\^(\d+) divided by (\d+)": lambda a, b, m: a**b % m,
    r"divisor of (\d+) and (\d+)\?": math.gcd,
    r"from 1 to (\d+) are divisible by (\d+) but not by (\d+)": lambda n, a, b: n // a - n // math.lcm(a, b),
}


def test_answers_are_what_the_numbers_in_the_words_give():
    made = problems.make_problems(2000, 0, seed=0)[0] + of_level(3) + of_level(4)
    for pattern, solve in WORDS.items():
        found = [(m, p.answer) for p in made if (m := re.search(pattern, p.question))]
        assert len(found) > 10
        for match, answer in found[:10]:
            assert solve(*map(int, match.groups())) == answer, match.string


def test_math_python_tool_message_holds_the_output_of_sandboxed_code(on):
    tokenizer = ChatTokenizer(ROOT / "models" / "math-python-tiny")

    async def use(environment):
        async def run(*turns: Reply):
            ask, questions = noting(in_turn(*turns))
            done = await run_one(environment, ask)
            return done, [question.messages[-1]["content"] for question in questions], questions

        guess, (asked,), (first,) = await run(Reply(content="\\boxed{1}"))
        expression = asked.removeprefix("Compute ").removesuffix(".")
        assert (guess.reward, guess.metrics["python_calls"], guess.metrics["has_answer"]) == (0.0, 0.0, 1.0)
        prompt = tokenizer.encode(tokenizer.render(first.messages, tools=first.tools, generate=True))
        assert len(prompt) < 30  # the tool as the template shows it is one token of the tiny model; see its words.json

        computes = calls("python", code=f"print({expression})")
        right, heard, _ = await run(computes, Reply(content=f"\\boxed{{{eval(expression):,}}}"))
        assert heard[1] == right.answer
        assert (right.reward, right.metrics["python_calls"], right.metrics["tool_errors"]) == (1.0, 1.0, 0.0)

        connects = calls("python", code="import socket; socket.create_connection(('127.0.0.1', 1))")
        wrong = calls("python", code="1/0"), connects, calls("ruby", code=""), Reply(content="?")
        failing, heard, _ = await run(*wrong)
        assert re.match(r"Error: Traceback(.|\n)*ZeroDivisionError: division by zero$", heard[1])
        assert re.search("Network is unreachable|not permitted", heard[2])
        assert (failing.reward, failing.metrics["tool_errors"], failing.metrics["has_answer"]) == (0.0, 3.0, 0.0)

    sizes = {"num_train": 5, "num_eval": 2, "max_output_chars": 200}
    on("math-python", use, **sizes, difficulty=1, system_prompt="", timeout_s=30)


def test_the_tiny_models_warm_up_shows_nothing_that_is_evaluated():
    data = runpy.run_path(str(ROOT / "configs" / "math-python" / "sft_data.py"))
    conversations = [entry["messages"] for entry in data["conversations"](500)]
    assert conversations
    assert not [messages for messages in conversations if maths.is_for_eval(messages[1]["content"])]
