"""Prepare the data of a run: rank 0 writes all samples to disk, and all ranks open them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from trireme.base.disk import when_there_is_room
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.paths import RunPaths
from trireme.base.waiting import Waits
from trireme.config.model.folder import config_file, load_described
from trireme.config.model.weights import rows_of
from trireme.config.sft import FAKE, FAKE_OF_ANY_LENGTH, SftConfig, Source
from trireme.config.trainer import TrainerModel
from trireme.journal.manifest import complete_steps
from trireme.journal.origin import read_origin
from trireme.journal.pictures import PictureFiles, rules_of_model
from trireme.journal.settings import Settings
from trireme.trainer.parallel.mesh import World
from trireme.trainer.sft.conversations import read_conversations
from trireme.trainer.sft.dataset import Epochs, Portion, SampleFiles, SampleWriter, require_samples, write_samples
from trireme.trainer.sft.pictures import PictureReader
from trireme.trainer.sft.rendering import Renderer, Tokenized, tokenized
from trireme.trainer.tokenizer import open_tokenizer

log = get_logger("data")

MADE_UP = 512  # samples of an epoch of random tokens


def open_tokenizer_of(config: SftConfig) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer.

    Raises:
        ConfigError: it cannot be loaded.
    """
    name = config.tokenizer.name or config.model.name
    assert name is not None, "rules ask for a model"
    return open_tokenizer(name, config.model.trust_remote_code, chat_template=config.chat_template)


def picture_files(config: SftConfig) -> PictureFiles:
    """Return the pictures of the run's data."""
    return PictureFiles(config.paths.data / "pictures")


def prepare_data(
    config: SftConfig, world: World, waits: Waits, meanwhile: Callable[[], None] = lambda: None
) -> tuple[Epochs, SampleFiles | None]:
    """Write samples on rank 0 and open them on all ranks: those to train on, and those of the validation loss.

    A collective.

    Args:
        meanwhile: called again and again on rank 0 while the other ranks wait for it.

    Raises:
        ConfigError: on rank 0, an entry is no conversation, or no conversation can be learned from; on all ranks, an
            epoch has no sample of a source.
        PeerDied: on the other ranks.
    """
    world.first(lambda: _write_all(config, waits, meanwhile), "the data")

    # All ranks map the same files, so no rank holds the data of a run in memory of its own.
    folder = config.paths.data
    portions = [
        Portion(SampleFiles(folder / f"train_{number}"), source.repeat) for number, source in enumerate(config.sources)
    ]
    for source, portion in zip(config.sources, portions, strict=True):
        if not len(portion):
            raise ConfigError(
                f"repeat = {source.repeat:g} of {source.data}, which has {len(portion.samples)} samples, is none in an "
                "epoch - at least one was expected. Raise `repeat`, or leave the source out."
            )

    has_validation = config.validation or config.validation_fraction  # the folder may be of an earlier start
    held_out = SampleFiles(folder / "validation") if has_validation else None

    # Steps before a change of the batch size took other numbers of samples.
    sizes = [(end, each.batch_size) for (_, each), (end, _) in pairwise(Settings(config).eras())]
    origin = read_origin(config.paths.root)
    begin = (origin.begins_at, origin.samples) if origin else (0, 0)
    return Epochs(portions, config.batch_size, config.seed, sizes, begin=begin), held_out


