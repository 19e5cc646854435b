"""Rules that the rows of several systems share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from trireme.config.nested import value_at
from trireme.config.section import NONE
from trireme.config.translation import Refused, Rule, Settings

Table = dict[str, Any]
HARDWARE = "how the hardware is used follows from the machine here"
OF_DEVIATIONS = "deviations divide by the number of rollouts, theirs by one less: adv_tau is the quotient"
ASK_MODEL = "serve the reward model, and ask it in a reward function."
IN_RUN = "metrics are in the run's folder, and on its dashboard"


def as_sample_deviation(kind: str, group: int) -> Settings:
    """Return the factor of advantages with which they are divided by the deviation of a sample of `group` rewards."""
    return {"trainer.loss.adv_tau": math.sqrt(1 - 1 / group)} if kind == "group_mean_std" and group > 1 else {}


def of(table: Table, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key of theirs."""
    return value_at(table, tuple(key.split(".")), default)


def choose(ours: str, names: dict[Any, Any], advice: str = "") -> Rule:
    """Return a rule that takes these values, each with ours for it, also as `Enum.NAME`."""

    def rule(value: Any, table: Table) -> Settings:
        plain = value.rpartition(".")[2].lower() if isinstance(value, str) else value
        if plain not in names:
            raise Refused(f"expected one of {', '.join(map(str, names))}. {advice}")
        return {ours: names[plain]}

    return rule


def if_given(ours: str) -> Rule:
    return lambda value, table: {ours: value} if value else {}


def if_true(ours: str, value: Any) -> Rule:
    return lambda wanted, table: {ours: value} if wanted else {}


def if_kind(switch: str, ours: dict[str, str]) -> Rule:
    """Return a rule for a key that only some losses read.

    Args:
        switch: their key for the loss.
        ours: our key for each loss that reads it.
    """

    def rule(value: Any, table: Table) -> Settings | str:
        kind = of(table, switch)
        return {ours[kind]: value} if kind in ours else f"only with {switch.rpartition('.')[2]} = {' or '.join(ours)}"

    return rule


def sampling(key: str, evaluates: Callable[[Table], bool], off: Any = None) -> Rule:
    """Return a rule for a key of training and, if the run evaluates, of evaluation, which would begin by such a key.

    Args:
        off: the value by which the system switches it off.
    """
    return lambda value, table: {} if value in (None, off) else sampling_of(key, value, table, evaluates)


def sampling_of(key: str, value: Any, table: Table, evaluates: Callable[[Table], bool]) -> Settings:
    tables = ("orchestrator.sampling", *(["orchestrator.eval.sampling"] if evaluates(table) else []))
    return {f"{each}.{key}": value for each in tables}


def lora(key: str, *switches: str) -> Rule:
    """Return a rule for a key of adapters, which one of other keys switches on."""

    def rule(value: Any, table: Table) -> Settings | str:
        if not any(of(table, switch) for switch in switches):
            return f"{switches[0].rpartition('.')[2]} is off"
        is_text = isinstance(value, str) and key in ("target_modules", "modules_to_save")
        listed = [name.strip() for name in value.split(",")] if is_text else value
        return {} if value is None else {f"trainer.model.lora.{key}": listed}

    return rule


def split_gpus(num_gpus: int, tp: int) -> Settings:
    """Give half of the GPUs to engines, in whole ones, and the others to the trainer. Both share a single one."""
    if num_gpus == 1:
        return {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}
    engines = max(1, num_gpus // 2 // tp) * tp
    return {"inference_gpus": engines, "trainer_gpus": num_gpus - engines}


def set_max_norm(value: float, table: Table) -> Settings:
    return {"trainer.optim.max_norm": value or math.inf}


def set_dtype(wanted: Any, table: Table) -> Settings:
    return {"trainer.model.optimization_dtype": "bfloat16" if wanted else "float32"}


def set_folder(value: str, table: Table) -> Settings:
    """The run's folder is OUTPUT_DIR/NAME here."""
    return {"name": PurePath(value).name, "output_dir": str(PurePath(value).parent)}


def set_wandb(loggers: Any, project: Any, name: Any) -> Settings | str:
    wanted = [loggers] if isinstance(loggers, str) else loggers or ()
    return {"wandb.project": project, "wandb.name": name or NONE} if "wandb" in wanted else IN_RUN


def trust(value: bool, table: Table) -> Settings:
    return {"trainer.model.trust_remote_code": value, "inference.model.trust_remote_code": value}
