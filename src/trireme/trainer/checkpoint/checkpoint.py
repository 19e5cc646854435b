"""Checkpoints: the trainer's state on disk, complete or not at all, written in the background.

`save` copies the state and returns. A thread of each rank writes to `checkpoints/.step_N.partial/`: the rank's shards,
its random state, and a list of both with their digests. Rank 0's thread also writes the description of the model
(`model/`), waits for all ranks' lists, makes the weights in Hugging Face format out of all shards, writes the lists as
the manifest, and renames the folder to `step_N`. These threads use no collectives, which could meet those of training.
They wait for each other's files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from trireme.base.background import in_background
from trireme.base.disk import require_room, when_there_is_room
from trireme.base.errors import JournalCorrupt
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write, remove_folder, replace_folder, set_aside_after, step_folder
from trireme.base.waiting import DISK, Waits
from trireme.config.trainer import Checkpoints
from trireme.journal.manifest import MANIFEST, FileEntry, Manifest, complete_steps, describe_file, read_manifest
from trireme.journal.origin import read_origin
from trireme.trainer.checkpoint.export import DESCRIPTION, Exporter
from trireme.trainer.checkpoint.hf_files import require_same_scale
from trireme.trainer.checkpoint.resume import tidy, version_to_resume
from trireme.trainer.checkpoint.state import TrainerState, load_tensors, tensors_of
from trireme.trainer.model.lora import adapters_of
from trireme.trainer.optim.state_offload import OffloadsState
from trireme.trainer.parallel.mesh import World
from trireme.trainer.parallel.shards import Shard, is_written_by, open_shards, shard_files, shard_of, write_shards

log = get_logger("checkpoint")

WRITE_S = 3600.0  # timeout for writing a checkpoint, apart from waits for room on the disk
CLOSE_S = 20.0
POLL_S = 0.05

Files = dict[str, FileEntry]


@dataclass(frozen=True)
class _Copy:
    """A copy of one rank's state at one version."""

    version: int
    folder: Path
    shards: dict[str, Shard]
    random: dict[str, torch.Tensor]

    @property
    def name(self) -> str:
        return f"step_{self.version}"


