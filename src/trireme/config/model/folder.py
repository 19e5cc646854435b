"""Look at a model before it is loaded: find its folder, read its `config.json`, and check that it can be trained as
configured.

transformers is not imported for this, which would take seconds: its source is searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.files import files_near
from trireme.config.model.architectures import architecture_refusals, offers
from trireme.config.model.state_layers import WITHOUT_ATTENTION, source_of, state_layer_problems, text_of
from trireme.config.model.tokenizer import has_vocabulary, read_tokenizer, room_problem, template_problem
from trireme.config.model.vision import vision_problems
from trireme.config.model.weights import WEIGHTS, rows_of, weights_problems
from trireme.config.trainer import TrainerModel, divisors_of

_FLASH = ("_supports_flash_attn", "_supports_sdpa")  # attention that has the first alone has sinks
SWITCHES = {
    "sdpa": ("_supports_sdpa",),
    "flash_attention_2": _FLASH,
    "flash_attention_3": _FLASH,
    "flex_attention": ("_supports_flex_attn",),
}
"""Attributes by which classes of transformers say that they have an attention."""

SOFT_CAP = "attn_logit_softcapping"
"""Key of a model's config.json: attention scores become SOFT_CAP * tanh(score / SOFT_CAP). transformers' `sdpa`
silently leaves that out. It is the only such feature in 5.19; models with sinks refuse `sdpa` themselves."""

CAPPED = ("gemma2", "vaultgemma")
"""Architectures that cap attention scores by default."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in the `config.json` of models."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
"""Names of the number of positions in the `config.json` of models."""

MXFP4, FP8 = "mxfp4", "fp8"
"""The formats of low-bit weights that are read, as `quant_method` in a config.json names them."""

# Folders whose content is ours, never an owner on a hub.
_LOCAL_FOLDERS = ("models", "outputs", "checkpoints", "weights")


def looks_local(name: str) -> bool:
    """Return whether a model's name means a folder. `owner/model` is on a hub, unless a folder `owner` is here.

    Example:
        looks_local("./tiny"), looks_local("models/tiny"), looks_local("Qwen/Qwen3-0.6B")  # True, True, False
    """
    first, _, rest = name.partition("/")
    if name.startswith((".", "/", "~")) or rest.count("/") > 0 or Path(name).is_dir():
        return True
    return bool(rest) and (first in _LOCAL_FOLDERS or Path(first).is_dir())


def config_file(name: str, file: str = "config.json") -> Path | None:
    """Return a file of a model, in its folder or in the hub's cache; None if it is in neither."""
    local = Path(name) / file
    if local.exists():
        return local

    # A folder is no name on a hub, whose package takes 0.1 s to import.
    if local.parent.is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, file)
    except HFValidationError:  # the name is a folder that does not exist
        return None
    return Path(found) if isinstance(found, str) else None


def read_config(name: str | None, file: str = "config.json") -> dict[str, Any]:
    """Return a model's `config.json`; empty if there is none on this disk, or none that can be read."""
    found = config_file(name, file) if name else None
    try:
        return load_described(found) if found else {}
    except ConfigError:  # the rules report it
        return {}


def load_described(file: Path) -> dict[str, Any]:
    """Load the `config.json` of a model. Raises: ConfigError if it cannot be read."""
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError(f"it is a {type(config).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error} - expected a model's configuration, as `save_pretrained` writes it. Copy "
            "or download the model again."
        ) from error
    return config


def read_image_processor(name: str) -> dict[str, Any]:
    """Return how a model's pictures are prepared: its `preprocessor_config.json`, or that part of its
    `processor_config.json`, which newer models have instead; empty if there is neither."""
    older = read_config(name, "preprocessor_config.json")
    return older or read_config(name, "processor_config.json").get("image_processor", {})


