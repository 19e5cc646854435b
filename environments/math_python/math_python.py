"""Mathematics with a Python tool: a multi-turn environment whose tool runs in a sandbox, and that needs no download."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

import verifiers as vf
from datasets import Dataset
from math_python_problems import Problem, make_problems
from python_sandbox import Limits, Result, find_confinement, run_python
from verifiers.utils.data_utils import extract_boxed_answer, load_example_dataset

SYSTEM_PROMPT = (
    "Solve the problem. You can run Python code with the `python` tool; it shows what the code prints. Variables are "
    "not kept from one call to the next. Put your final answer in \\boxed{}."
)
ERROR = "Error: "  # how an answer of the tool begins when the code failed


def load_environment(
    dataset: str = "offline",
    num_train: int = 2000,
    num_eval: int = 100,
    difficulty: int | list[int] = (1, 5),
    seed: int = 0,
    max_turns: int = 5,
    system_prompt: str | None = SYSTEM_PROMPT,
    timeout_s: float = 10.0,
    memory_mib: int = 1024,
    max_output_chars: int = 4000,
) -> vf.Environment:
    _run_in_thread(find_confinement)  # a machine that cannot confine is refused here, not in every rollout

    # Without a box there is no answer.
    parser = vf.Parser(extract_fn=partial(extract_boxed_answer, strict=True))
    # Answers of the hub's problems are formulas, which `MathRubric` compares; offline ones are whole numbers.
    if dataset == "hub":
        train, evaluation = _hub_sets(num_train, num_eval)
        rubric: vf.Rubric = vf.MathRubric(parser=parser)
    elif dataset == "offline":
        bounds = (difficulty, difficulty) if isinstance(difficulty, int) else (difficulty[0], difficulty[-1])
        train, evaluation = map(_to_dataset, make_problems(num_train, num_eval, difficulties=bounds, seed=seed))
        rubric = vf.Rubric(funcs=[correct_answer], parser=parser)
    else:
        raise ValueError(f'dataset={dataset!r} - expected "offline" or "hub" - change `dataset`.')

    rubric.add_metric(has_answer)
    rubric.add_metric(tool_errors)

    return vf.ToolEnv(
        dataset=train,
        eval_dataset=evaluation,
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=rubric,
        tools=[python_tool(Limits(timeout_s=timeout_s, memory_mib=memory_mib, num_processes=4), max_output_chars)],
        max_turns=max_turns,
        error_formatter=lambda error: f"{ERROR}{type(error).__name__}: {error}",
    )


def python_tool(limits: Limits, max_output_chars: int) -> Callable[[str], Awaitable[str]]:
    async def python(code: str) -> str:
        """Runs Python code and returns what it prints.

        Args:
            code: a whole program; print what you want to see
        """
        return shown(await run_python(code, limits=limits), max_output_chars)

    return python


def shown(result: Result, max_chars: int) -> str:
    """What the model is told of a run. Of long output the beginning is kept, of a long traceback the end."""
    output = result.stdout.strip()
    if result.is_done:
        return _shortened(output, max_chars) or "(the code printed nothing)"
    if result.reason == "error":
        problem = result.stderr.strip()
        return f"{_shortened(output, max_chars)}\n{ERROR}{problem[-max_chars:]}".lstrip("\n")
    return f"{_shortened(output, max_chars)}\n{ERROR}the code was stopped ({result.reason})".lstrip("\n")


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


def correct_answer(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    """1 where the boxed answer of the last message is the right whole number."""
    return float(_to_int(parser.parse_answer(completion) or "") == int(answer))


def has_answer(completion: vf.Messages, parser: vf.Parser) -> float:
    return float(bool(parser.parse_answer(completion)))


def tool_errors(completion: vf.Messages) -> float:
    """Calls whose code failed or was stopped, and calls of no tool that exists."""
    answers = [message for message in completion if message.role == "tool"]
    return float(sum(f"\n{ERROR}" in f"\n{message.content}" for message in answers))


def _to_int(text: str) -> int | None:
    """Whole numbers as people write them: `1,234`, `$12$`, `12.0`."""
    plain = text.replace(",", "").replace("$", "").replace(" ", "").removesuffix(".")
    plain = plain.removesuffix(".0")
    try:
        return int(plain) if plain.isascii() else None
    except ValueError:
        return None


def _to_dataset(problems: list[Problem]) -> Dataset | None:
    rows = [{"question": p.question, "answer": str(p.answer), "info": {"difficulty": p.difficulty}} for p in problems]
    return Dataset.from_list(rows) if rows else None


def _hub_sets(num_train: int, num_eval: int) -> tuple[Dataset, Dataset]:
    try:
        return load_example_dataset("math", "train", n=num_train), load_example_dataset("math", "test", n=num_eval)
    except Exception as error:
        raise ValueError(
            f"The MATH data set could not be loaded from the hub: {type(error).__name__}: {error} - expected a "
            'reachable hub, or a copy in its cache - use `dataset = "offline"`, or set HF_HUB_OFFLINE=1 with a cache.'
        ) from error


def _run_in_thread(function: Callable[[], Coroutine]) -> None:
    """The environment may be loaded inside of a running event loop, which cannot run another."""
    errors: list[Exception] = []

    def body() -> None:
        try:
            asyncio.run(function())
        except Exception as error:
            errors.append(error)

    # Wait for the thread: an error must end the loading of the environment.
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
