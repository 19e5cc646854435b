"""Memory of an engine on each of its GPUs, and the tokens and requests that the rest has room for. In bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trireme.algo.model.architecture import Architecture
from trireme.algo.model.chips import GIB

CONTEXT_BYTES = 0.9 * GIB  # of CUDA and NCCL, besides all tensors
GRAPHS_BYTES = 0.8 * GIB  # of CUDA graphs

Parts = dict[str, float]


@dataclass(frozen=True)
class Serving:
    """Sizes that decide the memory of serving a model.

    Example:
        Serving(model, memory=79 * GIB, utilization=0.9, max_model_len=16384)
    """

    model: Architecture
    memory: float  # of each GPU
    utilization: float = 0.9
    value_bytes: int = 2
    tp: int = 1
    max_model_len: int = 2048
    max_num_seqs: int = 256
    batched_tokens: int = 8192  # that a step of the engine takes in at most
    eager: bool = False
    kv_cache_bytes: float | None = None  # on CPU it is configured; elsewhere it is what is left
    bucket_bytes: int = 64 << 20

    @property
    def is_on_cpu(self) -> bool:
        return self.kv_cache_bytes is not None

    @cached_property
    def parts(self) -> Parts:
        """Return everything but the KV cache. vLLM splits the embedding too."""
        model = self.model
        # a step's tokens in the widest layer, besides the residual stream; and the logits of those that are sampled, in
        # the model's precision, in float32, and as probabilities
        width = max(2 * matrix.outputs * matrix.used for layer in model.layers for matrix in layer.matrices)
        inside = self.batched_tokens * self.value_bytes * (4 * model.hidden + width / self.tp)
        logits = self.max_num_seqs * model.vocabulary * (self.value_bytes + 8.0)
        weights = self.value_bytes * model.num_parameters / self.tp
        parts = {"weights": weights, "activations": inside + logits, "transfers": float(self.bucket_bytes)}
        if self.is_on_cpu:
            return parts
        graphs = {} if self.eager else {"CUDA graphs": GRAPHS_BYTES}
        return parts | graphs | {"CUDA": CONTEXT_BYTES}

    @property
    def room(self) -> float:
        """Return the room for the KV cache; below 0 where not even the weights fit."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        return self.utilization * self.memory - sum(self.parts.values())

    @property
    def peak(self) -> float:
        if self.is_on_cpu:
            return sum(self.parts.values()) + self.room
        return max(self.utilization * self.memory, sum(self.parts.values()))

    @property
    def num_requests(self) -> float:
        """Return how many requests of `max_model_len` run at once."""
        return max(0.0, self.room / self.kv_bytes(self.max_model_len))

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the KV cache holds, in requests of `max_model_len`."""
        return int(self.num_requests * self.max_model_len)

    @property
    def fits(self) -> bool:
        return self.num_requests >= 1

    def kv_bytes(self, length: float) -> float:
        """Return keys and values of one request, on one GPU. Layers with a window hold no more than that."""
        model = self.model
        heads = max(1.0, model.kv_heads / self.tp)
        held = sum(min(length, layer.window or length) for layer in model.layers)
        return 2.0 * heads * model.head_dim * self.value_bytes * held

    def concurrency(self, length: float, asked: float) -> float:
        """Return how many requests of this length really run at once, of those that are asked for."""
        return max(1.0, min(asked, self.max_num_seqs, self.room / self.kv_bytes(length)))
