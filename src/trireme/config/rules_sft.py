"""Rules of `sft`: what can be seen of its data without reading it, and how its keys go together."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from trireme.base.devices import Devices
from trireme.config.readiness import check_model, looks_local
from trireme.config.sft import SftConfig

SUFFIXES = (".jsonl", ".json", ".parquet", ".py")
FOLDER_SUFFIXES = (".jsonl", ".json", ".parquet")


def is_on_a_hub(data: str) -> bool:
    """Whether a name of data means a data set on a hub: `owner/name`, and nothing of that name is here.

    Example:
        is_on_a_hub("data/chats.jsonl"), is_on_a_hub("owner/chats")  # False, True
    """
    is_name = data.count("/") == 1 and not data.endswith(SUFFIXES)
    return is_name and not Path(data).exists() and not looks_local(data)


def data_files(folder: Path) -> list[Path]:
    """Of a folder, in order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix in FOLDER_SUFFIXES)


def sft_problems(config: SftConfig, devices: Devices) -> Iterator[str]:
    yield from _check_data(config)
    yield from _check_length_of_run(config)
    yield from _check_roles(config)
    yield from check_model("model.name", config.model.name)
    yield from _check_ranks(config, devices)


def _check_data(config: SftConfig) -> Iterator[str]:
    if not config.sources:
        yield (
            "no data is given - expected a file of conversations, a folder of such, or a data set's name on a hub. "
            "Write `--data file.jsonl`."
        )
    named = [("data", config.data), *((f"source[{i}].data", source.data) for i, source in enumerate(config.source))]
    for key, data in (*named, ("validation", config.validation)):
        if data is not None:
            yield from _check_place(key, data)
    if config.chat_template and not config.chat_template.is_file():
        yield (
            f'chat_template = "{config.chat_template}" is no file (looked in {Path.cwd()}) - expected a Jinja '
            "template. Check the path, or leave it out for the tokenizer's own."
        )
    if config.validation and config.validation_fraction:
        yield (
            f'validation = "{config.validation}" and validation_fraction = {config.validation_fraction:g} - expected '
            "one of the two. Remove `validation_fraction` (or write 0)."
        )
    yield from _check_measured(config)


def _check_measured(config: SftConfig) -> Iterator[str]:
    if config.validation_interval and not config.validation and not config.validation_fraction:
        yield (
            f"validation_interval = {config.validation_interval}, and there is nothing to measure on - expected "
            "`validation` or `validation_fraction`. Write `validation_fraction = 0.01`, or leave the interval out."
        )


def _check_place(key: str, data: str) -> Iterator[str]:
    path = Path(data)
    if is_on_a_hub(data):
        return
    if not path.exists():
        yield (
            f'{key} = "{data}" does not exist (looked in {Path.cwd()}) - expected a file ({", ".join(SUFFIXES)}), a '
            f"folder of such, or a data set's name on a hub (`owner/name`). {_near(path)}"
        )
    elif path.is_dir() and not data_files(path):
        yield (
            f'{key} = "{data}" is a folder without data - expected files in it that end with '
            f"{', '.join(FOLDER_SUFFIXES)}. {_near(path / '*')}"
        )
    elif path.is_file() and path.suffix not in SUFFIXES:
        yield (
            f'{key} = "{data}" ends with "{path.suffix}" - expected one of {", ".join(SUFFIXES)}. '
            "Convert it; one JSON object per line (.jsonl) is the simplest."
        )


def _near(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("."))
    beside = sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)
    near = get_close_matches(path.name, beside, n=3, cutoff=0.5) or beside[:3]
    return f"Near it: {', '.join(str(folder / name) for name in near)}." if near else "Check the path."


def _check_length_of_run(config: SftConfig) -> Iterator[str]:
    if config.num_epochs is not None and config.max_steps != SftConfig.model_fields["max_steps"].default:
        yield (
            f"max_steps = {config.max_steps} and num_epochs = {config.num_epochs:g} - expected one of the two. "
            "Remove the one that is not to count."
        )


def _check_roles(config: SftConfig) -> Iterator[str]:
    if not config.loss_on:
        yield (
            "loss_on = [] - expected the roles whose messages are learned from. "
            'Write `loss_on = ["assistant"]`, or leave it out.'
        )


def _check_ranks(config: SftConfig, devices: Devices) -> Iterator[str]:
    ranks = config.num_ranks or 1
    if config.device == "cuda" and ranks > devices.num_gpus:
        yield (
            f'num_ranks = {ranks}, device = "cuda", and {devices.num_gpus} GPUs are visible - '
            "expected one GPU per rank. Lower `num_ranks`, or run on CPU with `--device cpu`."
        )
