"""Small tasks in a shell, for an agent program: `[orchestrator.env.agent]` names it (docs/agents.md).

The reward looks at the folder that the program leaves behind.
"""

import random


def dataset(num_train=200, seed=0):
    rng = random.Random(seed)
    return [_task(*rng.sample(range(2, 100), 2)) for _ in range(num_train)]


def eval_dataset(num_eval=32):
    return dataset(num_eval, seed=1)


def _task(a, b):
    return {"prompt": f"Write the sum of {a} and {b} into the file sum.txt, and nothing else.", "answer": str(a + b)}


def reward(folder, answer, exit_code):
    file = folder / "sum.txt"
    written = file.read_text().strip() if file.is_file() else ""
    return {"reward": float(written == answer), "wrote": float(file.is_file()), "ended_well": float(exit_code == 0)}
