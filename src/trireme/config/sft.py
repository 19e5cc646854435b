"""`sft`: supervised fine-tuning on messages, with the trainer's own model, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trireme.config.files import files_near
from trireme.config.inference import InferenceConfig
from trireme.config.model.folder import looks_local
from trireme.config.orchestrator import Evaluation
from trireme.config.rules.orchestrator import evaluation_problems
from trireme.config.rules.sampling import sampling_problems
from trireme.config.run import AnyRun
from trireme.config.section import Section
from trireme.config.trainer import Optimizer, Training

TrainedRole = Literal["assistant", "user", "system", "tool"]


class Source(Section):
    """`[[source]]`: one of several places that the conversations come from."""

    data: str
    """Conversations, in the same forms as `data` of the run."""
    subset: str | None = None
    """Configuration of a data set on a hub, where it has several."""
    split: str = "train"
    """Split of a data set on a hub; slices as `train[:1000]` work."""
    repeat: PositiveFloat = 1.0
    """Times that an epoch holds each of its conversations; 0.25 is another quarter of them each epoch."""


class SftConfig(Training, AnyRun):
    """Everything about a supervised run. Its weights are a base model for `rl`."""

    output_dir: Path = Path("outputs/sft")
    """Folder that runs are written to."""
    data: str | None = None
    """Conversations, in one of the forms of `docs/sft.md`: a .jsonl, .json or .parquet file, a folder of such, a .py
    file whose `conversations()` returns some, or a data set's name on a hub (`owner/name`). `fake` is random tokens."""
    subset: str | None = None
    """Configuration of a data set on a hub, where it has several."""
    split: str = "train"
    """Split of a data set on a hub; slices as `train[:1000]` work."""
    source: tuple[Source, ...] = ()
    """Several places instead of `data`."""
    validation: str | None = None
    """Conversations to measure the loss on, of the same forms as `data`; a share of `data` if not set."""
    validation_split: str = "validation"
    """Split of `validation`, where that is on a hub."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the data held out for validation where `validation` is not given; 0 holds out none."""
    validation_interval: PositiveInt | None = None
    """Steps between measurements of the validation loss; only before the first and after the last if not set."""
    loss_on: tuple[TrainedRole, ...] = ("assistant",)
    """Roles whose messages are trained on; a message's own `train` or `weight` takes precedence."""
    chat_template: Path | None = None
    """Jinja file to render conversations with, which the exported tokenizer keeps; its own if not set."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template besides messages and tools, as `{ enable_thinking = false }`."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """Samples of more than `seq_len` tokens: cut them at the end, or leave them out. Both are counted."""
    max_steps: PositiveInt = 100
    """Optimizer steps."""
    num_epochs: PositiveFloat | None = None
    """Passes over the data, instead of `max_steps`."""
    batch_size: PositiveInt = 64
    """Samples per step, over all ranks."""
    optim: Optimizer = Optimizer(lr=1e-5)
    eval: Evaluation | None = None
    inference: InferenceConfig = InferenceConfig()

    @property
    def sources(self) -> tuple[Source, ...]:
        """All places of conversations: `data`, then `source`."""
        if self.data is None:
            return self.source
        return (Source(data=self.data, subset=self.subset, split=self.split), *self.source)

    def evaluated_at(self, step: int, *, last: int | None) -> list[str]:
        """Return the environments that the weights of a step are evaluated on, by name; step 0 is the base model.

        Args:
            last: step after which the run ends; None if it is not known yet.
        """
        names = [each.resolved_name for each in self.eval.env] if self.eval else []
        return [name for name in names if self.eval and _is_due(self.eval.of(name), step, last)]


def _is_due(evaluation: Evaluation, step: int, last: int | None) -> bool:
    if step == 0:
        return evaluation.eval_base
    return step == last or (evaluation.interval is not None and step % evaluation.interval == 0)


# Rules of these tables. Each yields one message per problem.

SUFFIXES = (".jsonl", ".json", ".parquet", ".py")
FOLDER_SUFFIXES = (".jsonl", ".json", ".parquet")
FAKE, FAKE_OF_ANY_LENGTH = "fake", "fake-of-any-length"
"""Data that are made up, to try speed and memory: samples of random tokens, as long as `seq_len` or shorter."""


def is_on_a_hub(data: str) -> bool:
    """Return whether a name of data means a data set on a hub: `owner/name`, and nothing of that name is here.

    Example:
        is_on_a_hub("data/chats.jsonl"), is_on_a_hub("owner/chats")  # False, True
    """
    is_name = data.count("/") == 1 and not data.endswith(SUFFIXES)
    return is_name and not Path(data).exists() and not looks_local(data)


def data_files(folder: Path) -> list[Path]:
    """Return the data files of a folder in order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix in FOLDER_SUFFIXES)


