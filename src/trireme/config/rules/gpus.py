"""Rules about GPUs: how a run divides them, and whether torch can use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trireme.base.devices import BFLOAT16_CAPABILITY, LEAST_CAPABILITY, LEAST_CUDA, LEAST_DRIVER, Devices
from trireme.config.files import ProcessName
from trireme.config.rules.orchestrator import nearest_divisors
from trireme.config.run import RunConfig


def gpu_problems(config: RunConfig, devices: Devices, section: ProcessName | None) -> Iterator[str]:
    sides = {"inference": config.inference_gpu_ids or (), "trainer": config.trainer_gpu_ids or ()}
    starting = sides if section is None else {side: ids for side, ids in sides.items() if side == section}

    # What was typed must agree with itself, also on a machine without GPUs.
    for side, ids in starting.items():
        count = config.inference_gpus if side == "inference" else config.trainer_gpus
        if count is not None and count != len(ids):
            yield f"{side}_gpus = {count} and {side}_gpu_ids = {list(ids)} - expected one. Remove `{side}_gpus`."
        if len(set(ids)) < len(ids):
            yield f"{side}_gpu_ids = {list(ids)} names a GPU twice - expected each once. Remove the second."

    if config.device == "cpu":
        return

    # The GPUs must be there, and must not be shared in a way that the transport cannot serve.
    for side in starting if config.hosts.inference else starting.keys() - {"inference"}:
        # On a machine without GPUs, one message is enough for both sides.
        if devices.gpus or side == "inference" or not config.inference_gpu_ids:
            yield from _missing_gpus(config, devices, side, sides[side])
    if config.hosts.are_one_machine and all(sides.values()):
        yield from _shared_gpus(config)

    # Each GPU of a side has exactly one worker or rank.
    tp, dp, engines = config.inference.parallel.tp, config.inference.parallel.dp or 1, len(sides["inference"])
    if section in (None, "inference") and engines and tp * dp != engines:
        fits = f"dp = {engines // tp}" if engines % tp == 0 else f"tp = {nearest_divisors(engines, tp)[-1]}"
        yield (
            f"inference.parallel.tp = {tp} x dp = {dp} takes {tp * dp} GPUs, and inference has {engines} - expected as "
            f"many. Set `{fits}` under `[inference.parallel]`, or give inference {tp * dp} GPUs."
        )

    ranks, nodes = config.trainer.num_ranks or 1, len(config.hosts.trainer)
    gpus = nodes * len(sides["trainer"])
    if section in (None, "trainer") and gpus and ranks != gpus:
        yield (
            f"trainer.num_ranks = {ranks}, and the trainer has {gpus} GPUs on {nodes} machines - expected one rank per "
            "GPU. Leave `trainer.num_ranks` out, or change `trainer_gpu_ids`."
        )


def _missing_gpus(config: RunConfig, devices: Devices, side: str, ids: tuple[int, ...]) -> Iterator[str]:
    if not devices.gpus:
        yield (
            f"GPUs were asked for ({side}_gpu_ids = {list(ids)}), and this machine shows none - expected NVIDIA GPUs "
            "that CUDA_VISIBLE_DEVICES does not hide. The same configuration runs on CPU with `--device cpu`."
        )
        return
    if not ids:
        yield (
            f"no GPU is left for {side}: of {devices.num_gpus} the other side has all - expected at least one. Set "
            f"`inference_gpus` and `trainer_gpus`, for example to {max(1, devices.num_gpus - 1)} and 1."
        )
    if absent := [number for number in ids if not 0 <= number < devices.num_gpus]:
        yield (
            f"{side}_gpu_ids = {list(ids)}: {absent} do not exist - {devices.num_gpus} GPUs are visible, counted from "
            f"0 (CUDA calls them {', '.join(devices.gpus)}). Name fewer, or run where there are more."
        )


def _shared_gpus(config: RunConfig) -> Iterator[str]:
    engines, trainer = config.inference_gpu_ids or (), config.trainer_gpu_ids or ()
    kind, all_of_them = config.weight_broadcast.type, sorted({*engines, *trainer})
    # ipc needs one GPU for both, nccl none in common; files do not care.
    is_one = engines == trainer and len(all_of_them) == 1
    if is_one if kind == "ipc" else kind == "filesystem" or not {*engines} & {*trainer}:
        return
    expected = "GPUs of their own, as NCCL takes none twice"
    if kind == "ipc":
        expected = "one GPU for both, as the trainer's rank 0 alone sends, and only handles of its own GPU"
    half = (len(all_of_them) + 1) // 2
    engines_own, trainer_own = all_of_them[:half], all_of_them[half:]
    advice = f'Split them: `inference_gpu_ids = {engines_own}`, `trainer_gpu_ids = {trainer_own}` and type "nccl".'
    yield (
        f'weight_broadcast.type = "{kind}" with inference_gpu_ids = {[*engines]} and trainer_gpu_ids = {[*trainer]} - '
        f"expected {expected}. {'Leave the type out, for ipc.' if is_one else advice}"
    )


Computing = Mapping[str, tuple[str, Iterable[int]]]
"""A key of a precision, its value, and the GPUs that compute in it."""


def gpu_launch_problems(device: str, devices: Devices, computing: Computing) -> Iterator[str]:
    """Yield why torch and vLLM cannot use this machine's GPUs. What the driver does not tell is left to them."""
    if device == "cpu" or not devices.gpus:
        return

    # The driver. What its library offers comes first: a package cuda-compat brings a newer one for an older driver.
    driver = f"the NVIDIA driver {devices.driver}" if devices.driver else "the NVIDIA driver"
    found, least = (tuple(map(int, version.split("."))) for version in (devices.driver or LEAST_DRIVER, LEAST_DRIVER))
    if devices.cuda < LEAST_CUDA if devices.cuda else found < least:
        offers = f"offers CUDA {devices.cuda // 1000}.{devices.cuda % 1000 // 10}" if devices.cuda else "is too old"
        yield (
            f"{driver} {offers} - expected driver {LEAST_DRIVER} or newer, with CUDA {LEAST_CUDA // 1000}, for which "
            "torch and vLLM are built. Update it (on data-centre GPUs the package cuda-compat does, too), or run on "
            "the CPU: `--device cpu`."
        )
    elif devices.cuda_error:
        yield (
            f"{driver} does not start CUDA (error {devices.cuda_error}) - expected GPUs that can be used. Error 802 "
            "wants the service nvidia-fabricmanager, 803 a reboot after an update of the driver, 804 a machine without "
            "cuda-compat. Or run on the CPU: `--device cpu`."
        )

    # The oldest GPU of each side: one for which there are no kernels, or none in the precision that it is to have.
    for key, (dtype, ids) in computing.items():
        known = devices.known_capabilities(ids)
        gpu, capability = min(known.items(), key=lambda item: item[1], default=(0, BFLOAT16_CAPABILITY))
        has = f"GPU {gpu} has compute capability {'.'.join(map(str, capability))}"
        if capability < LEAST_CAPABILITY:
            yield (
                f"{has} - expected {'.'.join(map(str, LEAST_CAPABILITY))} or more, for which torch and vLLM are built. "
                f"Leave it out of `{key.partition('.')[0]}_gpu_ids` (or CUDA_VISIBLE_DEVICES), or run on the CPU: "
                "`--device cpu`."
            )
        elif dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
            other = "float16" if key.startswith("inference") else "float32"
            yield (
                f'{key} = "bfloat16", and {has} - expected {".".join(map(str, BFLOAT16_CAPABILITY))} or more for it. '
                f'Write `{key} = "{other}"`, on all machines of the run.'
            )