def _write_all(config: SftConfig, waits: Waits, meanwhile: Callable[[], None]) -> None:
    # One renderer for all sources, so all samples follow one template.
    pictures = _picture_reader(config, waits, meanwhile)
    renderer = Renderer(
        open_tokenizer_of(config),
        config.loss_on,
        tuple(config.chat_template_kwargs.items()),
        image_token=pictures.rules.token if pictures else None,
        rows=_rows_of(config.model),
    )

    new_writer = partial(SampleWriter, seq_len=config.seq_len, drop=config.overlong == "drop")
    writers, validation = {f"train_{number}": new_writer() for number in range(len(config.sources))}, new_writer()
    for writer, source in zip(writers.values(), config.sources, strict=True):
        if source.data in (FAKE, FAKE_OF_ANY_LENGTH):
            samples = _made_up(config, renderer.tokenizer.vocab_size, varies=source.data == FAKE_OF_ANY_LENGTH)
        else:
            samples = tokenized(renderer, read_conversations(source, pictures, meanwhile))
        write_samples(samples, writer, validation, held_out_fraction=config.validation_fraction)
        log.info("%s: %s", source.data, writer.counts)
        require_samples(writer, source.data)

    # A validation source of its own is read whole; otherwise the sources have held some conversations out.
    if config.validation:
        source = Source(data=config.validation, split=config.validation_split)
        write_samples(tokenized(renderer, read_conversations(source, pictures, meanwhile)), validation)

    if config.validation or config.validation_fraction:
        log.info("validation: %s", validation.counts)
        if not validation.counts.conversations:
            read = sum(writer.counts.conversations for writer in writers.values())
            raise ConfigError(
                f"validation_fraction = {config.validation_fraction:g} holds out none of {read} conversations - at "
                "least one was expected. Raise it, or give conversations as `validation`."
            )
        require_samples(validation, "validation")
        writers["validation"] = validation

    # A run continues by the place in the samples, its own or the other run's, so these must be what they were.
    folder, before, origin = config.paths.data, None, read_origin(config.paths.root)
    if (config.resume or config.ckpt.resume_step) and complete_steps(config.paths.checkpoints):
        before = folder
    elif origin and "data" not in origin.without:
        before = RunPaths(Path(origin.folder)).data
    if before is not None and (before / "train_0").exists():
        for name, writer in writers.items():
            if name != "validation":
                _require_same(writer, before / name)

    def write() -> None:
        for name, writer in writers.items():
            meanwhile()
            writer.write(folder / name)

    when_there_is_room(write, what="samples", folder=folder, waits=waits, deadline_s=config.disk_timeout_s)


def _made_up(config: SftConfig, vocabulary: int, *, varies: bool) -> Iterator[list[Tokenized]]:
    """Yield samples of random tokens, all of which are learned but the first.

    Args:
        vocabulary: ids below this are drawn.
        varies: whether samples have any length up to `seq_len`, or all that one.
    """
    chance = np.random.default_rng(config.seed)
    for _ in range(MADE_UP):
        length = int(chance.integers(2, config.seq_len, endpoint=True)) if varies else config.seq_len
        yield [Tokenized(chance.integers(vocabulary, size=length).tolist(), [1] * length)]


def _rows_of(model: TrainerModel) -> int | None:
    file = config_file(model.name) if model.name else None
    return rows_of(file.parent, load_described(file), reads=not model.from_scratch) if file else None


def _require_same(writer: SampleWriter, folder: Path) -> None:
    """
    Raises:
        ConfigError: the samples are others than those that the run was trained on so far.
    """
    if (sample := writer.first_difference(folder)) is not None:
        raise ConfigError(
            f"the run in {folder.parents[1]} was trained on other samples so far: {folder} and what is made of the "
            f"data now ({writer.counts}) differ from sample {sample} on (counted from 0) - expected the same, as the "
            "run continues by its place among them. Restore the data, the tokenizer with its chat template, `seq_len`, "
            "`overlong`, `loss_on` and `validation_fraction`, or begin a new run with `--resume-from` that run "
            "`--ckpt.resume-without data`."
        )


def _picture_reader(config: SftConfig, waits: Waits, meanwhile: Callable[[], None]) -> PictureReader | None:
    if config.model.vlm is None:
        return None
    assert config.model.name is not None, "`resolve_sft` fills it in"
    files = picture_files(config)

    def keep(png: bytes) -> str:
        def write() -> str:
            meanwhile()
            return files.add(png)

        return when_there_is_room(
            write, what="a picture", folder=config.paths.data, waits=waits, deadline_s=config.disk_timeout_s
        )

    return PictureReader(keep, rules_of_model(config.model.name))


def steps_of(config: SftConfig, data: Epochs, trained: int = 0) -> int:
    """Return the number of steps of the run.

    Args:
        trained: steps before those that these settings are for.

    Raises:
        ConfigError: the data do not fill one batch.
    """
    if config.num_epochs is None:
        return config.max_steps

    left = config.num_epochs * data.length - data.taken(trained)
    steps = trained + max(0, round(left / config.batch_size))
    if not steps:
        raise ConfigError(
            f"num_epochs = {config.num_epochs:g} of {data.length} samples in batches of {config.batch_size} is less "
            "than a step - expected at least one. Raise `num_epochs`, or lower `batch_size`."
        )
    return steps
