"""The architecture of a model from its `config.json` alone: layers, matrices, and their numbers of parameters.

Example:
    architecture_of({"model_type": "qwen3", "hidden_size": 1024, …}).num_parameters  # 596_049_920
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trireme.config.model.folder import caps_scores

Config = Mapping[str, Any]  # a config.json

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")
"""Kinds of layers in a config.json that attend; the others carry a state, or are an MLP alone."""

EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""Keys of a config.json that say how many experts each token is sent to."""


@dataclass(frozen=True)
class Family:
    """The departures of a family of models from Llama."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    layer_norms: int = 2
    tied: bool = False  # transformers' default if config.json is silent
    head_dim: int | None = None  # likewise; hidden / heads if None
    experts: str | None = None  # the key that says how many there are
    experts_used: int = 2  # experts of each token if config.json is silent
    expert_width: str = "intermediate_size"  # the key that says how wide each is
    expert_bias: bool = False
    sinks: bool = False  # one number per head
    window_pattern: int = 0  # one layer in this many attends to all; 0 if config.json lists or forbids windows
    wide_norms: bool = False  # the result of norms is float32 until it has been scaled
    gate_tensors: int = 2  # tensors as wide as the MLP that its gate keeps, besides gate and up


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "qwen3_moe": Family(qk_norm=True, experts="num_experts", experts_used=8, expert_width="moe_intermediate_size"),
    "mixtral": Family(experts="num_local_experts"),
    "gemma": Family(tied=True, head_dim=256, wide_norms=True),
    "gemma2": Family(tied=True, head_dim=256, layer_norms=4, window_pattern=2, wide_norms=True),
    "gemma3_text": Family(tied=True, head_dim=256, layer_norms=4, qk_norm=True, window_pattern=6, wide_norms=True),
    "gpt_oss": Family(
        qkv_bias=True,
        o_bias=True,
        head_dim=64,
        experts="num_local_experts",
        experts_used=4,
        expert_bias=True,
        sinks=True,
        window_pattern=2,
        wide_norms=True,
        gate_tensors=5,
    ),
}
"""Departures by `model_type`. For each, a test compares the count with that of the model as transformers builds it."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or one of every expert."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1  # one per expert
    used: int = 1  # copies that each token goes to

    @property
    def weights(self) -> int:
        return self.copies * self.inputs * self.outputs

    @property
    def num_parameters(self) -> int:
        return self.weights + (self.copies * self.outputs if self.bias else 0)

    @property
    def active(self) -> int:
        """Weights that a token meets."""
        return self.used * self.inputs * self.outputs

    @property
    def is_expert(self) -> bool:
        return self.copies > 1


@dataclass(frozen=True)
class Layer:
    matrices: tuple[Matrix, ...]
    vectors: int  # parameters of norms and the like
    window: int | None  # tokens that attention looks back; all if None
    attends: bool = True
    conv_state: int = 0  # values that each request carries from token to token: inputs of a convolution
    recurrent_state: int = 0  # likewise, of a state space or a delta net
    recurrence: int = 0  # float32 values per token that it keeps for its backward pass

    @property
    def num_parameters(self) -> int:
        return self.vectors + sum(matrix.num_parameters for matrix in self.matrices)

    @property
    def matrix_parameters(self) -> int:
        return sum(matrix.weights for matrix in self.matrices)

    @property
    def experts(self) -> Matrix | None:
        """One of the matrices of which each expert has a copy."""
        return next((matrix for matrix in self.matrices if matrix.is_expert), None)


