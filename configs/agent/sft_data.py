"""Made transcripts of an agent with a shell, of mixed quality, to warm a model up before reinforcement learning.

Some run the right command and report. The others mistype it, take another command, guess, or say that they are done
without having done anything: the model learns how a command is written, but not which one helps. Finding that out is
what the reward is for. The tasks come from another seed than those of the environment.
"""

from __future__ import annotations

import random
import runpy
import string
import subprocess
from pathlib import Path
from typing import Any

TASKS = runpy.run_path(str(Path(__file__).parents[2] / "environments" / "examples" / "shell_tasks.py"))
SHARES = {"right": 0.3, "mistyped": 0.2, "other command": 0.2, "guessed": 0.15, "idle": 0.15}
OTHER = {"echo $((": "echo ", "sort ": "cat ", "tail -n ": "head -n "}


def conversations(num: int = 6000, seed: int = 2) -> list[dict]:
    rng = random.Random(seed)
    return [conversation(rng, TASKS["task"](rng)) for _ in range(num)]


def conversation(rng: random.Random, task: dict[str, str]) -> dict:
    kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    command, answer = task["command"], task["answer"]
    if kind == "mistyped":
        command = mistyped(rng, command)
    elif kind == "other command":
        begin = next(begin for begin in OTHER if command.startswith(begin))
        command = command.replace(begin, OTHER[begin]).replace("))", "")
    elif kind == "guessed" and answer.isdecimal():
        command = command.replace(command[: command.index("))") + 2], f"echo {guess(rng, int(answer))}")
    elif kind == "guessed":
        command = command.partition(" > ")[0]
    turns = [] if kind == "idle" else calls(command, "" if " > " in command else run(command))
    said = "Done." if task["out"] else turns[-1]["content"] if turns else str(guess(rng, int(answer)))
    return {"messages": [{"role": "user", "content": task["prompt"]}, *turns, {"role": "assistant", "content": said}]}


def calls(command: str, shown: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "exec_command", "arguments": {"cmd": command}}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": shown}]


def run(command: str) -> str:
    """Return what a command that only computes prints."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=TASKS["FILES"]).stdout.strip()


def guess(rng: random.Random, answer: int) -> int:
    return rng.randint(answer // 2, 2 * answer)


def mistyped(rng: random.Random, command: str) -> str:
    """Change a digit, or a letter of the file that is written."""
    places = [place for place, character in enumerate(command) if character.isdigit()]
    place = rng.choice(places or [len(command) - 6, len(command) - 5])
    letters = "123456789" if places else string.ascii_lowercase
    return command[:place] + rng.choice(letters) + command[place + 1 :]
