"""The table of models in docs/models.md: what `rl --dry-run` and `trireme plan` say of models as they are published.

    uv run python scripts/published_models.py [--model NAME]     # 40 s; writes the table, or prints one row

Each model is a folder with the config.json that its makers publish (`tests/data/published_models.json`) and an empty
file of weights. A row has the verdict of the rules that `rl` checks before launch, and the fewest GPUs on which the
plan says that a run fits. Nothing is downloaded, built or run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.models.model_configs import MODELS
from trireme.algo.model.architecture import Architecture
from trireme.algo.model.chips import CHIPS
from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.model.folder import needs_eager
from trireme.config.resolve import resolve
from trireme.config.rules.check import launch_problems, problems
from trireme.config.run import RunConfig
from trireme.tools.plan.estimate import Estimate, estimate_run
from trireme.tools.plan.machine import describe_machine
from trireme.tools.plan.sizes import read_sizes
from trireme.tools.plan.step_time import lengths_of

PAGE = Path(__file__).resolve().parents[1] / "docs/models.md"
BEGIN, END = "<!-- written by scripts/published_models.py -->", "<!-- end of the table of published models -->"
NODE, MOST_GPUS = 8, 1024
ENGINE_GPUS = (1, 2, 4, 8)  # an engine is on one machine
PICTURES = ("--model.vlm.freeze-vision-encoder", "true")
WHOLE = ("--trainer.model.optimization-dtype", "bfloat16", "--trainer.model.ac.freq", "1", "--seq-len", "8192")
ADAPTERS = (*WHOLE, "--trainer.model.lora.rank", "16", "--trainer.model.lora.target-modules", "all-linear")


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    parameters: int | None  # None where it is not trained
    active: int
    refusals: dict[str, str]  # by device, where a run is refused before launch
    with_pictures: bool = False  # it is trained with `[model.vlm]` alone
    whole: str = ""
    adapters: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    arguments = parser.parse_args()
    if arguments.model:
        print(describe(arguments.model))
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page_of(list(map(describe, MODELS)))}{END}{rest.partition(END)[2]}")


def page_of(rows: Collection[Row]) -> str:
    reasons = list(dict.fromkeys(reason for row in rows for reason in row.refusals.values()))
    lines = ["| model | family | parameters (active) | H100s, whole model | H100s, adapters |"]
    lines += ["|---" * 5 + "|"]
    for row in rows:
        whole = f"{row.whole}, with `[model.vlm]`" if row.with_pictures else row.whole
        if row.refusals:
            number = reasons.index(row.refusals["cpu"]) + 1
            whole = f"refused ({number})" if "cuda" in row.refusals else f"{whole}, not on a CPU ({number})"

        size = "" if row.parameters is None else f"{row.parameters / 1e9:,.1f}B"
        size += f" ({row.active / 1e9:,.1f}B)" if row.active < (row.parameters or 0) / 2 else ""
        cells = (row.name, f"`{row.kind}`", size, whole, row.adapters)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""])


def describe(name: str) -> Row:
    """Return the row of a model."""
    config = MODELS[name]
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
        with_pictures = "expected `[model.vlm]`" in (refusal(folder, "cuda") or "")
        sees = PICTURES if with_pictures else ()
        found = {device: refusal(folder, device, *sees) for device in ("cuda", "cpu")}
        refusals = {device: shown(problem, folder) for device, problem in found.items() if problem}
        row = Row(name, config["model_type"], None, 0, refusals, with_pictures)
        if "cuda" in refusals:
            return row
        model = read_sizes(folder, vlm=resolved(folder, Devices(cores=1), *sees).trainer.model.vlm)
        assert model.is_exact, name
        row = replace(row, parameters=model.num_parameters, active=model.active_parameters)
        # one that `rl` accepts, and that needs no square of a row's length
        attention = ("--trainer.model.attn", "flex_attention" if needs_eager(config) else "flash_attention_2")
        whole, adapters = (fewest_gpus(folder, model, *attention, *flags) for flags in (WHOLE, ADAPTERS))
        return replace(row, whole=whole, adapters=adapters)


def refusal(folder: str, device: str, *flags: str) -> str | None:
    """Return why `rl` refuses a run with this model and defaults for the rest; None if it would start."""
    devices = Devices(gpus=tuple(map(str, range(NODE))) if device == "cuda" else (), cores=16)
    config = resolved(folder, devices, "--device", device, *flags)
    found = [*problems(config, devices), *launch_problems(config, devices)]
    assert len(found) < 2, found
    return found[0] if found else None


def shown(problem: str, folder: str) -> str:
    """Return what a rule found, without the name of the folder and the advice."""
    return re.sub(rf'\S+ = "{folder}":? ?', "", problem).partition(" - expected")[0]


def fewest_gpus(folder: str, model: Architecture, *flags: str) -> str:
    """Return how many GPUs the plan wants, those of one engine and those of the trainer, as "8 + 24 H100"."""

    def planned(chip: str, engine: int, gpus: int) -> Estimate:
        machine = describe_machine(Devices(cores=16), gpu=chip, gpus=gpus)
        sides = ("--inference-gpus", str(engine), "--trainer-gpus", str(gpus - engine))
        config = resolved(folder, machine.devices, *sides, "--inference.parallel.tp", str(engine), *flags)
        return estimate_run(config, model, machine, lengths_of(config))

    for chip in ("h100", "b200"):
        engine = next((count for count in ENGINE_GPUS if planned(chip, count, 2 * count).engine_fits), MOST_GPUS)
        for power in range(engine.bit_length(), MOST_GPUS.bit_length()):
            if planned(chip, engine, 2**power).fits:
                name = "" if chip == "h100" else f" {CHIPS[chip].name}"
                return f"{engine}+{2**power - engine}{name}"
    return f"more than {ENGINE_GPUS[-1]} for an engine" if engine == MOST_GPUS else f"more than {MOST_GPUS}"


def resolved(folder: str, devices: Devices, *flags: str) -> RunConfig:
    environment = ("--orchestrator.env", '[{id = "any"}]')
    return resolve(load_run_config(["--model.name", folder, *environment, *flags], program="rl")[0], devices)


if __name__ == "__main__":
    main()
