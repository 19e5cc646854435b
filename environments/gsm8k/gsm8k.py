"""Grade-school word problems with a number as their answer: a single-turn environment that needs no download."""

from functools import partial

import verifiers as vf
from datasets import Dataset
from gsm8k_answers import is_same_number, to_number
from gsm8k_problems import Problem, make_problems
from verifiers.utils.data_utils import extract_boxed_answer, load_example_dataset

SYSTEM_PROMPT = "Reason step by step, and put your final answer, a number, in \\boxed{}."


def load_environment(
    dataset: str = "offline",
    num_train: int = 2000,
    num_eval: int = 100,
    seed: int = 0,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> vf.Environment:
    if dataset not in ("offline", "hub"):
        raise ValueError(f'dataset={dataset!r} - expected "offline" or "hub" - change `dataset`.')
    sets = _offline_sets(num_train, num_eval, seed) if dataset == "offline" else _hub_sets(num_train, num_eval)

    # An answer without a box counts as none, so that no other number of the text is taken for it.
    parser = vf.Parser(extract_fn=partial(extract_boxed_answer, strict=True))
    rubric = vf.Rubric(funcs=[correct_answer], parser=parser)
    rubric.add_metric(has_box)
    return vf.SingleTurnEnv(
        dataset=sets[0], eval_dataset=sets[1], system_prompt=system_prompt or None, parser=parser, rubric=rubric
    )


def correct_answer(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(is_same_number(parser.parse_answer(completion) or "", answer))


def has_box(completion: vf.Messages, parser: vf.Parser) -> float:
    """Whether the box holds a number at all."""
    return float(to_number(parser.parse_answer(completion) or "") is not None)


def _offline_sets(num_train: int, num_eval: int, seed: int) -> tuple[Dataset | None, Dataset | None]:
    train, evaluation = make_problems(num_train, num_eval, seed=seed)
    return _to_dataset(train), _to_dataset(evaluation)


def _to_dataset(problems: list[Problem]) -> Dataset | None:
    rows = [{"question": problem.question, "answer": str(problem.answer)} for problem in problems]
    return Dataset.from_list(rows) if rows else None


def _hub_sets(num_train: int, num_eval: int) -> tuple[Dataset, Dataset]:
    try:
        return _from_hub("train", num_train), _from_hub("test", num_eval)
    except Exception as error:
        raise ValueError(
            f"The data set openai/gsm8k could not be loaded: {type(error).__name__}: {error} - expected a hub that can "
            'be reached, or a copy in its cache - use `dataset = "offline"`, or load it once on a machine that can.'
        ) from error


def _from_hub(split: str, size: int) -> Dataset:
    return load_example_dataset("gsm8k", split, n=None if size < 0 else size)
