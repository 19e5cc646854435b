"""From a run's configuration to its samples on disk: rank 0 prepares them, all ranks open them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from trireme.base.disk import when_there_is_room
from trireme.base.errors import ConfigError, PeerDied
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig, Source
from trireme.trainer.model.model import open_tokenizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.sft.conversations import read_conversations
from trireme.trainer.sft.dataset import Epochs, Portion, SampleFiles, SampleWriter, require_samples, write_samples
from trireme.trainer.sft.rendering import Renderer

log = get_logger("data")

_DIGESTS = "digests.json"


@dataclass(frozen=True)
class SftData:
    """What a run trains on, and what it measures itself on."""

    train: Epochs
    held_out: SampleFiles | None


def open_tokenizer_of(config: SftConfig) -> PreTrainedTokenizerBase:
    """Raises: ConfigError where it cannot be had, or cannot render conversations."""
    name = config.tokenizer.name or config.model.name
    assert name is not None, "rules ask for a model"
    return open_tokenizer(name, config.model.trust_remote_code, chat_template=config.chat_template)


def prepare_data(config: SftConfig, world: World, waits: Waits) -> SftData:
    """A collective: ranks wait for the first, which reads all conversations.

    Raises:
        ConfigError: some entry is no conversation, or there is none to learn from.
        PeerDied: rank 0 has raised that.
    """
    is_ready = 0
    try:
        if world.is_main:
            _write_all(config, waits)
            is_ready = 1
    finally:
        agreed = world.agree(is_ready)
    if not agreed:
        raise PeerDied("Rank 0 has refused the data. Its own message says why.")
    folder = config.paths.data
    portions = [
        Portion(SampleFiles(folder / f"train_{number}"), source.repeat) for number, source in enumerate(config.sources)
    ]
    held_out = SampleFiles(folder / "validation") if (folder / "validation").is_dir() else None
    return SftData(Epochs(portions, config.batch_size, config.seed), held_out)


def _write_all(config: SftConfig, waits: Waits) -> None:
    renderer = Renderer(open_tokenizer_of(config), config.loss_on, tuple(config.chat_template_kwargs.items()))
    writers = {f"train_{number}": _writer(config) for number in range(len(config.sources))}
    validation = _writer(config)
    for writer, source in zip(writers.values(), config.sources, strict=True):
        conversations = read_conversations(source)
        write_samples(conversations, renderer, writer, validation, held_out_fraction=config.validation_fraction)
        log.info("%s: %s", source.data, writer.counts)
        require_samples(writer, source.data)
    if config.validation:
        write_samples(read_conversations(_validation(config)), renderer, validation)
    if config.validation or config.validation_fraction:
        log.info("validation: %s", validation.counts)
        require_samples(validation, "validation")
        writers["validation"] = validation
    _write(config, writers, waits)


def _writer(config: SftConfig) -> SampleWriter:
    return SampleWriter(seq_len=config.seq_len, drop=config.overlong == "drop")


def _validation(config: SftConfig) -> Source:
    assert config.validation is not None
    return Source(data=config.validation, split=config.validation_split)


def _write(config: SftConfig, writers: dict[str, SampleWriter], waits: Waits) -> None:
    folder = config.paths.data

    def write() -> None:
        for name, writer in writers.items():
            writer.write(folder / name)

    when_there_is_room(write, what="samples", folder=folder, waits=waits, deadline_s=config.disk_timeout_s)
    _compare_with_earlier(folder, list(writers), resumes=config.resume or config.ckpt.resume_step is not None)


def _compare_with_earlier(folder: Path, names: list[str], *, resumes: bool) -> None:
    """A run that goes on counts on finding the samples where it left them."""
    digests = {name: SampleFiles(folder / name).digest() for name in names}
    path = folder / _DIGESTS
    earlier = json.loads(path.read_text()) if resumes and path.exists() else digests
    changed = sorted(name for name in {*digests, *earlier} if digests.get(name) != earlier.get(name))
    if changed:
        log.warning(
            "The samples are not those that this run began with (%s): it goes on in the order of the new ones. Leave "
            "data, tokenizer, chat template and `seq_len` as they were for the same training.",
            ", ".join(changed),
        )
    with atomic_write(path) as file:
        file.write(json.dumps(digests).encode())


def steps_of(config: SftConfig, data: Epochs) -> int:
    """How long the run is.

    Raises:
        ConfigError: not even one batch.
    """
    if config.num_epochs is None:
        return config.max_steps
    steps = round(config.num_epochs * data.length / config.batch_size)
    if not steps:
        raise ConfigError(
            f"num_epochs = {config.num_epochs:g} of {data.length} samples in batches of {config.batch_size} is less "
            "than a step - expected at least one. Raise `num_epochs`, or lower `batch_size`."
        )
    return steps
