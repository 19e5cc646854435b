"""Read a model's config.json as the numbers from which memory and time are worked out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from trireme.algo.model.architecture import (
    Architecture,
    Family,
    Layer,
    Matrix,
    architecture_of,
    experts_used,
    is_known,
    window_of,
)
from trireme.base.errors import ConfigError
from trireme.config.model.folder import caps_scores, config_file, load_described, num_experts_of
from trireme.config.model.state_layers import MIXERS, latent_width
from trireme.config.model.vision import WITHOUT_TEXT_MODEL
from trireme.config.trainer import TOWER, TrainerModel, Vlm

if TYPE_CHECKING:
    import torch

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HUB_S = 10.0


def find_config(name: str, *, fetch: bool = False) -> dict[str, Any]:
    """Read the config.json of a folder, or of a model in the hub's cache on this disk.

    Args:
        fetch: whether to fetch it from the hub if it is in neither.

    Raises: ConfigError if there is none, or none that can be read.
    """
    if file := config_file(name):
        return load_described(file)

    import httpx  # a plan without a model on a hub needs neither
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    try:
        if not fetch or constants.HF_HUB_OFFLINE:
            raise FileNotFoundError(name)
        # `hf_hub_download` would retry for half a minute without a network.
        url, headers = hf_hub_url(name, "config.json"), build_hf_headers()
        answer = httpx.get(url, headers=headers, timeout=HUB_S, follow_redirects=True).raise_for_status()
        config: dict[str, Any] = answer.json()
        return config
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is no folder with a config.json, is not in the hub's cache on this disk, and could not be "
            f"fetched ({type(error).__name__}) - expected the one file that a plan reads. Correct `model.name`; or "
            "copy the model's config.json into a folder and name that."
        ) from error


def read_sizes(name: str, config: dict[str, Any] | None = None, *, vlm: Vlm | None = None) -> Architecture:
    """Work out the sizes of a family in the table, or count those of the model that transformers builds.

    Args:
        config: its config.json; by default, as it is on this disk.
        vlm: with it the vision encoder is counted too, else the text model alone.

    Raises: ConfigError if there is none, or if it lacks a size.
    """
    config = find_config(name) if config is None else config

    # Building the model takes seconds, so families in the table are worked out, except for a vision encoder.
    if (vlm or not is_known(config)) and (counted := count_sizes(config, vlm)):
        return counted

    # Counted as a dense decoder, a mixture of experts would be far too small.
    if not is_known(config) and num_experts_of(config):
        raise ConfigError(
            f"The experts of {name!r} (model_type {config.get('model_type')}) cannot be counted, as the installed "
            "transformers does not build the model - expected one that it builds. Choose another model."
        )
    try:
        return architecture_of(config)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"The config.json of {name!r} has no {error} - sizes as of a decoder were expected. Plan with a model that "
            "transformers loads with AutoModelForCausalLM."
        ) from error


def count_sizes(config: dict[str, Any], vlm: Vlm | None = None) -> Architecture | None:
    """Build a model without memory, as the trainer does, and count it. Return None if transformers cannot build it.

    Importing torch and transformers takes about 6 s on one core; building a model of 80B another half.
    """
    from trireme.trainer.model.model import build_model
    from trireme.trainer.model.sharding import decoder_layers

    try:
        # `build_model` reads a folder, and the weights are not on this disk.
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            vlm = vlm or (Vlm() if config.get("model_type") in WITHOUT_TEXT_MODEL else None)
            model = build_model(TrainerModel(attn="eager", from_scratch=True, vlm=vlm), folder)
        blocks = decoder_layers(model)
    except (ConfigError, KeyError, TypeError, AttributeError):
        return None

    # The sizes are those of the text model; a vision encoder is counted by itself.
    described = model.config.get_text_config()
    text = described.to_dict()
    layers = tuple(_layer(block, text, number) for number, block in enumerate(blocks))
    hidden, vocabulary = described.hidden_size, model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings()
    tower = sum(each.numel() for each in model.get_submodule(TOWER).parameters()) if vlm else 0
    heads = getattr(described, "num_attention_heads", None) or 1

    # Engines may hold recurrent states in another precision than the weights.
    dtype = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype")
    if dtype is None and described.model_type == "nemotron_h":  # vLLM's `NemotronHForCausalLMConfig`
        dtype = "float32"

    return Architecture(
        model_type=described.model_type,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(described, "num_key_value_heads", None) or heads,
        head_dim=getattr(described, "head_dim", None) or hidden // heads,
        vocabulary=vocabulary,
        tied=head is None or head.weight is model.get_input_embeddings().weight,
        layers=layers,
        capped=caps_scores(text),
        latent=latent_width(text),
        outside=model.num_parameters() - tower - sum(layer.num_parameters for layer in layers),
        tower=tower,
        recurrent_bytes=BYTES.get(str(dtype)),
    )


def _layer(block: torch.nn.Module, text: dict[str, Any], number: int) -> Layer:
    matrices = tuple(_matrices(block, text))
    parts = [(type(part).__name__, part) for part in block.modules()]
    mixers = [part for name, part in parts if name.endswith(MIXERS)]
    return Layer(
        matrices,
        vectors=sum(each.numel() for each in block.parameters()) - sum(each.num_parameters for each in matrices),
        window=window_of(text, Family(), number),
        attends=any(name.endswith("Attention") for name, _ in parts),
        conv_state=sum(
            part.in_channels * (part.kernel_size[0] - 1) for mixer in mixers for part in _convolutions(mixer)
        ),
        recurrent_state=sum(_recurrence(mixer)[0] for mixer in mixers),
        recurrence=sum(_recurrence(mixer)[1] for mixer in mixers),
    )


def _matrices(block: torch.nn.Module, text: dict[str, Any]) -> Iterator[Matrix]:
    """Yield linear layers, routers, and the stacked matrices of experts."""
    used = experts_used(text)
    # A convolution's weights have three dimensions, as stacked experts do.
    convolutions = {id(part.weight) for part in _convolutions(block)}
    for path, parameter in block.named_parameters():
        module, name = path.split(".")[-2:] if "." in path else ("", path)
        if parameter.ndim == 2 and name == "weight":
            bias = getattr(block.get_submodule(path.rpartition(".")[0]), "bias", None) is not None
            yield Matrix(module, parameter.shape[1], parameter.shape[0], bias)
        elif parameter.ndim == 3 and id(parameter) not in convolutions:
            copies, outputs, inputs = parameter.shape
            yield Matrix(name, inputs, outputs, copies=copies, used=min(used, copies))


def _convolutions(module: torch.nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if type(part).__name__ == "Conv1d")


def _recurrence(mixer: Any) -> tuple[int, int]:
    """Return the values of a mixer's state, and the float32 values per token that transformers' PyTorch code keeps.

    A state is a matrix for each head; short convolutions have none. A gated delta net's is of its value heads, [value
    size, key size] (Yang et al. 2024, arXiv 2412.06464); Mamba-2's is [head size, state size] (Dao and Gu 2024, arXiv
    2405.21060). What is kept are copies of what goes into the mixer, and the products within a chunk. The factors were
    fitted to what autograd kept in ten shapes, to 10 %; kernels keep less.
    """
    channels = sum(part.in_channels for part in _convolutions(mixer))
    if hasattr(mixer, "head_v_dim"):
        heads, value, key, chunk = mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim, 64
        return int(heads * value * key), int(heads * (12 * key + 7 * value + 3 * chunk) + 2 * channels)
    if hasattr(mixer, "ssm_state_size"):
        heads, value, key = mixer.num_heads, mixer.head_dim, mixer.ssm_state_size
        return int(heads * value * key), int(heads * (3.2 * mixer.chunk_size + 6 * key + 4 * value) + 4 * channels)
    return 0, 0
