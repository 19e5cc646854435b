"""Rollouts that an agent program plays against a policy of scripted texts."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.models.tiny_tokenizer import QWEN_3, write_tokenizer
from support.runs.toy_environments import open_toy, running, write
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling
from trireme.journal.model_turn import Turn
from trireme.journal.records import Rollout
from trireme.orchestrator.engines.window import Window
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
from trireme.tools.environments.sessions import SessionWatch

TASKS = """
    def dataset():
        return [{"prompt": "Write 5 into sum.txt.", "answer": "5", "file": "sum.txt"}]

    def reward(folder, read_file, answer, exit_code, output, messages):
        file = folder / "sum.txt"
        right = (read_file("sum.txt") or "").strip() == answer
        return {"reward": float(right), "exit_code": -1 if exit_code is None else exit_code,
                "output": len(output), "messages": len(messages)}
"""

ENDS = "<think>\nIt is there.\n</think>\n\n Done. <|im_end|>"


def calls(name: str, **arguments: str) -> str:
    """A turn that calls a tool, written as no client would write it again."""
    written = f'{{"name": "{name}", "arguments": {json.dumps(arguments, separators=(",", ":  "))}}}'
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


@dataclass
class ScriptedPolicy:
    """An engine that answers the n-th turn of a conversation with the n-th text of a script, and keeps the prompts."""

    tokenizer: ChatTokenizer
    texts: list[str]
    given: list[tuple[list[int], Turn]] = field(default_factory=list)
    fails_after: int | None = None  # turns; then the run ends
    vocab_size: int = 0
    window: Window = field(default_factory=lambda: Window(list, Waits("test"), 100, float))

    async def generate(self, ids: list[int], sampling: dict[str, Any], *, routes_from: int | None = None) -> Turn:
        if len(self.given) == self.fails_after:
            raise DeadlineExceeded("the engine is gone")
        number = self.tokenizer.decode(ids, keep_special=True).count("<|im_start|>assistant")
        text = self.texts[min(number, len(self.texts)) - 1]
        sampled = self.tokenizer.encode(text)
        logprobs = [-(len(self.given) + place / 1000) for place in range(len(sampled))]
        turn = Turn(sampled, logprobs, [0] * len(sampled), "stop")
        self.given.append((ids, turn))
        return turn


def player(folder: Path) -> Callable[..., tuple[list[Rollout], ScriptedPolicy]]:
    """Return what plays rollouts of TASKS with a program, and the policy that answered it."""
    tokenizer = ChatTokenizer(write_tokenizer(folder / "tokenizer", QWEN_3))

    def play(
        program: str,
        *texts: str,
        tasks: str = TASKS,
        id: str | None = None,
        count: int = 1,
        command: Any = None,
        max_turns: int | None = None,
        journal: Path | None = None,
        policy: ScriptedPolicy | None = None,
        watches: list[SessionWatch] | None = None,
        **agent: Any,
    ) -> tuple[list[Rollout], ScriptedPolicy]:
        file = write(folder, program, "agent.py")
        policy = policy or ScriptedPolicy(tokenizer, list(texts) or [ENDS])
        waits = Waits("orchestrator", folder / "logs")
        runner = RolloutRunner(RunConfig(seq_len=1 << 17), policy, tokenizer, journal=journal, waits=waits)  # type: ignore[arg-type]
        table = {"command": command or (sys.executable, file, "{prompt}")} | agent

        async def roll_out(environment: Any) -> list[Rollout]:
            if watches is not None:
                watches.append(environment := SessionWatch(environment))
            specs = [RolloutSpec("train", 0, place, name=f"0-{place}") for place in range(count)]
            runs = [runner.run(environment, spec, sampling=Sampling()) for spec in specs]
            return await asyncio.gather(*runs)

        id = id or write(folder, tasks)
        with running(open_toy(folder, id, agent=table, max_turns=max_turns)) as on:
            return on(roll_out), policy

    return play


def assert_exact(rollout: Rollout, policy: ScriptedPolicy, *, num_turns: int) -> None:
    """Check that one sample holds all turns of a rollout, each with the tokens that were sampled."""
    (sample,) = rollout.samples
    assert rollout.num_turns == len(policy.given) == num_turns
    prompt, last = policy.given[-1]
    assert sample.ids.tolist() == prompt + last.ids
    for prompt, turn in policy.given:
        begin, end = len(prompt), len(prompt) + len(turn.ids)
        assert sample.ids[:end].tolist() == prompt + turn.ids
        assert sample.loss_mask[begin:end].all()
    assert int(sample.loss_mask.sum()) == sum(len(turn.ids) for _, turn in policy.given)
