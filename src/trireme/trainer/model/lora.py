"""Low-rank adapters (LoRA, arXiv:2106.09685, section 4.1), as PEFT's layers inside the model.

The model keeps its class. A layer with an adapter holds the frozen layer as `base_layer`. Modules that are trained
whole (`modules_to_save`) are unfrozen in place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from trireme.algo.weight_checks import PREFIX
from trireme.base.errors import ConfigError
from trireme.config.model.state_layers import MAMBA
from trireme.config.trainer import TOWER, Dtype, Lora
from trireme.trainer.model.sharding import class_name, reshard
from trireme.trainer.parallel.shards import local_part, shard_of

if TYPE_CHECKING:  # a model that is trained whole does without peft, whose import takes a quarter of a second
    from peft import LoraConfig

ADAPTER = "default"  # PEFT's name for the only one
ALL_LINEAR = "all-linear"

FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""Names of layers that models with fused experts hold as one parameter."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    config: Lora
    peft: LoraConfig  # the same as `adapter_config.json` has it
    seed: int
    frozen: Dtype  # precision of what is not trained


def adapters_of(model: torch.nn.Module) -> Adapters | None:
    """Return the model's adapters; None if the whole model is trained."""
    return getattr(model, "_adapters", None)


def inject_adapters(model: PreTrainedModel, config: Lora, *, base_model: str, seed: int, frozen: Dtype) -> None:
    """Freeze the model and give its layers adapters, still without values. Called before the model is sharded.

    Args:
        base_model: folder or hub name, written into the exported adapters.
        seed: seed of the values that `fill_adapters` draws, and of dropout.
        frozen: precision of what is not trained. Trained parameters are float32.

    Raises:
        ConfigError: the model lacks such layers, or ties two of them.
    """
    from peft import LoraConfig
    from peft.tuners.lora import Linear, LoraLayer, ParamWrapper

    # Names are collected before any layer is wrapped, which changes them.
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adaptable = [name for name in linear if not _is_in_tower(name)]
    head = [name for name in linear if model.get_submodule(name) is model.get_output_embeddings()]
    fused = [name for name, tensor in model.named_parameters() if ".experts." in name and tensor.ndim == 3]

    modules, parameters = _find_targets(config, [name for name in adaptable if name not in head], head, fused)
    whole = _find_whole(model, config.modules_to_save)
    _require_adaptable(model, config, modules, parameters, whole, head)

    # Files in PEFT's format are read by other programs, so they have the names and fields that PEFT gives them.
    whole_class = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT accepts floats
        lora_dropout=config.dropout,
        target_modules=_in_short(modules, linear, _last),
        target_parameters=_in_short(parameters, fused, _in_layer) or None,
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
        auto_mapping=whole_class if adaptable != linear else None,  # PEFT records it for models that see
        base_model_name_or_path=base_model,
    )

    for name in modules:
        _wrap(model, name, Linear, settings)
    for name in parameters:  # a module with several is wrapped several times, as in PEFT
        module, _, parameter = name.rpartition(".")
        _wrap(model, module, ParamWrapper, settings, parameter_name=parameter)

    for mixer in model.modules():
        if class_name(mixer).endswith(MAMBA) and isinstance(getattr(mixer, "out_proj", None), LoraLayer):
            mixer.training = False  # otherwise its fused kernel takes the weight of `out_proj`, past the adapter

    # Gradients and optimizer state exist only for what is trained, in float32; the rest is held in the lower precision.
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        is_whole = any(name.startswith(f"{module}.") for module in whole) and not _is_in_tower(name)
        parameter.requires_grad_(is_adapter(name) or is_whole)
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, frozen))
    model._adapters = Adapters(config, settings, seed, frozen)


