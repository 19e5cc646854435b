"""Memory of an engine by part, in bytes, and how a configuration sets it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trireme.algo.model.architecture import Architecture
from trireme.algo.model.chips import GIB
from trireme.config.inference import LOW_BIT
from trireme.config.run import RunConfig
from trireme.tools.plan.machine import Machine
from trireme.tools.plan.sizes import BYTES

CONTEXT_BYTES = 0.9 * GIB  # held by CUDA and NCCL, besides all tensors
GRAPHS_BYTES = 0.8 * GIB  # held by CUDA graphs
DIGEST_CHUNK = 128 << 20  # bytes of a tensor that are digested together on a GPU
LARGE_GPU, HUGE_GPU = 70 * GIB, 160 * GIB  # memory sizes at which vLLM takes in more tokens at once

Parts = dict[str, float]


@dataclass(frozen=True)
class Serving:
    """Sizes that decide the memory of serving a model.

    Example:
        Serving(model, memory=79 * GIB, utilization=0.9, max_model_len=16384)
    """

    model: Architecture
    memory: float  # bytes of each GPU
    utilization: float = 0.9
    value_bytes: int = 2
    matrix_bytes: float | None = None  # bytes of a weight in a layer's matrices, if the engine rounds them
    tp: int = 1
    max_model_len: int = 2048
    max_num_seqs: int = 256
    batched_tokens: int = 8192  # most tokens that a step of the engine takes in
    eager: bool = False
    kv_cache_bytes: float | None = None  # on CPU it is configured; elsewhere it is what is left
    bucket_bytes: int | None = 64 << 20  # None: the trainer's own memory is read (CUDA IPC)
    is_shared: bool = False  # the GPU is the trainer's too: nothing may be taken besides the share

    @property
    def is_on_cpu(self) -> bool:
        return self.kv_cache_bytes is not None

    @cached_property
    def parts(self) -> Parts:
        """Return everything but the KV cache. vLLM splits the embedding too."""
        model = self.model

        # Activations are a step's tokens in the widest layer, next to the residual stream. The logits of the sampled
        # tokens are held in the model's precision, in float32, and as probabilities.
        width = max(2 * matrix.outputs * matrix.used for layer in model.layers for matrix in layer.matrices)
        inside = self.batched_tokens * self.value_bytes * (4 * model.hidden + width / self.tp)
        logits = self.max_num_seqs * model.vocabulary * (self.value_bytes + 8.0)

        weights: float = self.value_bytes * model.num_parameters
        if self.matrix_bytes is not None:
            weights += (self.matrix_bytes - self.value_bytes) * sum(each.matrix_parameters for each in model.layers)
        parts = {"weights": weights / self.tp, "activations": inside + logits}

        # An engine loads weights while it is paused, so an update takes the memory of activations first.
        parts["transfers"] = max(0.0, self.update_bytes - parts["activations"])
        if self.is_on_cpu:
            return parts
        graphs = {} if self.eager else {"CUDA graphs": GRAPHS_BYTES}
        return parts | graphs | {"CUDA": CONTEXT_BYTES}

    @property
    def update_bytes(self) -> float:
        """Return what an update takes at its fullest, besides the weights that it replaces.

        Let M be vLLM's largest module (the embedding, all experts of a layer, or a fused pair of matrices) and T the
        largest tensor that is sent, experts one by one. At once there are:

        - a bucket of T alone, and the next one, which comes in while it is read (`CollectiveReceiver._whole`). With
          memory handles there are none.
        - M whole, as it was sent: copies wait until their module is complete (vLLM's `online_process_loader`).
        - M once more, of which a rank has its part (`materialize_layer`); or shortly before, for the digest of its last
          tensor, twice a chunk (`tensor_digest`).

        Example:
            Qwen3-0.6B in bfloat16, M = T = 297 MiB: 3 M + 64 MiB = 0.93 GiB by NCCL, 2 M = 0.58 GiB by handles.
        """
        model = self.model
        dense = max(max(each.inputs * each.outputs for each in layer.matrices) for layer in model.layers)
        experts = max(sum(each.weights for each in layer.matrices if each.is_expert) for layer in model.layers)
        sent = self.value_bytes * max(model.embedding, dense)
        module = self.value_bytes * max(model.embedding, 2 * dense, experts)
        buckets = 0 if self.bucket_bytes is None else max(self.bucket_bytes, sent) + self.bucket_bytes
        return buckets + module + max(module / self.tp, digest_bytes(sent))

    @property
    def room(self) -> float:
        """Return the room for the KV cache; below 0 if not even the weights fit.

        vLLM measures before the first update, which then takes memory besides the share. On a GPU that the trainer uses
        too, the cache is given by this plan (`size_kv_cache`), and an update has its memory inside the share.
        """
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        beside = 0.0 if self.is_shared else self.parts["transfers"]
        return self.utilization * self.memory - sum(self.parts.values()) + beside

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
        """Return keys, values and states of one request, on one GPU. Layers with a window hold no more than that.

        A state does not grow with the request: for each channel of a convolution the inputs before the current one, and
        for each head of a state space or delta net a matrix (vLLM's `MambaStateShapeCalculator`). vLLM pads both to
        pages of one size, which is not counted.
        """
        model = self.model
        # With more ranks than heads of keys and values, ranks hold copies of a head.
        heads = max(1.0, model.kv_heads / self.tp)
        held = sum(min(length, layer.window or length) for layer in model.layers if layer.attends)
        return (model.latent or 2.0 * heads * model.head_dim) * self.value_bytes * held + self.state_bytes

    @property
    def state_bytes(self) -> float:
        """Return the states of one request in layers that do not attend, or not only, on one GPU."""
        recurrent = self.model.recurrent_bytes or self.value_bytes
        states = (self.value_bytes * each.conv_state + recurrent * each.recurrent_state for each in self.model.layers)
        return sum(states) / self.tp

    def concurrency(self, length: float, asked: float) -> float:
        """Return how many requests of this length really run at once, of those that are asked for."""
        return max(1.0, min(asked, self.max_num_seqs, self.room / self.kv_bytes(length)))


def serving_of(config: RunConfig, model: Architecture, machine: Machine) -> Serving:
    inference, on_cpu = config.inference, config.device == "cpu"
    max_model_len = inference.model.max_model_len or config.seq_len

    # vLLM's own defaults for the tokens of a step.
    is_large = machine.chip.memory >= LARGE_GPU and "A100" not in machine.chip.name
    batched = 16384 if machine.chip.memory >= HUGE_GPU else 8192 if is_large else 2048
    batched = max(2048, max_model_len) if on_cpu else batched

    return Serving(
        model,
        memory=machine.chip.memory,
        utilization=inference.gpu_share,
        value_bytes=BYTES[config.served_dtype],
        matrix_bytes=1 + 1 / 32 if inference.args.get("quantization") in LOW_BIT else None,  # one scale for 32, at most
        tp=inference.parallel.tp,
        max_model_len=max_model_len,
        max_num_seqs=inference.max_num_seqs,
        batched_tokens=int(inference.args.get("max_num_batched_tokens", batched)),
        eager=inference.model.enforce_eager or on_cpu,
        kv_cache_bytes=inference.cpu.kv_cache_gib * GIB if on_cpu else None,
        bucket_bytes=None if config.weight_broadcast.type == "ipc" else config.weight_broadcast.bucket_mib << 20,
        is_shared=config.shares_gpus,
    )


def digest_bytes(tensor_bytes: float) -> float:
    """Return what the digest of a tensor on a GPU takes: a chunk of it twice (`algo/digest.py`)."""
    return 2 * min(tensor_bytes, DIGEST_CHUNK)
