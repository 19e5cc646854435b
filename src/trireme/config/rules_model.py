"""Rules of `[trainer.model]`, for `rl` and for `sft`: how ranks are split, and whether the model in a folder can be
trained as it is to be.

transformers is not imported for this, which would take seconds: its source is looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.readiness import looks_local
from trireme.config.run import RunConfig
from trireme.config.trainer import TrainerModel

PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
KERNELS = "kernels"  # with it, transformers fetches kernels from a hub

SWITCHES = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
"""How classes of transformers say that they lack an attention."""

SOFT_CAP = "attn_logit_softcapping"
"""Key of a model's config.json: attention scores become SOFT_CAP * tanh(score / SOFT_CAP). transformers' `sdpa`
silently leaves that out. It is the only such feature in 5.19; models with sinks refuse `sdpa` themselves."""

CAPPED = ("gemma2", "vaultgemma")
"""Architectures that cap where config.json says nothing."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def model_problems(table: str, model: TrainerModel, ranks: int) -> Iterator[str]:
    """What is wrong whatever the model.

    Args:
        table: the model's, as the user writes it.
    """
    for key, number in (("dp_replicate", model.dp_replicate), ("cp", model.cp)):
        if ranks % number:
            yield (
                f"{table}.{key} = {number} with {ranks} ranks - expected a divisor of their number: {_divisors(ranks)}."
                f" Set `{table}.{key}` to one of these, or change the number of ranks."
            )
    if model.attn.startswith("flash") and model.optimization_dtype == "float32":
        yield (
            f'{table}.attn = "{model.attn}" with optimization_dtype = "float32" - expected bfloat16, the only precision'
            f' that it and the trainer share. Set `{table}.optimization_dtype = "bfloat16"`, or `attn = "sdpa"`.'
        )
    if model.cp > 1 and model.attn == "eager":
        yield (
            f'{table}.attn = "eager" with {table}.cp = {model.cp} - expected sdpa, flex_attention or flash attention, '
            f'which ranks can share a row with. Set `{table}.attn = "sdpa"`, or `cp = 1`.'
        )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def model_launch_problems(table: str, model: TrainerModel, device: str) -> Iterator[str]:
    """What is wrong with this model, or on this machine."""
    if device != "cpu":  # there, another rule refuses it
        yield from _check_package(table, model)
    folder = Path(model.name or "")
    if not model.name or not looks_local(model.name) or not (folder / "config.json").exists():
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        yield (
            f"{folder / 'config.json'} cannot be read: {error} - expected a model's configuration, as `save_pretrained`"
            " writes it. Copy or download the model again."
        )
        return
    yield from _check_weights(table, model, folder, config)
    yield from _check_architecture(table, model, config, device)
    yield from _check_sharing(table, model, config)


def _check_package(table: str, model: TrainerModel) -> Iterator[str]:
    package = PACKAGES.get(model.attn)
    if package and not find_spec(package) and not find_spec(KERNELS):
        yield (
            f'{table}.attn = "{model.attn}", and neither the package {package} nor {KERNELS} is installed - expected '
            f"one of them. Install it beside Trireme, or set `{table}.attn` to sdpa or flex_attention."
        )


def _check_weights(table: str, model: TrainerModel, folder: Path, config: dict[str, Any]) -> Iterator[str]:
    if model.from_scratch:
        return
    if not any((folder / name).exists() for name in WEIGHTS):
        yield (
            f'{table}.name = "{folder}": this folder has neither {" nor ".join(WEIGHTS)} - expected weights as '
            f"safetensors. Copy them there, or start from random ones with `{table}.from_scratch = true`."
        )
    if quantization := config.get("quantization_config"):
        yield (
            f'{table}.name = "{folder}": its weights are quantized ({quantization.get("quant_method")}) - expected '
            "float32, bfloat16 or float16, as only those can be trained. Take such a copy of the model."
        )


