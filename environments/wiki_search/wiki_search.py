"""Questions that are answered by searching and reading a small encyclopedia: tools, and a judge where one is given."""

import os
import re

import verifiers as vf
from datasets import Dataset, load_dataset
from openai import AsyncOpenAI
from wiki_search_index import Page, WikiIndex, page_from_markdown
from wiki_search_pages import EVAL_SHARE, Question, build_pages, build_questions

SYSTEM_PROMPT = (
    "Answer the question with the help of the tools: search for pages, view their sections, and read those that may "
    "hold the answer. When you know it, write the answer alone on the last line of your message."
)
HUB_PAGES, HUB_QUESTIONS = "willcb/rare-wiki-pages", "willcb/wiki-trivia-questions-v4"
MAX_ANSWER_WORDS = 25
ERROR = "Error: "  # how a tool's answer begins if the call was wrong
JUDGE_PROMPT = """A question has a reference answer. Decide whether a given response answers the question correctly: it
must state the same fact as the reference answer, in whatever words, and nothing that contradicts it.

Question: {question}

Reference answer: {answer}

Response: {response}

Answer with "yes" or "no" only."""


def load_environment(
    dataset: str = "offline",
    num_train: int = -1,
    num_eval: int = -1,
    num_results: int = 5,
    max_turns: int = 10,
    max_section_chars: int = 8000,
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
    judge_model: str | None = None,
    judge_base_url: str = "https://api.openai.com/v1",
    judge_api_key_var: str = "OPENAI_API_KEY",
    judge_timeout_s: float = 60.0,
) -> vf.Environment:
    if dataset not in ("offline", "hub"):
        raise ValueError(f'dataset={dataset!r} - expected "offline" or "hub" - change `dataset`.')

    # Thoughts are no answer: only what follows them is scored.
    parser = vf.Parser(extract_fn=without_thoughts)
    rubric = (
        _judge_rubric(parser, judge_model, judge_base_url, judge_api_key_var, judge_timeout_s)
        if judge_model
        else vf.Rubric(funcs=[right_answer], parser=parser)
    )
    rubric.add_metric(tool_errors)

    pages, train, evaluation = (
        _offline(num_train, num_eval, seed) if dataset == "offline" else _hub(num_train, num_eval)
    )

    return vf.ToolEnv(
        dataset=_to_dataset(train),
        eval_dataset=_to_dataset(evaluation),
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=rubric,
        tools=wiki_tools(WikiIndex(pages), num_results, max_section_chars),
        max_turns=max_turns,
        error_formatter=lambda error: f"{ERROR}{error}",
    )


def wiki_tools(index: WikiIndex, num_results: int, max_section_chars: int) -> list:
    # The docstrings are what the model reads about the tools.
    def search_pages(query: str) -> str:
        """Searches the encyclopedia by keywords; returns the ids and titles of the best pages.

        Args:
            query: keywords, such as a name
        """
        found = index.search(query, num_results)
        return "\n".join(f"{page.id}: {page.title}" for page in found) or "No page holds any of these words."

    def view_sections(page_id: str) -> str:
        """Lists the sections of a page: their ids and headings.

        Args:
            page_id: an id that search_pages shows
        """
        return "\n".join(f"{section_id}: {heading}" for section_id, heading in index.sections(page_id))

    def read_section(section_id: str) -> str:
        """Returns the text of a section.

        Args:
            section_id: an id that view_sections shows
        """
        return index.section(section_id)[:max_section_chars]

    return [search_pages, view_sections, read_section]


# --- rewards ----------------------------------------------------------------------------------------------------------


def right_answer(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """Whether the last line holds the answer as whole words, and is short enough to be one."""
    # A long last line could hold many guesses, so it is not searched.
    lines = (parser.parse_answer(completion) or "").strip().splitlines()
    said, expected = words(lines[-1]) if lines else [], words(answer)
    if not expected or len(said) > max(MAX_ANSWER_WORDS, len(expected)):
        return 0.0
    return float(any(said[start : start + len(expected)] == expected for start in range(len(said))))


def words(text: str) -> list[str]:
    """Without case, punctuation, articles and the commas of large numbers."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.lower())
    return [word for word in re.findall(r"[^\W_]+", plain) if word not in ("a", "an", "the")]


def without_thoughts(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def tool_errors(completion: vf.Messages) -> float:
    """Calls of a page, section or tool that does not exist, or with wrong arguments."""
    return float(sum(str(message.content).startswith(ERROR) for message in completion if message.role == "tool"))


def _judge_rubric(parser: vf.Parser, model: str, base_url: str, key_var: str, timeout_s: float) -> vf.JudgeRubric:
    key = os.environ.get(key_var)
    if not key:
        raise ValueError(
            f"judge_model={model!r} is asked at {base_url}, and the environment variable {key_var} is not set - "
            f"expected the key of that endpoint in it - set {key_var} (to any text where it wants none), name "
            "another variable by `judge_api_key_var`, or leave `judge_model` away to compare answers without a judge."
        )
    client = AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout_s)
    rubric = vf.JudgeRubric(parser=parser, judge_client=client, judge_model=model, judge_prompt=JUDGE_PROMPT)
    rubric.add_reward_func(judge_reward)
    rubric.add_metric(right_answer)
    return rubric


async def judge_reward(judge, prompt: vf.Messages, completion: vf.Messages, answer: str, state: vf.State) -> float:
    """1 where the judge says yes. An answer that is neither yes nor no is an error: a 0 for it would be a lie."""
    said = await judge(_question(prompt), completion, answer, state)
    verdict = (words(without_thoughts(said)) or [""])[0]
    if verdict not in ("yes", "no"):
        raise ValueError(f"The judge answered {said[:200]!r} - yes or no was expected. Take a model that follows it.")
    return float(verdict == "yes")


def _question(prompt: vf.Messages) -> str:
    """verifiers' own judge finds it only in plain dicts."""
    last = prompt if isinstance(prompt, str) else prompt[-1]
    if isinstance(last, str):
        return last
    return str(last["content"] if isinstance(last, dict) else last.content)


# --- data -------------------------------------------------------------------------------------------------------------


def _offline(num_train: int, num_eval: int, seed: int) -> tuple[list[Page], list[Question], list[Question]]:
    return build_pages(), *build_questions(num_train, num_eval, seed=seed)


def _hub(num_train: int, num_eval: int) -> tuple[list[Page], list[Question], list[Question]]:
    try:
        rows = load_dataset(HUB_PAGES, split="train")
        pages = [page_from_markdown(row["id"], row["title"], row["content"]) for row in rows]
        found = load_dataset(HUB_QUESTIONS, split="train")
        questions = [Question(row["question"], row["answer"]) for row in found]
    except Exception as error:
        raise ValueError(
            f"{HUB_PAGES} and {HUB_QUESTIONS} could not be loaded: {type(error).__name__}: {error} - expected a hub "
            'that can be reached, or copies in its cache - use `dataset = "offline"`, or load them once where it can.'
        ) from error

    # The hub's questions have one split, which is cut at a fixed place.
    first = int(len(questions) * (1 - EVAL_SHARE))
    train, evaluation = questions[:first], questions[first:]
    return pages, train[: num_train if num_train >= 0 else None], evaluation[: num_eval if num_eval >= 0 else None]


def _to_dataset(questions: list[Question]) -> Dataset | None:
    rows = [{"question": question.text, "answer": question.answer} for question in questions]
    return Dataset.from_list(rows) if rows else None
