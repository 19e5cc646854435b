"""Reverse a short text, letter by letter: a single-turn environment that needs no download."""

import verifiers as vf
from datasets import Dataset
from reverse_text_task import SYSTEM_PROMPT, make_texts, similarity


def load_environment(
    num_train: int = 2000,
    num_eval: int = 100,
    min_length: int = 3,
    max_length: int = 24,
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> vf.Environment:
    train, evaluation = make_texts(num_train, num_eval, min_length=min_length, max_length=max_length, seed=seed)
    parser = vf.XMLParser(["reversed_text"], answer_field="reversed_text")
    rubric = vf.Rubric(parser=parser)
    rubric.add_reward_func(lcs_reward)
    rubric.add_metric(exact_match)
    return vf.SingleTurnEnv(
        dataset=_to_dataset(train),
        eval_dataset=_to_dataset(evaluation) if evaluation else None,
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=rubric,
    )


def lcs_reward(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """Similarity of the answer and the reversed text, 0 to 1."""
    return similarity(parser.parse_answer(completion), answer)


def exact_match(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def _to_dataset(texts: list[str]) -> Dataset:
    return Dataset.from_list([{"question": text, "answer": text[::-1]} for text in texts])