def _wrap(model: PreTrainedModel, name: str, kind: Any, settings: LoraConfig, **options: str) -> None:
    """Wrap a layer. Its adapter is on the layer's device (also meta), and always in float32."""
    inner = model.get_submodule(name)
    with torch.device(next(inner.parameters()).device):
        layer = kind(inner, ADAPTER, config=settings, r=settings.r, lora_alpha=settings.lora_alpha, **options)
    layer.lora_A.float()
    layer.lora_B.float()
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def _require_adaptable(
    model: PreTrainedModel, config: Lora, modules: list[str], parameters: list[str], whole: list[str], head: list[str]
) -> None:
    """Check that the model can be trained with adapters on these layers and parameters, and these modules whole."""
    # A tied tensor cannot be trained at one of its two places only.
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    head_layer = model.get_output_embeddings()
    is_tied = head_layer is not None and head_layer.weight is model.get_input_embeddings().weight
    if is_tied and (tied := [name for name in (*modules, *whole) if name in (*head, embedding)]):
        raise ConfigError(
            f"`lora` is to train {', '.join(tied)}, and this model has one tensor for its embedding and its head "
            "(`tie_word_embeddings`) - expected neither of them: one cannot change without the other. Leave "
            f"{', '.join(_last(name) for name in tied)} out of `target_modules` and `modules_to_save`."
        )

    # Dropout in the head would differ between the two computations of a chunk.
    if config.dropout and (fixed := [*(name for name in modules if name in head), *map(_in_layer, parameters[:1])]):
        raise ConfigError(
            f"`lora.dropout = {config.dropout:g}` with adapters on {', '.join(fixed)} - expected 0: the head is "
            "computed in chunks, twice each, and fused experts are one tensor, with no input of its own to drop from. "
            "Set `lora.dropout = 0`, or leave these out of `lora.target_modules`."
        )

    if parameters and config.sync == "adapter":
        raise ConfigError(
            f'`lora.sync = "adapter"` with adapters on fused experts ({_in_layer(parameters[0])}) - expected linear '
            'layers only: engines cannot be handed these. Set `lora.sync = "merged"`, or leave the experts out of '
            "`lora.target_modules`."
        )


def _in_short(chosen: list[str], all_names: list[str], shorten: Callable[[str], str]) -> list[str]:
    """Return short names if readers, which match ends of names, find only the chosen layers by them; else full ones."""
    short = {shorten(name) for name in chosen}
    meant = {name for name in all_names if short & _ends(name)}
    return sorted(short if meant == set(chosen) else chosen)


def _find_targets(config: Lora, linear: list[str], head: list[str], fused: list[str]) -> tuple[list[str], list[str]]:
    """Return the full names of layers and of fused parameters, in the model's order."""
    if ALL_LINEAR in config.target_modules:
        return linear, fused
    targets = set(config.target_modules)

    # Users name fused experts like the layers that other models hold (`FUSED`).
    ends_of_fused = {end for name in fused for end in _ends(name)}
    ends_of_fused |= {layer for layer, parameter in FUSED.items() if parameter in ends_of_fused}
    unknown = targets - {end for name in (*linear, *head) for end in _ends(name)} - ends_of_fused
    if unknown:
        has = sorted({_last(name) for name in (*linear, *head, *fused)})
        raise ConfigError(
            f"`lora.target_modules` names {', '.join(sorted(unknown))}, of which this model has none - expected some "
            f'of {", ".join(has)}, or "{ALL_LINEAR}". Change `lora.target_modules`.'
        )
    in_experts = {FUSED.get(target, target) for target in targets}
    return (
        [name for name in (*linear, *head) if targets & _ends(name)],
        [name for name in fused if in_experts & _ends(name)],
    )


def _find_whole(model: PreTrainedModel, names: tuple[str, ...]) -> list[str]:
    modules = [full for full, _ in model.named_modules() if not _is_in_tower(full)]

    found = {name: [full for full in modules if name in _ends(full)] for name in names}
    unknown = [name for name, full in found.items() if not full]
    if unknown:
        has = sorted({_last(full) for full, module in model.named_modules() if [*module.parameters(recurse=False)]})
        raise ConfigError(
            f"`lora.modules_to_save` names {', '.join(unknown)}, of which this model has none - expected some of "
            f"{', '.join(has)}. Change `lora.modules_to_save`."
        )
    return [full for names in found.values() for full in names]


def _is_in_tower(name: str) -> bool:
    """Return whether a module or parameter belongs to the vision encoder, which adapters leave as it is."""
    return f"{name}.".startswith(f"{TOWER}.")


def _ends(name: str) -> set[str]:
    """Return all ends of a.b.c: c, b.c, a.b.c."""
    parts = name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _in_layer(name: str) -> str:
    """Return mlp.experts.down_proj for model.layers.3.mlp.experts.down_proj."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else name


# names


def is_adapter(name: str) -> bool:
    """Return whether a parameter of the model belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return the name of a parameter before adapters were added, which published checkpoints have."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def peft_name(name: str) -> str:
    """Return the name of a parameter in PEFT's files."""
    return f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}"


# values


