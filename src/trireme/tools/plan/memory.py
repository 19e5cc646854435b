"""Memory of an engine and of one rank of the trainer, by part, in bytes.

The trainer's parts are those at the moments of a step at which it may need most. FSDP2, as `trainer/model/sharding.py`
sets it up, keeps parameters, gradients and optimizer state in parts. One layer, and what lies outside of the layers, is
whole while it is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from trireme.algo.model.activations import (
    Pass,
    kept_by_attention,
    kept_by_layer,
    kept_by_matrices,
    layer_input,
    needs_mask,
)
from trireme.algo.model.architecture import Architecture, Layer
from trireme.algo.model.chips import GIB

CONTEXT_BYTES = 0.9 * GIB  # held by CUDA and NCCL, besides all tensors
GRAPHS_BYTES = 0.8 * GIB  # held by CUDA graphs
DIGEST_CHUNK = 128 << 20  # bytes of a tensor that are digested together on a GPU

MASTER_BYTES = 4  # bytes of a parameter that is trained, and of its gradient: float32
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 3 * 4 / 128, "muon": 4.0, "sgd": 4.0}
"""Bytes of the optimizer's state per parameter. In 8 bits, 3 float32 numbers for every 128 values are included."""

Parts = dict[str, float]


def digest_bytes(tensor_bytes: float) -> float:
    """Return what the digest of a tensor on a GPU takes: a chunk of it twice (`algo/digest.py`)."""
    return 2 * min(tensor_bytes, DIGEST_CHUNK)


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