@dataclass(frozen=True)
class Architecture:
    """A decoder: an embedding, layers, a norm, a head over the vocabulary."""

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    family: Family = Family()
    is_exact: bool = True  # its parameters are counted exactly, not as Llama's of the same sizes
    capped: bool = False  # attention scores go through a tanh, which `sdpa` leaves out
    latent: int = 0  # values per token and layer that stand for all keys and values (multi-head latent attention)
    outside: int | None = None  # parameters outside of the layers; None if not counted
    tower: int = 0  # parameters of the vision encoder; 0 without `[model.vlm]`
    recurrent_bytes: int | None = None  # bytes of a value of `recurrent_state`; the engine's if None

    def attends_apart(self, attention: str, cp: int = 1) -> bool:
        """Return whether samples that share a row attend one by one: with `sdpa`, if no layer has a window and no
        ranks share the row. Flash and flex attention know of samples by themselves."""
        return attention == "sdpa" and cp == 1 and all(layer.window is None for layer in self.layers)

    @property
    def query(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the head has as many, or is the same tensor."""
        return self.vocabulary * self.hidden

    @property
    def is_counted(self) -> bool:
        """Return whether it was read from the model that transformers builds, not worked out."""
        return self.outside is not None

    @cached_property
    def num_parameters(self) -> int:
        outside = self.embedding * (1 if self.tied else 2) + self.hidden if self.outside is None else self.outside
        return self.tower + outside + sum(layer.num_parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with: the head, and of the experts those that it is sent to."""
        return self.embedding + sum(matrix.active for layer in self.layers for matrix in layer.matrices)

    @property
    def largest_tensor(self) -> int:
        """The number of values of the largest tensor; all experts of a layer are one tensor."""
        return max(self.embedding, *(matrix.weights for layer in self.layers for matrix in layer.matrices))

    @property
    def largest_layer(self) -> Layer:
        return max(self.layers, key=lambda layer: layer.num_parameters)

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the parameters of LoRA: for each target matrix, one with `rank` rows and one with `rank` columns."""
        chosen = (matrix for layer in self.layers for matrix in layer.matrices if is_target(matrix, targets))
        return sum(matrix.copies * rank * (matrix.inputs + matrix.outputs) for matrix in chosen)


def is_target(matrix: Matrix, targets: tuple[str, ...]) -> bool:
    """Return whether a matrix gets an adapter. Experts hold gate and up in one tensor, which either name selects."""
    return bool({matrix.name, *_FUSED.get(matrix.name, ())} & {target.rpartition(".")[2] for target in targets})


_FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}


def architecture_of(config: Config) -> Architecture:
    """Read the architecture of a `config.json`. Families that are not in the table count as Llama (see `is_known`).

    Raises: KeyError if it lacks a size.
    """
    text = text_config(config)
    family = FAMILIES.get(text.get("model_type", ""), Family())
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    return Architecture(
        model_type=text.get("model_type", ""),
        hidden=hidden,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or family.head_dim or hidden // heads,
        vocabulary=text["vocab_size"],
        tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied)),
        layers=tuple(_layers(text, family)),
        family=family,
        is_exact=is_known(config),
        capped=caps_scores(config),
    )


def text_config(config: Config) -> Config:
    """Return the language model's part, which models that also see have in a table of its own."""
    inner = config.get("text_config")
    return config if inner is None else {"model_type": f"{config.get('model_type', '')}_text", **inner}


def is_known(config: Config) -> bool:
    """Return whether its family is in the table, and it is a decoder alone: one that also sees is held whole."""
    return "text_config" not in config and config.get("model_type") in FAMILIES


def experts_used(text: Config, default: int = 1) -> int:
    """Return how many experts of a layer each token is sent to; the most if layers differ."""
    found = next((text[key] for key in EXPERTS_USED if text.get(key)), default)
    return max(found) if isinstance(found, list) else int(found)


def _layers(text: Config, family: Family) -> Iterator[Layer]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = text.get("head_dim") or family.head_dim or hidden // heads
    norms = family.layer_norms * hidden + (2 * head_dim if family.qk_norm else 0) + (heads if family.sinks else 0)
    kinds = text.get("layer_types") or text.get("layers_block_type")

    for number in range(text["num_hidden_layers"]):
        attends = not kinds or kinds[number] in ATTENDING
        # A mixture of experts may have dense layers too: those that are listed, and those between sparse steps.
        is_dense = family.experts is None or number in (text.get("mlp_only_layers") or ())
        is_dense |= (number + 1) % text.get("decoder_sparse_step", 1) != 0
        inside = _dense(text) if is_dense else _experts(text, family)
        yield Layer((*_attention(text, family, head_dim), *inside), norms, window_of(text, family, number), attends)


def _attention(text: Config, family: Family, head_dim: int) -> Iterator[Matrix]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    query, key = heads * head_dim, (text.get("num_key_value_heads") or heads) * head_dim
    everywhere = text.get("attention_bias", False)
    bias, o_bias = family.qkv_bias or everywhere, family.o_bias or everywhere
    yield Matrix("q_proj", hidden, query, bias)
    yield Matrix("k_proj", hidden, key, bias)
    yield Matrix("v_proj", hidden, key, bias)
    yield Matrix("o_proj", query, hidden, o_bias)


def _dense(text: Config) -> Iterator[Matrix]:
    hidden, width, bias = text["hidden_size"], text["intermediate_size"], text.get("mlp_bias", False)
    yield Matrix("gate_proj", hidden, width, bias)
    yield Matrix("up_proj", hidden, width, bias)
    yield Matrix("down_proj", width, hidden, bias)


def _experts(text: Config, family: Family) -> Iterator[Matrix]:
    hidden, used = text["hidden_size"], experts_used(text, family.experts_used)
    count = text.get(str(family.experts)) or text["num_local_experts"]  # the name that transformers 5 writes
    width, bias = text[family.expert_width], family.expert_bias
    yield Matrix("router", hidden, count, bias)
    yield Matrix("gate_up_proj", hidden, 2 * width, bias, copies=count, used=used)
    yield Matrix("down_proj", width, hidden, bias, copies=count, used=used)


def window_of(text: Config, family: Family, number: int) -> int | None:
    window, types = text.get("sliding_window"), text.get("layer_types")
    # Configurations of Qwen have a window that is off unless a switch says otherwise.
    may = text.get("use_sliding_window", not text.get("model_type", "").startswith("qwen"))
    if not window or not may or number < text.get("max_window_layers", 0):
        return None

    # A list of layers in config.json takes precedence over the pattern of the family.
    if types:
        return window if types[number] == "sliding_attention" else None
    if family.window_pattern:
        every = text.get("sliding_window_pattern", family.window_pattern)
        return window if (number + 1) % every else None
    return window