class CheckpointStore:
    """The checkpoints of a run."""

    def __init__(
        self,
        folder: Path,
        config: Checkpoints,
        world: World,
        *,
        waits: Waits,
        disk_timeout_s: float,
        exporter: Exporter | None = None,
    ) -> None:
        """
        Args:
            disk_timeout_s: timeout of waits for room on a full disk.
            exporter: exports the weights of every checkpoint in Hugging Face format; of rank 0.
        """
        self._folder = folder
        self._config = config
        self._world = world
        self._waits = waits
        self._disk_timeout_s = disk_timeout_s
        self._exporter = exporter
        self._host_buffers: dict[str, torch.Tensor] = {}  # CPU memory of the copies, by name of the tensor
        self._on_gpu = world.device.type == "cuda"
        self._writing: Future[None] | None = None  # the last checkpoint
        self._what = ""  # the last checkpoint, for those who wait for it

    def is_due(self, version: int, *, last: int) -> bool:
        """Return whether a checkpoint is due at this version. Raises what writing the last one raised."""
        if self._writing is not None and self._writing.done():
            self.wait()
        interval = self._config.interval
        return version == last or (interval is not None and version % interval == 0)

    def save(self, state: TrainerState) -> None:
        """Copy the state, and write the copy in the background. A collective.

        Waits for the checkpoint before, and raises what its writing raised.
        """
        self.wait()
        partial = self._folder / f".step_{state.version}.partial"
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        self._world.barrier()  # the folder now exists only while this checkpoint is written

        # Each shard is copied once: of ranks that hold the same one, the first writes it.
        shards = {}
        for name, tensor in tensors_of(state).items():
            shard = shard_of(tensor)
            if is_written_by(tensor, self._world.rank) and shard.tensor.nbytes:
                shards[name] = replace(shard, tensor=self._copy_to_host(name, shard.tensor))

        # Each rank has random numbers of its own, which it continues after a resume.
        random = {"cpu": torch.get_rng_state()}
        if self._on_gpu:
            torch.cuda.synchronize()  # until here copies are under way
            random["cuda"] = torch.cuda.get_rng_state()

        copy = _Copy(state.version, partial, shards, random)
        self._what = f"checkpoint {copy.name} to be written"
        self._writing = in_background(lambda: self._write(copy), name=self._what)

    def _copy_to_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy into a CPU buffer, which is allocated once and reused by every checkpoint.

        For tensors on a GPU the buffers are pinned, so that the driver copies directly into them.
        """
        buffer = self._host_buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
            self._host_buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=self._on_gpu)

    def wait(self) -> None:
        """Wait until the last checkpoint of all ranks is on disk. Raises what its writing raised."""
        if self._writing is None:
            return
        self._wait_for(self._writing.done, self._what, peer=DISK, times=4)  # the deadlines of the job come first
        written, self._writing = self._writing, None  # an error of the writing is raised once
        written.result()

    def close(self) -> None:
        """Give the last checkpoint some time to be written. Raises nothing; call `wait` before to be sure."""
        if self._writing is None:
            return
        if not wait([self._writing], CLOSE_S).done:
            log.warning("%s: abandoned, as the process ends", self._what)
        elif (error := self._writing.exception()) is not None:
            log.error("%s: %s: %s", self._what, type(error).__name__, error)

    def resume(self, state: TrainerState, *, resume: bool) -> None:
        """Load the checkpoint that the run resumes from, if any. A collective.

        Raises:
            ConfigError: on rank 0, as `version_to_resume`.
            PeerDied: on the other ranks.
        """
        version = self._world.first(lambda: self._choose(resume), "the checkpoint to resume from")
        load_version(state, self._folder, version, rank=self._world.rank)

    def _choose(self, resume: bool) -> int:
        # What a killed process left is removed before any folder is chosen.
        tidy(self._folder)
        if self._exporter:
            tidy(self._exporter.folder)
        origin = read_origin(self._folder.parent)
        first = origin.begins_at if origin else 0
        version = version_to_resume(self._folder, self._config, resume=resume, first=first)
        if origin and version == first and (damage := origin.find_damage(self._folder.parent)):
            raise JournalCorrupt(
                f"The checkpoint that the run began from cannot be used: {damage}. Restore it from {origin.folder}, or "
                "begin the run again."
            )
        going_back = self._config.resume_step not in (None, -1)

        # Later checkpoints belong to steps that are taken again. They are kept under another name.
        if resume or self._config.resume_step is not None:
            set_aside_after(self._folder, version)
        if going_back and self._exporter:
            set_aside_after(self._exporter.folder, version)
        return version

    def _write(self, copy: _Copy) -> None:
        """Write a copy. Runs in the background thread."""
        rank = self._world.rank
        if self._world.is_main:
            self._when_there_is_room(lambda: copy.folder.mkdir(parents=True), f"checkpoint {copy.name}")
        else:
            self._wait_for(copy.folder.exists, f"a folder for checkpoint {copy.name}", peer="trainer", times=3)

        reach("checkpoint.begun", rank=rank)
        self._when_there_is_room(lambda: self._write_rank(copy), f"checkpoint {copy.name}")
        reach("checkpoint.written", rank=rank)

        # A checkpoint counts from its rename on, which rank 0 does once the lists of all ranks are there.
        if self._world.is_main:
            self._complete(copy)
        else:
            is_complete = f"checkpoint {copy.name} to be complete"
            self._wait_for(lambda: not copy.folder.exists(), is_complete, peer="trainer", times=3)

    def _write_rank(self, copy: _Copy) -> None:
        """Write what this rank holds, and the list of its files. After an error, remove them."""
        rank = self._world.rank
        shards, random = copy.folder / f"rank_{rank}.safetensors", copy.folder / f"random_{rank}.safetensors"

        # A disk without room is noticed before gigabytes are written to it.
        try:
            require_room(copy.folder, sum(shard.tensor.nbytes for shard in copy.shards.values()))
            write_shards(shards, copy.shards)
            save_file(copy.random, random)

            # Rank 0 copies this list into the manifest, so it names only files that are on disk for certain.
            files: Files = {}
            for path in [shards, random, *(self._exporter.describe(copy.folder) if self._exporter else ())]:
                with open(path, "rb") as opened:
                    os.fsync(opened.fileno())
                files[str(path.relative_to(copy.folder))] = describe_file(path)
            with atomic_write(_list_of_rank(copy.folder, rank)) as file:
                file.write(msgspec.json.encode(files))
        except BaseException:
            # What is left would take the room that the next attempt waits for.
            with suppress(OSError):
                shards.unlink(missing_ok=True)
                random.unlink(missing_ok=True)
                if self._exporter:
                    self._exporter.take_back(copy.folder)
            raise

    def _complete(self, copy: _Copy) -> None:
        # A rank writes its list last, so all of its files are complete once the list is there.
        files: Files = {}
        for rank in range(self._world.size):
            path = _list_of_rank(copy.folder, rank)
            self._wait_for(path.exists, f"its part of checkpoint {copy.name}", peer=f"trainer.{rank}")
            files |= msgspec.json.decode(path.read_bytes(), type=Files)
            path.unlink()

        if exporter := self._exporter:
            self._when_there_is_room(lambda: exporter.write(copy.folder, copy.version), f"weights {copy.name}")

        def write_manifest() -> None:
            with atomic_write(copy.folder / MANIFEST) as file:
                file.write(msgspec.json.encode(Manifest(copy.version, self._world.size, time.time(), files)))

        self._when_there_is_room(write_manifest, f"checkpoint {copy.name}")
        reach("checkpoint.before_rename")
        final = step_folder(self._folder, copy.version)
        replace_folder(copy.folder, final)
        log.info("checkpoint %s", final)
        reach("checkpoint.complete")

        # Old checkpoints go only now that a newer one is complete.
        keep_last, keep_interval = self._config.keep_last, self._config.keep_interval
        for step in complete_steps(self._folder)[:-keep_last] if keep_last is not None else []:
            if step != copy.version and not (keep_interval and step % keep_interval == 0):
                remove_folder(step_folder(self._folder, step))

    def _wait_for(self, condition: Callable[[], bool], what: str, *, peer: str, times: int = 1) -> None:
        """
        Args:
            times: how often, in a row, the peer may have to wait for room on the disk.
        """
        with self._waits.waiting(what, peer=peer, deadline_s=WRITE_S + times * self._disk_timeout_s) as wait:
            while not condition():
                wait.check()
                time.sleep(POLL_S)

    def _when_there_is_room(self, write: Callable[[], None], what: str) -> None:
        when_there_is_room(write, what=what, folder=self._folder, waits=self._waits, deadline_s=self._disk_timeout_s)


def load_version(state: TrainerState, folder: Path, version: int, *, rank: int) -> None:
    """Load this rank's part of a version of a run: its own checkpoint in `folder`, that of the run which it began from,
    or nothing for the base model.

    Raises: as `load_checkpoint`.
    """
    root = folder.parent
    origin = read_origin(root)
    if origin and version == origin.begins_at:
        load_checkpoint(state, origin.checkpoint(root), rank=rank, with_optimizer="optimizer" not in origin.without)
        state.version = version
    elif version:
        load_checkpoint(state, step_folder(folder, version), rank=rank)


def load_checkpoint(state: TrainerState, folder: Path, *, rank: int, with_optimizer: bool = True) -> None:
    """Load this rank's part of model and optimizer. Any number of ranks may load what any number saved.

    Args:
        with_optimizer: false leaves the optimizer as it is, fresh.

    Raises:
        ConfigError: the checkpoint is of another model.
        JournalCorrupt: the checkpoint is incomplete.
    """
    manifest = read_manifest(folder)
    require_same_scale(folder / DESCRIPTION, adapters_of(state.model))
    with open_shards(shard_files(folder)) as stored:
        load_tensors(state, stored, with_optimizer=with_optimizer)

    if isinstance(state.optimizer, OffloadsState):
        state.optimizer.put_away()

    # Random states exist only for the ranks that the saving run had.
    random = folder / f"random_{rank}.safetensors"
    if random.name in manifest.files:
        states = load_file(random)
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

    state.version = manifest.version
    log.info("resumed from %s, of which this rank read %.1f MiB", folder, stored.num_bytes_read / 2**20)


def _list_of_rank(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.done"
