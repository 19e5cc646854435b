"""`sft`: supervised fine-tuning on messages, with the trainer's own model, optimizer and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.base.paths import RunPaths
from trireme.config.run import Wandb
from trireme.config.section import Section
from trireme.config.trainer import Checkpoints, Optimizer, Scheduler, Tokenizer, TrainerModel

TrainedRole = Literal["assistant", "user", "system", "tool"]


class Source(Section):
    """`[[source]]`: one of several places that the conversations come from."""

    data: str
    """As `data` of the run."""
    subset: str | None = None
    """Configuration of a data set on a hub, where it has several."""
    split: str = "train"
    """Split of a data set on a hub; slices as `train[:1000]` work."""
    repeat: PositiveFloat = 1.0
    """How often an epoch holds each of its conversations: 3 is three times, 0.25 another quarter of them each epoch."""


class SftConfig(Section):
    """Everything about a supervised run. Its weights are a base model for `rl`."""

    name: str | None = None
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: Path = Path("outputs/sft")
    """Where runs are written."""
    resume: bool = False
    """Go on with the run that lies in the output folder, from its newest complete checkpoint."""
    data: str | None = None
    """Conversations, in one of the forms of `docs/sft.md`: a .jsonl, .json or .parquet file, a folder of such, a .py
    file whose `conversations()` returns some, or a data set's name on a hub (`owner/name`)."""
    subset: str | None = None
    """Configuration of a data set on a hub, where it has several."""
    split: str = "train"
    """Split of a data set on a hub; slices as `train[:1000]` work."""
    source: tuple[Source, ...] = ()
    """Several places instead of `data`."""
    validation: str | None = None
    """Conversations to measure the loss on, of the same forms as `data`; a share of `data` where not given."""
    validation_split: str = "validation"
    """Split of `validation`, where that is on a hub."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the data held out for validation where `validation` is not given; 0 holds out none."""
    validation_interval: PositiveInt | None = None
    """Measure the validation loss every this many steps; only before the first and after the last where not given."""
    loss_on: tuple[TrainedRole, ...] = ("assistant",)
    """Whose messages are learned from; a message's own `train` or `weight` goes before."""
    chat_template: Path | None = None
    """Jinja file to render conversations with, which the exported tokenizer keeps; its own where not given."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the chat template is given beside messages and tools, as `{ enable_thinking = false }`."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """Samples of more than `seq_len` tokens: cut them at the end, or leave them out. Both are counted."""
    max_steps: PositiveInt = 100
    """Optimizer steps."""
    num_epochs: PositiveFloat | None = None
    """Passes over the data, instead of `max_steps`."""
    batch_size: PositiveInt = 64
    """Samples per step, over all ranks."""
    seq_len: PositiveInt = 2048
    """Longest sample in tokens."""
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
    disk_timeout_s: PositiveFloat = 86400.0
    """How long the run waits for room on a full disk before it gives up."""
    model: TrainerModel = TrainerModel()
    tokenizer: Tokenizer = Tokenizer()
    optim: Optimizer = Optimizer(lr=1e-5)
    scheduler: Scheduler = Scheduler()
    ckpt: Checkpoints = Checkpoints()
    wandb: Wandb | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where the conversations come from, however that was written."""
        if self.data is None:
            return self.source
        return (Source(data=self.data, subset=self.subset, split=self.split), *self.source)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.output_dir / self.name if self.name else self.output_dir)
