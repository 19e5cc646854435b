"""One run of TRL's `GRPOTrainer`, in a virtual environment of its own: `python theirs.py CELL.json`.

Writes a line per step: step, reward, tokens of the answers, unix time at which the step ended; before those, one with
the time at which training began, and the tokens of all prompts. Imports nothing of ours but the task.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from task import dataset, reward


def main() -> None:
    cell = json.loads(Path(sys.argv[1]).read_text())
    trainer = build_trainer(cell, Record(Path(cell["out"])))
    trainer.train()


class Record:
    """The lines of one run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._batch: dict[str, float] = {}

    def begin(self, prompts: list[list[int]]) -> None:
        self._write({"began_s": time.time(), "prompts": sorted(prompts)})

    def batch(self, rewards: list[float], num_tokens: list[int]) -> None:
        """What has been sampled, and is trained on next."""
        self._batch = {"reward": sum(rewards) / len(rewards), "tokens": sum(num_tokens)}

    def step(self, number: int) -> None:
        self._write({"step": number, "ended_s": time.time()} | self._batch)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def build_trainer(cell: dict[str, Any], record: Record) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.begin(
                tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.step(state.global_step)

    async def rewards(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """All answers of a batch are scored at the same time, so a batch waits for a slow environment once."""
        import asyncio

        fields = zip(completions, columns["answer"], columns["delay_s"], strict=True)
        found = await asyncio.gather(*(reward(said[-1]["content"], answer, delay) for said, answer, delay in fields))
        record.batch(found, [len(ids) for ids in completion_ids])
        return list(found)

    tokenizer = AutoTokenizer.from_pretrained(cell["model"])
    rows = dataset(**cell["task"])
    prompts = [row["prompt"] for row in rows]
    return GRPOTrainer(
        model=cell["model"],
        reward_funcs=rewards,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        args=GRPOConfig(**config_of(cell)),
        callbacks=[Watch()],
    )


def config_of(cell: dict[str, Any]) -> dict[str, Any]:
    """The same algorithm as ours: ratios clipped at 0.2 on both sides, advantages by the group's deviation, the loss
    over the batch's tokens, truncated answers masked, AdamW at a constant rate. Then whatever makes it fast."""
    return {
        "output_dir": cell["folder"],
        "max_steps": cell["max_steps"],
        "per_device_train_batch_size": cell["batch_size"],
        "num_generations": cell["group_size"],
        "max_completion_length": cell["max_tokens"],
        "learning_rate": cell["lr"],
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "scale_rewards": "group",
        "beta": 0.0,
        "mask_truncated_completions": True,
        "seed": cell["seed"],
        "data_seed": cell["seed"],
        "temperature": 1.0,
        "top_k": 0,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 10_000,
        "disable_tqdm": True,
    } | cell.get("options", {})


if __name__ == "__main__":
    main()
