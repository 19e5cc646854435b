"""What the trainer needs to go on, on disk: whole or not at all, written while training goes on.

`save` copies the state and returns. A thread of each rank writes `checkpoints/.step_N.partial/`: its pieces, its random
state, and a list of both with their digests; rank 0's also what describes the model, in `model/`. Rank 0's thread then
waits for all ranks' lists, makes the weights in Hugging Face format out of all the pieces, writes the lists down as the
manifest, and renames the folder to `step_N`. There are no collectives in those threads, which training's could meet:
they wait for each other's files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from trireme.base.disk import require_room, when_there_is_room
from trireme.base.errors import PeerDied
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write, remove_folder, replace_folder, step_folder
from trireme.base.waiting import DISK, Waits
from trireme.config.trainer import Checkpoints
from trireme.journal.manifest import MANIFEST, FileEntry, Manifest, complete_steps, describe_file, read_manifest
from trireme.trainer.checkpoint.background import BackgroundJob
from trireme.trainer.checkpoint.export import Export, Exporter
from trireme.trainer.checkpoint.resume import set_aside_after, tidy, version_to_resume
from trireme.trainer.checkpoint.state import TrainerState, load_tensors, tensors_of
from trireme.trainer.parallel.mesh import World
from trireme.trainer.parallel.shards import Shard, is_written_by, open_checkpoint, shard_of, write_shards

log = get_logger("checkpoint")

WRITE_S = 3600.0  # in which all is written where there is room
CLOSE_S = 20.0
POLL_S = 0.05
REFUSED = -1

Files = dict[str, FileEntry]


@dataclass(frozen=True)
class _Copy:
    """One rank's state at one version, which training no longer changes."""

    version: int
    folder: Path
    pieces: dict[str, Shard]
    random: dict[str, torch.Tensor]
    export: Export | None  # of rank 0

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
            disk_timeout_s: how long to wait for room on a full disk.
            exporter: what writes the weights in Hugging Face format that come with every checkpoint.
        """
        self._folder = folder
        self._config = config
        self._world = world
        self._waits = waits
        self._disk_timeout_s = disk_timeout_s
        self._exporter = exporter
        self._host_buffers = HostBuffers(world.device)
        self._background = BackgroundJob(waits, peer=DISK)

    def is_due(self, version: int, *, last: int) -> bool:
        """Raises what the writing of the last one raised."""
        self._background.check()
        interval = self._config.interval
        return version == last or (interval is not None and version % interval == 0)

    def save(self, state: TrainerState) -> None:
        """Returns when everything is copied; the copy is written in the background. A collective.

        Waits for the one before. Raises what its writing raised.
        """
        self.wait()
        partial = self._folder / f".step_{state.version}.partial"
        if self._world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        self._world.barrier()  # from here on, the folder is there only when this checkpoint is being written
        pieces = self._copy_shards(state)
        export = self._exporter.prepare(state.model) if self._exporter else None
        copy = _Copy(state.version, partial, pieces, _random_state(self._world), export)
        self._background.begin(f"checkpoint {copy.name} to be written", lambda: self._write(copy))

    def wait(self) -> None:
        """Returns when all that was saved, by all ranks, is on disk. Raises what the writing raised."""
        self._background.wait(WRITE_S + 4 * self._disk_timeout_s)  # its own deadlines come first

    def close(self) -> None:
        """On any way out; raises nothing. Whoever wants to know that all is written calls `wait` before."""
        self._background.close(CLOSE_S)

    def take_write_seconds(self) -> float | None:
        """How long the last checkpoint took in the background; None where there is nothing new to tell."""
        return self._background.take_seconds()

    def resume(self, state: TrainerState, *, resume: bool) -> None:
        """Loads what the run is to start from, if it is not the base model. A collective.

        Raises:
            ConfigError: as `version_to_resume`.
            PeerDied: rank 0 has raised that.
        """
        version = REFUSED
        try:
            if self._world.is_main:
                version = self._choose(resume)
        finally:
            agreed = self._world.agree(version)
        if agreed == REFUSED:
            raise PeerDied("Rank 0 has refused the checkpoint that was asked for. Its own message says why.")
        if agreed:
            load_checkpoint(state, step_folder(self._folder, agreed), rank=self._world.rank)

    def _choose(self, resume: bool) -> int:
        tidy(self._folder)
        if self._exporter:
            tidy(self._exporter.folder)
        version = version_to_resume(self._folder, self._config, resume=resume)
        going_back = self._config.resume_step not in (None, -1)
        if resume or self._config.resume_step is not None:
            set_aside_after(self._folder, version)
        if going_back and self._exporter:
            set_aside_after(self._exporter.folder, version)
        return version

    def _copy_shards(self, state: TrainerState) -> dict[str, Shard]:
        pieces = {}
        for name, tensor in tensors_of(state).items():
            piece = shard_of(tensor)
            if is_written_by(tensor, self._world.rank) and piece.num_bytes:
                pieces[name] = Shard(self._host_buffers.copy(name, piece.tensor), piece.shape, piece.offset)
        self._host_buffers.finish()
        return pieces

    def _write(self, copy: _Copy) -> None:
        """In a thread of its own."""
        rank = self._world.rank
        if self._world.is_main:
            self._when_there_is_room(lambda: copy.folder.mkdir(parents=True), f"checkpoint {copy.name}")
        else:
            self._wait_for_main(copy.folder.exists, f"a folder for checkpoint {copy.name}")
        reach("checkpoint.begun", rank=rank)
        self._when_there_is_room(lambda: _write_rank(copy, rank), f"checkpoint {copy.name}")
        reach("checkpoint.written", rank=rank)
        if self._world.is_main:
            self._complete(copy)
        else:
            self._wait_for_main(lambda: not copy.folder.exists(), f"checkpoint {copy.name} to be whole")

    def _complete(self, copy: _Copy) -> None:
        files = self._files_of_all_ranks(copy)
        if export := copy.export:
            self._when_there_is_room(lambda: export.write(copy.folder, copy.version), f"weights {copy.name}")
        manifest = Manifest(copy.version, self._world.size, time.time(), files)
        self._when_there_is_room(lambda: _write_manifest(copy.folder, manifest), f"checkpoint {copy.name}")
        reach("checkpoint.before_rename")
        final = step_folder(self._folder, copy.version)
        replace_folder(copy.folder, final)
        log.info("checkpoint %s", final)
        reach("checkpoint.complete")
        self._remove_old(copy.version)

    def _files_of_all_ranks(self, copy: _Copy) -> Files:
        files: Files = {}
        for rank in range(self._world.size):
            path = _list_of_rank(copy.folder, rank)
            self._wait_for(path.exists, f"its part of checkpoint {copy.name}", peer=f"trainer.{rank}")
            files |= msgspec.json.decode(path.read_bytes(), type=Files)
            path.unlink()
        return files

    def _wait_for_main(self, condition: Callable[[], bool], what: str) -> None:
        self._wait_for(condition, what, peer="trainer", times=3)

    def _wait_for(self, condition: Callable[[], bool], what: str, *, peer: str, times: int = 1) -> None:
        """
        Args:
            times: how often the peer may have to wait for room, one after the other.
        """
        if condition():
            return
        with self._waits.waiting(what, peer=peer, deadline_s=WRITE_S + times * self._disk_timeout_s) as wait:
            while not condition():
                wait.check()
                time.sleep(POLL_S)

    def _remove_old(self, newest: int) -> None:
        keep_last, keep_interval = self._config.keep_last, self._config.keep_interval
        if keep_last is None:
            return
        for step in complete_steps(self._folder)[:-keep_last]:
            if step != newest and not (keep_interval and step % keep_interval == 0):
                remove_folder(step_folder(self._folder, step))

    def _when_there_is_room(self, write: Callable[[], None], what: str) -> None:
        when_there_is_room(write, what=what, folder=self._folder, waits=self._waits, deadline_s=self._disk_timeout_s)


def load_checkpoint(state: TrainerState, folder: Path, *, rank: int) -> None:
    """Into this rank's part of the model and optimizer; any number of ranks may load what any number saved.

    Raises:
        ConfigError: it is another model's.
        JournalCorrupt: it is not whole.
    """
    manifest = read_manifest(folder)
    with open_checkpoint(folder) as stored:
        load_tensors(state, stored)
        num_bytes = stored.num_bytes_read
    random = folder / f"random_{rank}.safetensors"
    if random.name in manifest.files:
        _set_random_state(load_file(random))
    state.version = manifest.version
    log.info("resumed from %s, of which this rank read %.1f MiB", folder, num_bytes / 2**20)


def _write_rank(copy: _Copy, rank: int) -> None:
    """What this rank holds, and a list of it. After an error there is nothing."""
    pieces, random = copy.folder / f"rank_{rank}.safetensors", copy.folder / f"random_{rank}.safetensors"
    try:
        require_room(copy.folder, sum(piece.num_bytes for piece in copy.pieces.values()))
        write_shards(pieces, copy.pieces)
        save_file(copy.random, random)
        written = [pieces, random, *(copy.export.describe(copy.folder) if copy.export else ())]
        files = {str(path.relative_to(copy.folder)): _sync_and_describe(path) for path in written}
        with atomic_write(_list_of_rank(copy.folder, rank)) as file:
            file.write(msgspec.json.encode(files))
    except BaseException:
        with suppress(OSError):
            pieces.unlink(missing_ok=True)
            random.unlink(missing_ok=True)
            if copy.export:
                copy.export.take_back(copy.folder)
        raise


def _list_of_rank(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.done"


def _sync_and_describe(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return describe_file(path)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with atomic_write(folder / MANIFEST) as file:
        file.write(msgspec.json.encode(manifest))


def _random_state(world: World) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class HostBuffers:
    """Buffers by name, allocated once and used for every checkpoint.

    Where the tensors are on a GPU, their memory is pinned, for which the driver copies without a detour. It is held as
    long as the run goes on; a copy's content, until the next one under its name.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Begun when this returns, done after `finish`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._on_gpu)
            self._buffers[name] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=self._on_gpu)

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