@torch.no_grad()
def fill_adapters(model: PreTrainedModel) -> None:
    """Draw A as PEFT does and set B to 0, so that an adapter changes nothing at first.

    Each tensor is drawn whole, by a seed of its own, and each rank keeps its shard. So any number of ranks starts with
    the same values.
    """
    adapters = adapters_of(model)
    if adapters is None:
        return
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            shard = shard_of(parameter)
            whole = torch.zeros(shard.shape)
            if ".lora_A." in name:
                bound = 1 / math.sqrt(shard.shape[-1])  # Kaiming's with a = sqrt(5), in which the square roots cancel
                generator = torch.Generator().manual_seed(_mix(adapters.seed, name))
                whole.uniform_(-bound, bound, generator=generator)
            shard.tensor.copy_(whole[shard.region])

    # `dropout` switches it on for the rows that are trained on.
    for layer in _dropouts(model):
        layer.eval()


def _mix(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


@dataclass(frozen=True)
class Product:
    """The product that an adapter adds to a parameter of its layer: scale * left @ right."""

    left: torch.nn.Parameter
    right: torch.nn.Parameter
    scale: float
    num_experts: int = 1  # number of fused experts, whose products are stacked
    is_transposed: bool = False  # fused experts that are held as [experts, in, out]


def products(model: PreTrainedModel) -> dict[str, Product]:
    """Return the products by the names that the parameters had before adapters were added."""
    if adapters_of(model) is None:
        return {}
    from peft.tuners.lora import LoraLayer, ParamWrapper

    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            parameter, num_experts, is_transposed = "weight", 1, False
            if isinstance(layer, ParamWrapper):
                parameter, num_experts = layer.parameter_name, layer.num_experts
                is_transposed = num_experts > 1 and not layer._did_swap_in_out_features
            left, right = layer.lora_B[ADAPTER].weight, layer.lora_A[ADAPTER].weight
            product = Product(left, right, layer.scaling[ADAPTER], num_experts, is_transposed)
            found[base_name(f"{name}.{parameter}")] = product
    return found


def merge(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor, product: Product) -> torch.Tensor:
    """Return weight + scale * left @ right in float32, of whole tensors."""
    weight, left, right = weight.float(), left.float(), right.float()
    if product.num_experts == 1:
        return torch.addmm(weight.view(left.shape[0], right.shape[1]), left, right, alpha=product.scale).view_as(weight)
    # PEFT lays the experts out as columns r * num_experts + e of `left`, and as rows e * rank + r of `right`.
    left = left.reshape(left.shape[0], -1, product.num_experts).permute(2, 0, 1)  # [E, out, rank]
    right = right.reshape(product.num_experts, -1, right.shape[-1])  # [E, rank, in]
    if product.is_transposed:
        left, right = right.transpose(1, 2), left.transpose(1, 2)
    return torch.baddbmm(weight, left, right, alpha=product.scale)


# passes


@contextmanager
def dropout(model: PreTrainedModel, *, step: int, rank: int, row: int) -> Iterator[None]:
    """Switch the adapters' dropout, off in probes and validation, on for one row's forward and backward pass.

    The random state depends on the run's seed, the step, the rank and the row, so a step that is repeated after a
    restart or in a replay drops the same. Iterations of a batch drop the same too, so that their ratios show the
    policy's change.
    """
    adapters = adapters_of(model)
    layers = [] if adapters is None or not adapters.config.dropout else _dropouts(model)
    if layers:
        assert adapters is not None
        torch.manual_seed(_mix(adapters.seed, step, rank, row))

    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


def _dropouts(model: PreTrainedModel) -> list[torch.nn.Module]:
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    return [layer.lora_dropout[ADAPTER] for layer in layers if ADAPTER in layer.lora_dropout]


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all tensors that are trained; they share their memory with the model."""
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}


@torch.no_grad()
def copy_trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trained_tensors(model).items()}


@contextmanager
def exchanged(model: PreTrainedModel, others: dict[str, torch.Tensor]) -> Iterator[None]:
    """Give the model other values of what is trained, and its own back afterwards. Not within a forward pass."""
    own = copy_trained(model)
    _overwrite(model, others)
    try:
        yield
    finally:
        _overwrite(model, own)


@torch.no_grad()
def _overwrite(model: PreTrainedModel, values: dict[str, torch.Tensor]) -> None:
    reshard(model)  # parameters that are still gathered have the other values
    for name, tensor in trained_tensors(model).items():
        local_part(tensor).copy_(local_part(values[name]))