def caps_scores(config: Mapping[str, Any]) -> bool:
    """Return whether a model with this config.json caps its attention scores."""
    text = text_of(config)
    return bool(text.get(SOFT_CAP, text.get("model_type") in CAPPED))


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a model with this config.json has its weights in few bits; empty if it has not."""
    # Models that also see may have it in the part of the language model.
    parts = (config, config.get("text_config") or {})
    found = (part.get(key) for part in parts for key in ("quantization_config", "compression_config"))
    return next((each for each in found if each), {})


def low_bit_problem(config: Mapping[str, Any]) -> str | None:
    """Return why the weights of a model with this config.json cannot be read; None if they can."""
    quantization = quantization_of(config)
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if not quantization or method == MXFP4 or (method == FP8 and block and len(block) == 2):
        return None
    whole = f", weight_block_size = {block}" if method == FP8 else ""
    return (
        f"are quantized ({method}{whole}) - expected float32, bfloat16 or float16, or mxfp4, or fp8 in blocks with a "
        "weight_block_size, which are read as bfloat16."
    )


def has_low_bit_weights(config: Mapping[str, Any]) -> bool:
    """Return whether a model with this config.json has its weights in few bits, in a format that is read."""
    return bool(quantization_of(config)) and not low_bit_problem(config)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a model with this config.json has positions for; None if positions are scaled, or it
    does not say."""
    text = text_of(config)
    longest = next((text[key] for key in POSITIONS if key in text), None)
    # A scaled context has positions beyond the number that is given.
    is_scaled = any('"factor"' in json.dumps(text.get(key)) for key in ("rope_scaling", "rope_parameters"))
    return longest if isinstance(longest, int) and longest > 0 and not is_scaled else None


