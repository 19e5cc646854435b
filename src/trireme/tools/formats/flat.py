"""The flat file of `prime-rl`, translated into our configuration, key by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trireme.base.devices import Devices
from trireme.config.arguments import TypedFlag
from trireme.config.load import read_as
from trireme.tools.formats.flat_file import Flat
from trireme.tools.formats.flat_keys import lift, put_memory, put_shared
from trireme.tools.formats.translation import Reader, Sheet, Translation


def translate(
    table: dict[str, Any], devices: Devices, *, where: str = "the file", flags: Sequence[TypedFlag] = ()
) -> Translation:
    """
    Args:
        flags: typed on top, in the keys of this format.

    Raises: ConfigError with all keys that are not of this format, cannot have that value, or mean nothing here.
    """
    sheet = Sheet()
    file = read_as(Flat, lift(table, Flat, sheet), where=where, flags=flags)
    keys = Reader(sheet, file)
    keys.take("model_name", "model.name")
    _put_devices(keys, file, devices)
    put_shared(sheet, file)
    return sheet.finish(env_files=file.env_file)


def _put_devices(keys: Reader, file: Flat, devices: Devices) -> None:
    if file.pipeline_parallel_size > 1:
        keys.refuse(
            "pipeline_parallel_size",
            "expected 1: engines are cut by tensors, not by layers, so that every GPU can be sent its weights. "
            "Raise `tensor_parallel_size` instead.",
        )
    elif keys.given("pipeline_parallel_size"):
        keys.tell("pipeline_parallel_size", "always so here")
    if not devices.gpus:
        keys.sheet.set("device", "cpu")
        keys.tell("num_gpus", 'device = "cpu": this machine shows no GPU')
        if keys.given("tensor_parallel_size"):
            keys.tell("tensor_parallel_size", "without effect on a CPU")
        return
    put_memory(keys.sheet)
    if keys.given("tensor_parallel_size"):
        keys.take("tensor_parallel_size", "inference.parallel.tp")
    if file.num_gpus and file.num_gpus > 1:
        engines = engine_share(file.num_gpus, file.tensor_parallel_size)
        keys.take("num_gpus", "inference_gpus", engines, why="half of them, in whole engines")
        keys.take("num_gpus", "trainer_gpus", file.num_gpus - engines, why="the others")
    elif file.num_gpus:
        keys.tell("num_gpus", "engine and trainer share it")
        keys.sheet.set("inference_gpu_ids", [0])
        keys.sheet.set("trainer_gpu_ids", [0])


def engine_share(num_gpus: int, tp: int) -> int:
    """Half of the GPUs, in whole engines of `tp`; one engine at least.

    Example:
        engine_share(8, 4)  # 4: one engine, and 4 GPUs to train with
    """
    return max(1, num_gpus // 2 // tp) * tp
