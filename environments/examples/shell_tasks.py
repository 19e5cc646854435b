"""Small tasks in a shell, for an agent program: `[orchestrator.env.agent]` names it (docs/agents.md).

The reward reads a file that the program leaves behind, or looks at the program's last message.
"""

import random
import string
from pathlib import Path

FILES = Path(__file__).with_name("shell_files")  # `agent.workdir`: each rollout gets a copy


def dataset(num_train=400, seed=0):
    rng = random.Random(seed)
    return [task(rng) for _ in range(num_train)]


def eval_dataset(num_eval=64):
    return dataset(num_eval, seed=1)


def task(rng):
    """Return a task with the command that solves it, and the file that must hold the answer afterwards, if any."""
    out = "".join(rng.sample(string.ascii_lowercase, 2)) + ".txt"
    source = rng.choice(sorted(FILES.glob("*.txt")))
    lines = source.read_text().splitlines()
    a, b, count = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 5)

    # Tasks differ in whether the answer is in a file or in the last message.
    kind = rng.choice(["add", "multiply", "sort", "tail"])
    if kind == "add":
        return _task(f"Write the sum of {a} and {b} into {out}.", f"echo $(({a}+{b})) > {out}", str(a + b), out)
    if kind == "multiply":
        return _task(f"How much is {a} times {b}?", f"echo $(({a}*{b}))", str(a * b), "")
    if kind == "sort":
        prompt = f"Sort the lines of {source.name} into {out}."
        return _task(prompt, f"sort {source.name} > {out}", "\n".join(sorted(lines)), out)
    prompt = f"Copy the last {count} lines of {source.name} into {out}."
    return _task(prompt, f"tail -n {count} {source.name} > {out}", "\n".join(lines[-count:]), out)


def _task(prompt, command, answer, out):
    return {"prompt": prompt, "command": command, "answer": answer, "out": out}


def reward(read_file, answer, out, messages, exit_code):
    said = (read_file(out) or "") if out else messages[-1]["content"]
    return {"reward": float(said.strip() == answer), "ended_well": float(exit_code == 0)}
