"""`sft`: supervised fine-tuning on messages, with the trainer's own model, optimizer and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from trireme.base.paths import RunPaths
from trireme.config.run import Wandb
from trireme.config.section import Section
from trireme.config.trainer import Checkpoints, Optimizer, Scheduler, Tokenizer, TrainerModel


class SftConfig(Section):
    """Everything about a supervised run. Its weights are a base model for `rl`."""

    name: str | None = None
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: Path = Path("outputs/sft")
    """Where runs are written."""
    resume: bool = False
    """Go on with the run that lies in the output folder, from its newest complete checkpoint."""
    data: Path | None = None
    """A .jsonl file or a folder of them, one `{"messages": [{"role": …, "content": …}, …]}` per line; or a .py file
    whose `conversations()` returns a list of such."""
    validation: Path | None = None
    """A file or folder of the same form to measure the loss on; a share of `data` where not given."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of `data` held out for validation where `validation` is not given; 0 holds out none."""
    validation_interval: PositiveInt | None = None
    """Measure the validation loss every this many steps; only at the end where not given."""
    max_steps: PositiveInt = 100
    """Optimizer steps."""
    batch_size: PositiveInt = 64
    """Samples per step, over all ranks."""
    seq_len: PositiveInt = 2048
    """Longest sample in tokens; longer ones are cut at the end."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens of one packed micro-batch per rank; `seq_len` where not given."""
    num_ranks: PositiveInt | None = None
    """Processes; one per visible GPU, or 1 on CPU, where not given."""
    threads: PositiveInt | None = None
    """CPU threads per rank; the machine's cores shared among ranks where not given."""
    seed: int = 0
    """Seed of everything random."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs where there are some."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the logs tell."""
    model: TrainerModel = TrainerModel()
    tokenizer: Tokenizer = Tokenizer()
    optim: Optimizer = Optimizer(lr=1e-5)
    scheduler: Scheduler = Scheduler()
    ckpt: Checkpoints = Checkpoints()
    wandb: Wandb | None = None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.output_dir / self.name if self.name else self.output_dir)