@dataclass(frozen=True)
class Training:
    """Sizes that decide the memory of training a model.

    Example:
        Training(model, Pass(tokens=16384, value_bytes=2), shards=4, optimizer="adamw_8bit", ac_freq=1)
    """

    model: Architecture
    row: Pass
    shards: int = 1
    rows: int = 2  # rows of a rank per update; from the second on, it holds the gradients of those before
    ep: int = 1
    reduce_bytes: int = 4
    frozen_bytes: int = 2  # bytes of a parameter that is not trained, in the precision of the computation
    optimizer: Literal["adamw", "adamw_8bit", "muon", "sgd"] = "adamw"
    trained_whole: int = 0  # parameters of modules that are trained besides adapters
    trains_tower: bool = False  # the vision encoder too, whose activations are not counted
    ac_freq: int | None = None
    ac_mode: Literal["full", "selective"] = "full"
    offload_activations: bool = False
    offload_parameters: bool = False
    reshard: bool = True
    head_chunk: int = 1024
    compiled: bool = False  # its memory is counted as if it were not
    has_reference: bool = False
    served_bytes: int = 2
    bucket_bytes: int | None = 64 << 20  # None: engines read a copy of the whole model (CUDA IPC)

    @property
    def trained(self) -> int:
        """Return the number of parameters that are trained."""
        if self.row.targets is None:
            return self.model.num_parameters - self.frozen_tower
        return self.model.adapter_parameters(self.row.rank, self.row.targets) + self.trained_whole

    @property
    def frozen(self) -> int:
        """Return the number of parameters that adapters leave as they are."""
        return 0 if self.row.targets is None else self.model.num_parameters - self.trained_whole

    @property
    def frozen_tower(self) -> int:
        """Return the number of parameters of a vision encoder that is left as it is though the rest is trained whole.
        They are held in float32."""
        return 0 if self.frozen or self.trains_tower else self.model.tower

    @property
    def weight_bytes(self) -> float:
        return (MASTER_BYTES * (self.trained + self.frozen_tower) + self.frozen_bytes * self.frozen) / self.shards

    @property
    def gradient_bytes(self) -> float:
        return MASTER_BYTES * self.trained / self.shards

    @property
    def optimizer_bytes(self) -> float:
        if self.optimizer != "muon":
            return MOMENT_BYTES[self.optimizer] * self.trained / self.shards
        # Muon is for matrices: AdamW takes the rest (embedding, head, norms).
        layers = sum(layer.matrix_parameters for layer in self.model.layers)
        matrices = layers if self.row.targets is None else self.trained - self.trained_whole
        return (MOMENT_BYTES["muon"] * matrices + MOMENT_BYTES["adamw"] * (self.trained - matrices)) / self.shards

    @cached_property
    def moments(self) -> dict[str, Parts]:
        """Return the parts on the rank's device at each moment of a step, in the order in which they are shown."""
        model, row, layer = self.model, self.row, self.model.largest_layer
        value_bytes, tokens, embedding = row.value_bytes, row.own_tokens, self.model.embedding

        # These parts are there at all moments.
        settled = {"weights": self.weight_bytes, "optimizer": self.optimizer_bytes}
        if self.has_reference:  # with adapters, the base model is there already, and the copy is of these
            settled["reference"] = self.gradient_bytes
        if self.offload_parameters:
            settled = dict.fromkeys(settled, 0.0)
        gradients = 0.0 if self.offload_parameters else self.gradient_bytes
        before = gradients if self.rows > 1 else 0.0  # those of the rows before

        mask = (
            float(row.tokens**2) if any(each.attends and needs_mask(model, each, row) for each in model.layers) else 0.0
        )
        by_layer = [_kept(self, number) for number in range(len(model.layers))]
        kept = (2 * max(by_layer) if self.offload_activations else sum(by_layer)) + mask

        # The last norm keeps its input, and the head its hidden states with their gradient.
        final = tokens * model.hidden * (4 + 3 * value_bytes)
        # The layer at work computes again what it did not keep.
        whole = kept_by_layer(model, layer, row)
        still = kept_by_matrices(model, layer, row) if self.ac_mode == "selective" else 0.0
        again = max(0.0, whole - still) if self.ac_freq is not None else 0.0
        # A layer's activations have most gradients in the MLP: those of gate, up and their product.
        down = max(layer.matrices, key=lambda matrix: (matrix.name == "down_proj", matrix.used * matrix.inputs))
        between = tokens * value_bytes * 2 * down.used * (down.inputs + model.hidden)

        # Head and vision encoder are whole all through a pass; a separate embedding only while it is at work.
        root = value_bytes * (embedding + model.hidden + model.tower)
        gathered = root + _gathered(self, layer)
        head_gradient = reduction = 0.0
        if row.targets is None:
            # The head's gradient waits for the embedding's, with which it is reduced.
            head_gradient = value_bytes * embedding
            # A gradient is laid out to be reduced, next to this rank's part. A tied embedding adds up two.
            laid_out = value_bytes + self.reduce_bytes * (1 + 1 / self.shards)
            reduction = embedding * (laid_out + value_bytes * model.tied)
            reduction += model.tower * laid_out * self.trains_tower

        # In the first row, this layer's gradient is not there yet.
        others = gradients if self.rows > 1 else gradients * (len(model.layers) - 1) / len(model.layers)

        update = 0.0
        if self.optimizer == "muon":  # several copies of a whole matrix; fused kernels of the others need nothing
            update = 4.0 * MASTER_BYTES * max(matrix.weights for each in model.layers for matrix in each.matrices)

        # The largest tensor is there whole: as it is held, as it is sent, and for its digest. What was sent before it
        # is in two buckets, or with memory handles in a copy of the model.
        sent, largest = self.served_bytes * model.num_parameters, self.served_bytes * model.largest_tensor
        transfers: float = model.largest_tensor * MASTER_BYTES + largest + digest_bytes(largest)
        transfers += sent if self.bucket_bytes is None else 2.0 * self.bucket_bytes

        return {
            "head": settled
            | {"gradients": before, "activations": kept + final, "gathered": root, "logits": _logits(self)},
            "first layer backward": settled
            | {"gradients": before + head_gradient, "activations": kept + again + between, "gathered": gathered},
            "last layer backward": settled
            | {
                "gradients": others + head_gradient,
                "activations": kept_by_attention(model, layer, row) + mask,
                "gathered": root + _gathered_or_reduced(self, layer),
            },
            "embedding backward": settled | {"gradients": gradients + reduction, "gathered": root, "activations": 0.0},
            "update": settled | {"gradients": gradients, "update": update},
            "publish": settled | {"transfers": transfers},
        }

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Parts:
        return self.moments[self.fullest]

    @property
    def host(self) -> Parts:
        """Return what the rank needs of its machine's memory: checkpoints are staged there, and what is offloaded lives
        there."""
        values = self.gradient_bytes
        # A checkpoint holds the trained parameters, as many bytes as their gradients, and the optimizer.
        parts = {"checkpoint": values + self.optimizer_bytes}
        if self.offload_parameters:
            parts["parameters"] = self.weight_bytes + self.optimizer_bytes + values
            parts["parameters"] += values if self.has_reference else 0.0
        if self.offload_activations:
            parts["activations"] = sum(_kept(self, number) for number in range(len(self.model.layers)))
        return parts