def _check_architecture(table: str, model: TrainerModel, config: dict[str, Any], device: str) -> Iterator[str]:
    kind = config.get("model_type")
    source = _source(str(kind)) if kind else ""
    if source is None and config.get("auto_map"):
        if not model.trust_remote_code:
            yield (
                f'{table}.name = "{model.name}" runs by Python code of its own ({", ".join(config["auto_map"])}) - '
                f"expected a word that it may. Read it, and set `{table}.trust_remote_code = true`."
            )
    elif source is None:
        yield (
            f'{table}.name = "{model.name}": the installed transformers has no architecture "{kind}" (model_type in its'
            " config.json) - expected one that it has. Check config.json, or choose another model."
        )
    elif "_is_stateful = True" in source:
        yield (
            f'{table}.name = "{model.name}": {kind} carries a state from each token to the next, so that samples which '
            "are packed into one row would see each other - expected a transformer with attention alone. "
            "Choose another model."
        )
    elif (switch := SWITCHES.get(model.attn)) and not _offers(source, switch):
        here = ("sdpa", "eager") if device == "cpu" else ("sdpa", "flex_attention", "eager")
        has = [name for name in here if _offers(source, SWITCHES.get(name))]
        yield (
            f'{table}.attn = "{model.attn}": transformers has no such attention for {kind} - expected one of '
            f"{', '.join(has)}. Set `{table}.attn`."
        )
    elif model.attn == "sdpa" and caps_scores(config):
        kept = "eager" if device == "cpu" else "eager, flex_attention or flash attention"
        together = f", which ranks share no row with (`{table}.cp = 1`)" if model.cp > 1 else ""
        yield (
            f'{table}.attn = "sdpa", and {kind} caps its attention scores ({SOFT_CAP} in its config.json), which '
            f"transformers' sdpa leaves out and the engine does not - expected {kept}. "
            f'Set `{table}.attn = "eager"`{together}.'
        )


def caps_scores(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json caps its attention scores."""
    text = config.get("text_config") or config
    return bool(text.get(SOFT_CAP, text.get("model_type") in CAPPED))


def _offers(source: str, switch: str | None) -> bool:
    """A class that says nothing may inherit it."""
    said = set(re.findall(rf"{switch} = (True|False)", source))
    return switch is None or said != {"False"}


@cache
def _source(model_type: str) -> str | None:
    """The code of transformers for an architecture; None where there is none, empty where there is nothing to see."""
    transformers = find_spec("transformers")
    if transformers is None or transformers.origin is None:
        return ""
    models = Path(transformers.origin).parent / "models"
    wanted = re.compile(rf"""model_type(: str)? = ["']{re.escape(model_type)}["']""")
    likely = models / model_type.replace("-", "_")
    for folder in (likely, *sorted(models.iterdir())):
        for file in folder.glob("configuration_*.py"):
            if wanted.search(file.read_text(encoding="utf-8")):
                code = file.with_name(file.name.replace("configuration_", "modeling_", 1))
                return code.read_text(encoding="utf-8") if code.exists() else ""
    return None


def _check_sharing(table: str, model: TrainerModel, config: dict[str, Any]) -> Iterator[str]:
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads")
    if heads and heads % model.cp:
        yield (
            f"{table}.cp = {model.cp}, and {model.name} has {heads} attention heads - expected a divisor of them, as "
            f"ranks that share a row share its heads. Set `{table}.cp` to one of {_divisors(heads)}."
        )


def _ranks_can_be_split(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from model_problems("trainer.model", config.trainer.model, config.trainer.num_ranks or 1)


def _model_can_be_trained(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from model_launch_problems("trainer.model", config.trainer.model, config.device)


_COMMANDS: tuple[ProcessName | None, ...] = (None, "trainer")

RULES = ((_ranks_can_be_split, _COMMANDS),)

LAUNCH_RULES = ((_model_can_be_trained, _COMMANDS),)
