"""Exports: the model in Hugging Face format, made from the files of a checkpoint.

The checkpoint's `model/` holds everything but the weights (configuration, tokenizer, chat template). The weights are
put together from the shards of all ranks, one tensor at a time, so no process ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trireme.base.disk import require_room
from trireme.base.errors import JournalCorrupt
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.paths import replace_folder, step_folder, sync_folder
from trireme.journal.manifest import find_damage, read_manifest
from trireme.trainer.checkpoint import hf_files
from trireme.trainer.checkpoint.state import MODEL
from trireme.trainer.model.loading import untrained_of
from trireme.trainer.model.lora import adapters_of
from trireme.trainer.model.model import published_class, published_config
from trireme.trainer.parallel.shards import open_shards, shard_files, shard_of, write_shards
from trireme.transport.weights.buckets import num_bytes

log = get_logger("export")

DESCRIPTION = "model"  # folder in a checkpoint with all of an export but its weights
LAYOUT = "layout.json"  # file in a checkpoint with the tensors of an export
UNTRAINED = "rank_0_untrained.safetensors"  # file in a checkpoint with parts of the model that only exports need


class Exporter:
    """Makes `weights/step_N/` of each checkpoint, which appears under its name only once it is complete and on disk.

    Its methods use neither the weights of the model nor collectives, so they may run in another thread. They may be
    repeated after they failed.
    """

    def __init__(
        self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
    ) -> None:
        self.folder = folder  # parent of `step_N`
        self._model = model
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._adapters = adapters_of(model)  # if only these are trained and exported
        self._layout = hf_files.adapter_layout(model) if self._adapters else hf_files.layout_of(model, dtype)
        self._untrained = untrained_of(model)

    def describe(self, checkpoint: Path) -> list[Path]:
        """Write all but the weights; return the files."""
        folder, layout, untrained = checkpoint / DESCRIPTION, checkpoint / LAYOUT, checkpoint / UNTRAINED
        folder.mkdir(exist_ok=True)
        layout.write_bytes(msgspec.json.encode(self._layout))
        self._tokenizer.save_pretrained(folder)

        if self._adapters is not None:
            hf_files.describe_adapters(folder, self._adapters)
        else:
            describe_model(folder, self._model, self._dtype)

            # Parts that the model does not train are in no rank's shards.
            self._untrained.describe(folder)
            if self._untrained.names:
                tensors = self._untrained.tensors()
                write_shards(untrained, {f"{MODEL}.{name}": shard_of(tensor) for name, tensor in tensors})

        return [layout, *checkpoint.glob(UNTRAINED), *sorted(path for path in folder.rglob("*") if path.is_file())]

    def take_back(self, checkpoint: Path) -> None:
        """Remove what `describe` wrote."""
        shutil.rmtree(checkpoint / DESCRIPTION, ignore_errors=True)
        for name in (LAYOUT, UNTRAINED):
            (checkpoint / name).unlink(missing_ok=True)

    def write(self, checkpoint: Path, version: int) -> None:
        """Make `step_N` from a checkpoint that lacks only its manifest."""
        folder = step_folder(self.folder, version)
        describe = partial(shutil.copytree, checkpoint / DESCRIPTION)
        write_export(folder, describe, self._layout, sorted(checkpoint.glob("rank_*.safetensors")))
        log.info("weights %s", folder)


def export_checkpoint(checkpoint: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Make `folder` from a checkpoint alone.

    Args:
        dtype: precision of the weights; the run's own if not given.

    Raises:
        JournalCorrupt: the checkpoint is damaged.
        OSError: the disk is full.
    """
    require_undamaged(checkpoint)
    layout = hf_files.read_layout(checkpoint / LAYOUT)
    write_export(
        folder,
        partial(copy_description, checkpoint),
        hf_files.in_dtype(layout, dtype) if dtype else layout,
        shard_files(checkpoint),
        dtype=getattr(torch, dtype) if dtype else None,
    )


def require_undamaged(checkpoint: Path) -> None:
    """Read the whole checkpoint and check its digests."""
    if damage := find_damage(checkpoint):
        raise JournalCorrupt(f"The checkpoint {checkpoint} is damaged: {damage}. Export another step.")


def copy_description(checkpoint: Path, folder: Path, *, without: Sequence[str] = ()) -> None:
    """Copy all of an export but its weights.

    What the manifest does not list is left out. It may be a link to a file of the user.
    """
    listed = read_manifest(checkpoint).files

    def left_out(root: str, names: list[str]) -> set[str]:
        paths = {name: Path(root, name) for name in names if name not in without}
        kept = {
            name
            for name, path in paths.items()
            if str(path.relative_to(checkpoint)) in listed or (path.is_dir() and not path.is_symlink())
        }
        return set(names) - kept

    shutil.copytree(checkpoint / DESCRIPTION, folder, ignore=left_out)


def write_export(
    folder: Path,
    describe: Callable[[Path], object],
    layout: hf_files.Layout,
    pieces: Sequence[Path],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write an export: its description, and the tensors of its layout.

    Args:
        describe: creates the folder that it is given, with all but the weights.
        dtype: precision of the layout if it differs from the description's.
    """
    with new_folder(folder, room=sum(map(num_bytes, layout))) as partial:
        describe(partial)
        # An export with `adapter_config.json` holds adapters: PEFT reads them from one file only, under its own name.
        is_adapter = (partial / hf_files.CONFIG).is_file()
        with open_shards(pieces) as stored:
            most = sys.maxsize if is_adapter else hf_files.MAX_FILE_BYTES
            hf_files.write_model(partial, layout, hf_files.stored_tensors(layout, stored), max_file_bytes=most)
        if is_adapter:
            (partial / hf_files.WHOLE).rename(partial / hf_files.WEIGHTS)
        elif dtype is not None:
            correct_config(partial, dtype)


@contextmanager
def new_folder(folder: Path, *, room: int) -> Iterator[Path]:
    """Make a folder of at least `room` bytes that appears under its name only once it is complete and on disk.

    Yields the path under which the caller creates it. After an error, it is removed.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        require_room(folder.parent, room)
        yield partial

        # The rename must not reach the disk before what it names.
        for path in partial.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        sync_folder(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    reach("export.written")
    replace_folder(partial, folder)


def describe_model(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write all files of a model but its weights and tokenizer."""
    published_config(model).save_pretrained(folder)
    if model.generation_config is not None:  # `save_pretrained` rejects what some published models have
        (folder / "generation_config.json").write_text(model.generation_config.to_json_string())
    correct_config(folder, dtype, published_class(model))


def correct_config(folder: Path, dtype: torch.dtype, architecture: str | None = None) -> None:
    """Let `config.json` describe the saved weights, not the model as it was trained."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part["dtype"] = str(dtype).removeprefix("torch.")
        if "use_cache" in part:
            part["use_cache"] = True
    if "dtype" in config.get("vision_config", {}):
        config["vision_config"]["dtype"] = config["dtype"]
    if architecture:
        config["architectures"] = [architecture]  # a model built from its configuration alone may lack it
    path.write_text(json.dumps(config, indent=2) + "\n")