def _kept(training: Training, number: int) -> float:
    """Return what a layer keeps for its backward pass."""
    layer = training.model.layers[number]
    if training.ac_freq is None or number % training.ac_freq:
        return kept_by_layer(training.model, layer, training.row)
    if training.ac_mode == "selective":
        return kept_by_matrices(training.model, layer, training.row)
    return layer_input(training.model, training.row)


def _logits(training: Training) -> float:
    """Return the bytes of a chunk's logits, of their logprobs in float32, and of the gradient of these, from which the
    head's gradient is made.

    With several chunks and a trained head, the sum of the head's gradients is there too, in float32.
    """
    row, model = training.row, training.model
    values = min(training.head_chunk, row.own_tokens) * model.vocabulary
    chunk = values * (8.0 + row.value_bytes)

    # Adapters leave the head as it is, so it has no gradient.
    if row.targets is not None:
        return chunk
    sums = 4.0 * model.embedding if row.own_tokens > training.head_chunk else 0.0
    return sums + max(chunk, row.value_bytes * (values + model.embedding))


def _layer_values(training: Training, layer: Layer) -> float:
    """Return the parameters that a rank gathers of a layer."""
    experts = sum(matrix.num_parameters for matrix in layer.matrices if matrix.is_expert)
    return layer.num_parameters - experts + experts / training.ep


def _gathered(training: Training, layer: Layer) -> float:
    """Return the layer at work and, if there are several ranks, the next one, which is fetched meanwhile."""
    # Without resharding a layer stays whole after its forward pass.
    if not training.reshard:
        return training.row.value_bytes * sum(_layer_values(training, each) for each in training.model.layers)
    return (2 if training.shards > 1 else 1) * training.row.value_bytes * _layer_values(training, layer)


def _gathered_or_reduced(training: Training, layer: Layer) -> float:
    """Return the larger of two moments: the layer whole, with its gradient, while that of the one before is reduced.
    Or, once the layer has been released, its gradient as it is laid out, and this rank's part of it."""
    num_layers = len(training.model.layers)
    values = training.trained / num_layers if training.frozen else _layer_values(training, layer)
    whole, laid_out = training.row.value_bytes * values, training.reduce_bytes * values
    before = laid_out if num_layers > 1 else 0.0
    return max(_gathered(training, layer) + whole + before, laid_out * (1 + 1 / training.shards))


def changed(training: Training, **changes: object) -> Training:
    """Return a copy with other settings; those of `Pass` by their names too."""
    of_row = {name: value for name, value in changes.items() if name in Pass.__dataclass_fields__}
    others = {name: value for name, value in changes.items() if name not in of_row}
    return replace(training, row=replace(training.row, **of_row), **others)  # type: ignore[arg-type]