def sft_problems(config: SftConfig) -> Iterator[str]:
    """Yield what is wrong with the data, as far as it can be seen without reading them, and with how long to train."""
    if not config.sources:
        yield "no data is given - expected conversations: files, or a data set on a hub. Write `--data FILE`."

    # Names on a hub are checked when they are read, files now.
    named = [("data", config.data), *((f"source[{i}].data", source.data) for i, source in enumerate(config.source))]
    for key, data in (*named, ("validation", config.validation)):
        is_made_up = data in (FAKE, FAKE_OF_ANY_LENGTH) and key != "validation"
        if data is not None and not is_made_up and not is_on_a_hub(data):
            yield from _check_files(key, Path(data))

    if config.chat_template and not config.chat_template.is_file():
        yield (
            f'chat_template = "{config.chat_template}" is no file (looked in {Path.cwd()}) - expected a Jinja '
            "template. Check the path, or leave it out for the tokenizer's own."
        )

    # Validation has one source, and an interval only if there is one.
    if config.validation and config.validation_fraction:
        yield f"`validation` and validation_fraction = {config.validation_fraction:g} - expected one of the two. Set 0."
    if config.validation_interval and not config.validation and not config.validation_fraction:
        yield (
            f"validation_interval = {config.validation_interval}, and there is nothing to measure on - expected "
            "`validation` or `validation_fraction`. Write `validation_fraction = 0.01`, or leave the interval out."
        )

    # The length of the run is given once. A `max_steps` that equals the default cannot be told from none.
    if config.num_epochs is not None and config.max_steps != SftConfig.model_fields["max_steps"].default:
        yield f"max_steps = {config.max_steps} and num_epochs = {config.num_epochs:g} - expected one. Remove the other."

    if config.eval:
        yield from _eval_problems(config, config.eval)
    elif config.inference != InferenceConfig():
        yield (
            "`[inference]` without `[eval]` - expected both or none: the engine only answers evaluations. Remove "
            "`[inference]`, or add `[eval]`."
        )

    if not config.loss_on:
        yield 'loss_on = [] - expected the roles whose messages are trained on. Write `loss_on = ["assistant"]`.'


def _eval_problems(config: SftConfig, evaluation: Evaluation) -> Iterator[str]:
    names = [each.file_name for each in evaluation.env]
    if not names:
        yield (
            "`[eval]` names no environment - expected at least one, as supervised training has none of its own. Add "
            'to the file:\n    [[eval.env]]\n    id = "reverse-text"'
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield (
            f'two environments of `[eval]` have results of one name, "{twice}" - expected names that differ. Give each '
            "table a `name` of its own."
        )
    if config.model.from_scratch and config.evaluated_at(0, last=None):
        yield (
            "eval.eval_base = true with model.from_scratch = true - expected a base model with weights: the engine "
            "would evaluate those of the folder, which this run does not train. Add `eval_base = false`."
        )

    views = [evaluation.of(each.resolved_name) for each in evaluation.env]
    yield from dict.fromkeys(problem for view in views for problem in evaluation_problems(view, "eval."))
    for each, view in zip(evaluation.env, views, strict=True):
        table = f"eval.env.{each.resolved_name}.sampling" if each.sampling else "eval.sampling"
        yield from sampling_problems(table, view.sampling)


def _check_files(key: str, path: Path) -> Iterator[str]:
    if not path.exists():
        yield (
            f'{key} = "{path}" does not exist (looked in {Path.cwd()}) - expected a file ({", ".join(SUFFIXES)}), a '
            f"folder of such, or a data set's name on a hub (`owner/name`). {_near(path)}"
        )
    elif path.is_dir() and not data_files(path):
        yield (
            f'{key} = "{path}" is a folder without data - expected files in it that end with '
            f"{', '.join(FOLDER_SUFFIXES)}. {_near(path / '*')}"
        )
    elif path.is_file() and path.suffix not in SUFFIXES:
        yield (
            f'{key} = "{path}" ends with "{path.suffix}" - expected one of {", ".join(SUFFIXES)}. '
            "Convert it; one JSON object per line (.jsonl) is the simplest."
        )


def _near(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("."))
    return files_near(path, sorted(each for each in folder.iterdir() if each.suffix in SUFFIXES)) or "Check the path."