def learns_positions(config: Mapping[str, Any]) -> bool:
    """Return whether a model with this config.json looks positions up in a table, which has no row beyond its last."""
    source = source_of(str(config.get("model_type")))
    return bool(re.search(r"\bwpe\b|LearnedPositionalEmbedding|position_embeddings = nn.Embedding", source or ""))


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Return the experts of each layer of a model with this config.json; 0 for a dense model."""
    text = text_of(config)
    parts = (text, text.get("ffn_config") or {})  # DBRX has them in a part of its own
    return next((part[name] for part in parts for name in NUM_EXPERTS if part.get(name)), 0)


def check_model(key: str, name: str | None, *, holds: str = "config.json") -> Iterator[str]:
    """Yield a problem if the folder of a model, or of a tokenizer, does not hold one.

    Names on a hub are left to the process that loads the model.
    """
    if name is None or not looks_local(name) or (Path(name) / holds).exists():
        return
    if (Path(name) / "adapter_config.json").exists():
        yield (
            f'{key} = "{name}": this folder holds adapters, not a model - expected a model as Hugging Face writes it. '
            "Merge them into their base model (`trireme export RUN --merge --to FOLDER`), and start from that."
        )
        return

    what = f"has no {holds}" if Path(name).is_dir() else "does not exist"
    around = next((parent for parent in Path(name).parents if parent.is_dir()), Path("."))
    nearby = files_near(Path(name), [file.parent for file in sorted(around.glob("*/config.json"))])
    advice = nearby or "Check the name, or make or download the model first."
    yield (
        f'{key} = "{name}": this folder {what} (looked in {Path.cwd()}) - expected a model as Hugging Face writes it. '
        f"{advice}"
    )


def model_launch_problems(table: str, model: TrainerModel, device: str) -> Iterator[str]:
    """Yield why the trainer cannot train this model on this machine."""
    if device == "cpu" and model.attn.startswith("fl"):
        yield f'{table}.attn = "{model.attn}" on a CPU: it runs on GPUs only - expected sdpa or eager. Write one.'

    if model.name is None or (file := config_file(model.name)) is None:
        return
    try:
        config = load_described(file)
    except ConfigError as error:
        yield str(error)
        return

    # Weights in a folder of the user's; those of a hub are checked when they are loaded.
    folder = file.parent
    if not model.from_scratch and looks_local(model.name):
        if found := list(weights_problems(folder)):
            yield from found
        elif not any((folder / name).exists() for name in WEIGHTS):
            yield (
                f'{table}.name = "{folder}": this folder has neither {" nor ".join(WEIGHTS)} - expected weights as '
                f"safetensors. Copy them there, or start from random ones with `{table}.from_scratch = true`."
            )

    # The architecture, and how ranks divide it.
    yield from architecture_problems(table, model, config, device)
    heads = text_of(config).get("num_attention_heads")
    if heads and heads % model.cp:
        yield (
            f"{table}.cp = {model.cp}, and {model.name} has {heads} attention heads - expected a divisor of them, as "
            f"ranks that share a row share its heads. Set `{table}.cp` to one of {divisors_of(heads)}."
        )


def tokenizer_problems(key: str, name: str | None, model: TrainerModel, *, renders: bool) -> Iterator[str]:
    """Yield why the conversations of a run cannot become tokens of its model.

    Names on a hub are left to the process that downloads them, and folders without a tokenizer to that which needs it.

    Args:
        renders: whether the run renders conversations with the tokenizer's own chat template, in its fast form.
    """
    if name is None or not has_vocabulary(folder := Path(name)):
        return
    try:
        opened = read_tokenizer(name, folder, trust_remote_code=model.trust_remote_code)
    except ConfigError as error:
        if renders:
            yield f"{key}: {error}"
        return
    if renders and (problem := template_problem(opened, folder)):
        yield problem

    # Each token needs a row in the model's embedding.
    of_model = Path(model.name or name)
    if (of_model / "config.json").exists():
        rows = rows_of(of_model, read_config(str(of_model)), reads=not model.from_scratch)
        if rows and (problem := room_problem(opened, rows, name)):
            yield problem


def architecture_problems(table: str, model: TrainerModel, config: dict[str, Any], device: str) -> Iterator[str]:
    """Yield why the trainer cannot train a model of this architecture, as its config.json describes it."""
    if not model.from_scratch and (problem := low_bit_problem(config)):
        yield f'{table}.name = "{model.name}": its weights {problem} Take such a copy of the model.'

    # Only the first reason is reported, from what rules a model out to what another attention would solve.
    kind = config.get("model_type")
    source = source_of(str(kind)) if kind else ""
    if source is None and config.get("auto_map"):
        if not model.trust_remote_code:
            yield (
                f'{table}.name = "{model.name}" runs Python code of its own ({", ".join(config["auto_map"])}) - '
                f"expected your consent. Read the code, and set `{table}.trust_remote_code = true`."
            )
    elif source is None:
        yield (
            f'{table}.name = "{model.name}": the installed transformers has no architecture "{kind}" (model_type in its'
            " config.json) - expected one that it has. Check config.json, or choose another model."
        )
    # Layers that the trainer would compute wrongly.
    elif problems := [*vision_problems(table, model, config), *state_layer_problems(table, model, config)]:
        yield from problems
    elif model.vlm is None and source and not is_causal(str(kind)):
        yield (
            f'{table}.name = "{model.name}": transformers has no causal language model for {kind} - expected a model '
            "that AutoModelForCausalLM loads. Choose another one."
        )
    elif model.vlm is None and (refused := list(architecture_refusals(table, model.name, config))):
        yield from refused
    # The implementation of attention, which the user can choose.
    elif not _offers(source, model.attn):
        here = ("sdpa", "eager") if device == "cpu" else ("sdpa", "flex_attention", "eager")
        has = [name for name in here if _offers(source, name)]
        yield f'{table}.attn = "{model.attn}" with {kind} - expected one of {", ".join(has)}. Set `{table}.attn`.'
    elif (model.attn == "sdpa" or model.uses_flash) and caps_scores(config):
        kept = "eager" if device == "cpu" else "eager or flex_attention"
        together = f", with which ranks cannot share a row (`{table}.cp = 1`)" if model.cp > 1 else ""
        yield (
            f'{table}.attn = "{model.attn}", and {kind} caps its attention scores ({SOFT_CAP} in its config.json), '
            f"which that leaves out and the engine does not - expected {kept}. "
            f'Set `{table}.attn = "eager"`{together}.'
        )


def needs_eager(config: Mapping[str, Any]) -> bool:
    """Return whether transformers has no `sdpa` for a model with this config.json, or one that leaves out its cap."""
    return caps_scores(config) or lacks_sdpa(config) or config.get("model_type") in WITHOUT_ATTENTION


def lacks_sdpa(config: Mapping[str, Any]) -> bool:
    """Return whether transformers has no `sdpa` for a model with this config.json, as for gpt-oss with its sinks."""
    kind = config.get("model_type")
    return bool(kind) and not _offers(source_of(str(kind)) or "", "sdpa")


def _offers(source: str, attention: str) -> bool:
    return all(offers(source, switch) for switch in SWITCHES.get(attention, ()))


@cache
def is_causal(model_type: str) -> bool:
    """Return whether `AutoModelForCausalLM` has a class for an architecture that transformers has."""
    transformers = find_spec("transformers")
    assert transformers is not None, "asked of an architecture whose code was found in transformers"
    # The mapping is read as text, as importing transformers takes seconds.
    auto = (Path(str(transformers.origin)).parent / "models/auto/modeling_auto.py").read_text(encoding="utf-8")
    listed = auto.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]
    return f'("{model_type}", ' in listed
